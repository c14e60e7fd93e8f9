"""The properties of drafts with siblings, and faults that each of them notices."""

import dataclasses

import pytest

from cactus_theory.decoding import ModelDrafter, NGram, Siblings
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import siblings
from cactus_theory.decoding.models import cache
from cactus_theory.verify import Tree
from tests.amounts import amount, some
from tests.kits.drafters import assert_drafter_properties

ROUNDS = amount(2, 20)


@pytest.fixture(scope="module")
def pair(make_model, make_draft):
    target = make_model(layers=1, vocab=16)
    return target, make_draft(target, noise=0.5)


def check(pair, drafter, verifier="tree", **options):
    options = {"rounds": ROUNDS, "num_draft_tokens": 3, "policy": "band:price=1"} | options
    return assert_drafter_properties(drafter, pair[0], verifier=verifier, **options)


@pytest.mark.parametrize("runs", some(["tree", "tree:runs=chain"], 1))
@pytest.mark.parametrize("name", some(["model", "stopped", "greedy", "ngram"], 2))
def test_drafts_with_siblings_have_every_property(pair, name, runs):
    model = pair[1]
    inner = {
        "model": ModelDrafter(model),
        "stopped": ModelDrafter(model, stop=0.4),
        "greedy": ModelDrafter(model, greedy=True),
        "ngram": NGram(),
    }[name]
    own = {"model": model} if name in ("model", "stopped") else {}
    drafter = Siblings(inner, deterministic=name in ("model", "greedy"))
    assert check(pair, drafter, runs, **own) > 2 * ROUNDS


def late(trunk, fixed, m, deterministic):
    """Leave the drawn token out of what is said to be deterministic: chosen after the draw."""
    others = [
        [[n for n in own if n != token] for token, own in zip(ids, rows, strict=False)]
        for ids, rows in zip(trunk.token_ids.tolist(), fixed, strict=True)
    ]
    return siblings_of(trunk, others, m)


def declared_off(trunk, fixed, m, deterministic):
    """Draw from p, and declare the row without the deterministic tokens."""
    rows = trunk.probs.clone()
    for row, own in enumerate(fixed):
        for place, tokens in enumerate(own):
            rows[row, place, tokens] = 0.0
    rows = rows / rows.sum(-1, keepdim=True)
    return dataclasses.replace(siblings_of(trunk, fixed, m), probs=rows)


def by_place(trunk, fixed, m, deterministic):
    """Look rows up by the place of the drawn token after those beside it."""
    draft = siblings_of(trunk, fixed, m)
    rows = trunk.probs.roll(1, 1)
    return dataclasses.replace(draft, probs=rows)


siblings_of = siblings.with_siblings


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (late, "what is deterministic beside drawn token .* must not depend on its coin"),
        (declared_off, "tokens must be drawn from the reported rows, by their coins"),
        (by_place, "tokens must be drawn from the reported rows, by their coins"),
    ],
)
def test_planted_drafters_are_noticed(pair, monkeypatch, fault, message):
    monkeypatch.setattr(siblings, "with_siblings", fault)
    with pytest.raises(AssertionError, match=message):
        check(pair, Siblings(ModelDrafter(pair[1]), deterministic=True))


def test_positions_by_index_are_noticed(pair, monkeypatch):
    tree = cache._tree

    def by_index(*given):
        return dataclasses.replace(tree(*given), positions=given[3])

    monkeypatch.setattr(cache, "_tree", by_index)
    with pytest.raises(AssertionError, match="row of node .* must be that of its own text"):
        check(pair, Siblings(ModelDrafter(pair[1])))


def test_cousins_in_the_mask_are_noticed(pair, monkeypatch):
    ancestors = cache._ancestors
    monkeypatch.setattr(cache, "_ancestors", lambda parents: ancestors(parents).cummax(1).values)
    with pytest.raises(AssertionError, match="row of node .* must be that of its own text"):
        check(pair, Siblings(ModelDrafter(pair[1])))


def test_cousins_in_a_processors_context_are_noticed(pair, monkeypatch):
    def with_cousins(self, row, path):
        return self.prefix(row, path[-1] + 1 if path else 0)

    monkeypatch.setattr(Texts, "path_ids", with_cousins)
    with pytest.raises(AssertionError, match="own text .* under a processor"):
        check(pair, Siblings(ModelDrafter(pair[1])))


class Sharing(Tree):
    """Draws what follows a caught token with the number that drew it."""

    def verify(self, assigned, target_probs, draft, accept, draw):
        shared = draw[:, :1].expand_as(draw) if draw.ndim > 1 else draw
        return super().verify(assigned, target_probs, draft, accept, shared)


def test_a_number_shared_by_siblings_and_what_follows_is_noticed(pair):
    with pytest.raises(AssertionError, match="must have numbers of their own; with"):
        check(pair, Siblings(ModelDrafter(pair[1])), Sharing())
