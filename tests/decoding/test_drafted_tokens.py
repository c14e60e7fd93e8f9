"""Drafted tokens are exactly what the reported rows and the coins give, and coins are used once.

A drafter that samples from rows other than the ones it reports breaks every acceptance rule
and may still pass a test of frequencies; so may a number that is used twice.
"""

import dataclasses
import itertools

import pytest
import torch

from cactus_theory.decoding import EarlyExit, ModelDrafter, NGram, Siblings, coins, generate
from cactus_theory.decoding.drafters import siblings
from cactus_theory.decoding.drafters.model import ModelDrafting
from cactus_theory.decoding.models import cache
from cactus_theory.decoding.text import Texts
from cactus_theory.verify import Chain, Tree
from tests.amounts import amount, some
from tests.kits.drafters import assert_drafter_properties

ROUNDS = amount(5, 40)
VERIFIERS = ("chain", "block")


def drafters(target, model):
    """Return every drafter, with the model that its rows must come from."""
    return {
        "model": (ModelDrafter(model), model),
        "greedy": (ModelDrafter(model, greedy=True), None),
        "stopped": (ModelDrafter(model, stop=0.4), model),
        "early exit": (EarlyExit(1), EarlyExit(1).of(target)),
        "ngram": (NGram(), None),
    }


def check_tree(pair, drafter, verifier="tree", **options):
    options = {"rounds": amount(2, 20), "num_draft_tokens": 3, "policy": "band:price=1"} | options
    return assert_drafter_properties(drafter, pair[0], verifier=verifier, **options)


@pytest.fixture(scope="module")
def pair(make_model, make_draft):
    target = make_model(layers=2, vocab=16)
    return target, make_draft(target)


@pytest.mark.parametrize(
    ("name", "verifier"),
    some(
        itertools.product(("model", "greedy", "stopped", "early exit", "ngram"), VERIFIERS),
        4,
    ),
)
def test_drafters_have_every_property(pair, name, verifier):
    target, model = pair
    drafter, own = drafters(target, model)[name]
    options = {"model": own, "verifier": verifier, "rounds": ROUNDS}
    checked = assert_drafter_properties(drafter, target, policy="band:price=1", **options)
    least = {"ngram": 1, "stopped": 8}.get(name, 15)
    assert checked > least * ROUNDS


@pytest.mark.parametrize("name", some(["model", "stopped", "greedy", "ngram"], 2))
def test_drafts_with_siblings_have_every_property(pair, name):
    inner, own = drafters(*pair)[name]
    drafter = Siblings(inner, deterministic=name in ("model", "greedy"))
    assert check_tree(pair, drafter, **({"model": own} if own else {})) > 4


def test_a_draft_longer_than_the_text_takes_no_memory(pair):
    sizes = {"policy": "band:price=1", "max_new_tokens": 4, "seed": 3}
    ids = torch.tensor([[5, 6, 7]])
    found = generate(*pair, ids, num_draft_tokens=10**9, **sizes)
    assert found.output_token_ids.shape == (1, 4)
    same = generate(*pair, ids, num_draft_tokens=3, **sizes)
    assert torch.equal(found.output_token_ids, same.output_token_ids)
    with pytest.raises(ValueError, match="num_draft_tokens: must be an integer of at least 1"):
        generate(*pair, ids, num_draft_tokens=0, **sizes)


class Warmer(ModelDrafting):
    """Draws from rows of another temperature, and reports them."""

    def _step(self, offset, wanted, coin):
        before = self.warp.temperature
        self.warp.temperature = before / 1.03
        token = super()._step(offset, wanted, coin)
        self.warp.temperature = before
        return token


class Sharper(Warmer):
    """Draws from p^1.03 and reports p."""

    def _step(self, offset, wanted, coin):
        token = super()._step(offset, wanted, coin)
        rows = self.probs[:, offset] ** (1 / 1.03)
        self.probs[:, offset] = rows / rows.sum(-1, keepdim=True)
        return token


class Undecided(ModelDrafting):
    """Draws its tokens and says that it is deterministic."""

    def propose(self, wanted, coins):
        return dataclasses.replace(super().propose(wanted, coins), probs=None)


class Unwritten(ModelDrafting):
    """Writes another token into the texts than it reports."""

    def propose(self, wanted, coins):
        draft = super().propose(wanted, coins)
        self.texts.propose(0, (draft.token_ids[:, 0] + 1) % 16)
        return draft


class Remembering(ModelDrafting):
    """Leaves its coins where a verifier can find them."""

    def propose(self, wanted, coins):
        Remembering.coins = coins
        return super().propose(wanted, coins)


class Thrifty(Chain):
    """Replaces a rejected token with the number that drew it."""

    name = "thrifty"

    def verify(self, assigned, target_probs, draft, accept, draw):
        coins = Remembering.coins
        return super().verify(assigned, target_probs, draft, accept, coins[:, 0])


@dataclasses.dataclass(frozen=True)
class Planted(ModelDrafter):
    drafting: type = ModelDrafting

    def begin(self, setting):
        return self.drafting(setting, self.model, self.greedy)


@pytest.mark.parametrize(
    ("drafting", "message"),
    [
        (Sharper, "tokens must be drawn from the reported rows, by their coins"),
        (Warmer, "rows must be the model's own after .* they differ by"),
        (Undecided, "a draft without rows must not depend on the coins"),
        (Unwritten, "must write its tokens into the texts"),
    ],
)
def test_planted_drafters_are_noticed(pair, drafting, message):
    target, model = pair
    drafter = Planted(model, drafting=drafting)
    with pytest.raises(AssertionError, match=message):
        assert_drafter_properties(drafter, target, model=model, rounds=ROUNDS)


def test_a_number_shared_by_drafter_and_verifier_is_noticed(pair):
    target, model = pair
    with pytest.raises(AssertionError, match="must have numbers of their own; with"):
        drafter = Planted(model, drafting=Remembering)
        assert_drafter_properties(drafter, target, verifier=Thrifty(), rounds=1)


@pytest.mark.parametrize("singly", [False, True])
def test_a_decode_that_uses_a_number_twice_is_noticed(pair, monkeypatch, singly):
    toss = coins.toss

    def shared(texts, wanted, coins=int):
        draft, accept, draw = toss(texts, wanted, coins)
        if (len(wanted) == 1) == singly:
            draw = draft[:, 0]
        return draft, accept, draw

    monkeypatch.setattr(coins, "toss", shared)
    with pytest.raises(AssertionError, match="a uniform number must be used once"):
        assert_drafter_properties(pair[1], pair[0], rounds=1)


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


siblings_of, tree_of, ancestors_of = siblings.with_siblings, cache._tree, cache._ancestors


def by_index(*given):
    return dataclasses.replace(tree_of(*given), positions=given[3])


def cousins_seen(parents):
    return ancestors_of(parents).cummax(1).values


def cousins_shown(self, row, path):
    return self.prefix(row, path[-1] + 1 if path else 0)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (siblings, "with_siblings", late, "is deterministic .* must not depend on its coin"),
        (siblings, "with_siblings", declared_off, "drawn from the reported rows, by their coins"),
        (siblings, "with_siblings", by_place, "drawn from the reported rows, by their coins"),
        (cache, "_tree", by_index, "row of node .* must be that of its own text"),
        (cache, "_ancestors", cousins_seen, "row of node .* must be that of its own text"),
        (Texts, "path_ids", cousins_shown, "own text .* under a processor"),
    ],
)
def test_planted_siblings_are_noticed(pair, monkeypatch, owner, name, fault, message):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=message):
        check_tree(pair, Siblings(ModelDrafter(pair[1]), deterministic=owner is siblings))


class Sharing(Tree):
    """Draws what follows a caught token with the number that drew it."""

    def verify(self, assigned, target_probs, draft, accept, draw):
        shared = draw[:, :1].expand_as(draw) if draw.ndim > 1 else draw
        return super().verify(assigned, target_probs, draft, accept, shared)


def test_a_number_shared_by_siblings_and_what_follows_is_noticed(pair):
    with pytest.raises(AssertionError, match="must have numbers of their own; with"):
        check_tree(pair, Siblings(ModelDrafter(pair[1])), Sharing())
