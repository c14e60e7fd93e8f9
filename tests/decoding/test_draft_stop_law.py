"""A draft may stop by what it has drafted; what it has drafted may not be withdrawn.

Laws are enumerated through the drafter itself: one row of a batch for every path, with coins
that draw it.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ModelDrafter
from cactus_theory.decoding._sampling import Warp
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import Setting
from cactus_theory.decoding.drafters import stop as stop_file
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.policies._forms import FixedTarget
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft

START, VOCAB, WIDTH = [1, 0], 3, 3
TEXTS = list(itertools.product(range(VOCAB), repeat=WIDTH + 1))
PATHS = list(itertools.product(range(VOCAB), repeat=WIDTH))
# sums of 81 products of float64 rows
EXACT = 1e-12
# what a withdrawn token must move the law by at least, to call the enumeration sharp
SEEN = 1e-3
# an expected acceptance that is the probability itself: likely and unlikely tokens part early
PLACES = (0.0, 1.0)
STOPS = (0.1, 0.2, 0.35)


class Rows:
    """The rows of a model after every prefix of up to WIDTH tokens."""

    def __init__(self, model):
        self.after = {}
        for length in range(WIDTH + 1):
            prefixes = list(itertools.product(range(VOCAB), repeat=length))
            ids = torch.tensor([START + list(prefix) for prefix in prefixes])
            with torch.inference_mode():
                rows = model(input_ids=ids, use_cache=False).logits[:, -1].double().softmax(-1)
            self.after |= dict(zip(prefixes, rows, strict=True))

    def share(self, text, first=0):
        """Return the probability of a text's tokens from number ``first`` on."""
        return np.prod([float(self.after[text[:i]][text[i]]) for i in range(first, len(text))])


@pytest.fixture(autouse=True)
def parting(monkeypatch):
    monkeypatch.setattr(stop_file, "PLACES", PLACES)
    monkeypatch.setattr(stop_file, "ACCEPTANCE", PLACES)


@pytest.fixture(scope="module")
def three_tokens(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=1, seed=3, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    model = make_draft(target, noise=0.6, seed=2)
    return target, model, Rows(target), Rows(model)


def opened(drafter, target, prompts, width):
    """Return the drafter at work on these prompts, and their texts."""
    texts = Texts(prompts, 60, frozenset(), torch.device("cpu"))
    warp = Warp(1.0, (), [0] * len(prompts))
    return drafter.begin(Setting(target, texts, warp, Stopwatch(), width)), texts


def every_draft(target, model, p, stop):
    """Return what is drafted on each path, once each, and with what probability."""
    drafting, _ = opened(ModelDrafter(model, stop=stop), target, [START] * len(PATHS), WIDTH)
    coins = torch.empty(len(PATHS), WIDTH, dtype=torch.float64)
    for row, path in enumerate(PATHS):
        for place, token in enumerate(path):
            own = p.after[path[:place]]
            coins[row, place] = own[:token].sum() + own[token] / 2
    with torch.inference_mode():
        draft = drafting.propose([WIDTH] * len(PATHS), coins)
    found = {}
    for row, (path, count) in enumerate(zip(PATHS, draft.counts, strict=True)):
        assert draft.token_ids[row, :count].tolist() == list(path[:count])
        found.setdefault(path[:count], row)
    rows = list(found.values())
    counts = [draft.counts[row] for row in rows]
    at = draft.token_ids[rows, :, None]
    each = draft.probs[rows].gather(-1, at)[..., 0]
    weights = [float(own[:count].prod()) for own, count in zip(each, counts, strict=True)]
    limits = None if draft.limits is None else [WIDTH] * len(rows)
    return Draft(draft.token_ids[rows], counts, draft.probs[rows], limits=limits), weights


def law_of(verifier, rule, draft, q):
    """Return the verdict's law on each draft; target rows that are not read are uniform."""
    shape = (len(draft.counts), draft.token_ids.shape[1] + 1, VOCAB)
    rows = torch.full(shape, 1 / VOCAB, dtype=torch.float64)
    for row, count in enumerate(draft.counts):
        for place in range(count + 1):
            rows[row, place] = q.after[tuple(draft.token_ids[row, :place].tolist())]
    return find_verifier(verifier).law(Assignment((rule,)), rows, draft)


def emitted_starts(law, draft, weights):
    """Return {tokens of one round: probability}."""
    found = {}
    for row, (count, weight) in enumerate(zip(draft.counts, weights, strict=True)):
        path = tuple(draft.token_ids[row].tolist())
        for accepted in range(count + 1):
            reached = weight * float(law.stop[row, accepted])
            for token, share in enumerate(law.last[row, accepted].tolist()):
                start = (*path[:accepted], token)
                found[start] = found.get(start, 0.0) + reached * share
    return found


def distance_from_target(starts, q):
    """Return the largest error of the law of WIDTH + 1 tokens, rounds continued by the target."""
    worst = 0.0
    for text in TEXTS:
        own = sum(
            starts.get(text[:length], 0.0) * q.share(text, length) for length in range(1, WIDTH + 2)
        )
        worst = max(worst, abs(own - q.share(text)))
    return worst


def withdrawn(draft):
    """Return the draft without the tokens that ended it."""
    return replace(draft, counts=[count - (count < WIDTH) for count in draft.counts])


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_draft_emits_the_targets_law(three_tokens, verifier, stop):
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, stop)
    assert sum(weights) == pytest.approx(1, abs=EXACT)
    law = law_of(verifier, ct.policy("speculative"), draft, q)
    assert distance_from_target(emitted_starts(law, draft, weights), q) < EXACT


def test_drafts_of_every_length_are_enumerated(three_tokens):
    target, model, _, p = three_tokens
    lengths = [set(every_draft(target, model, p, own)[0].counts) for own in STOPS]
    assert set.union(*lengths) == {1, 2, 3} and all(len(own) > 1 for own in lengths)


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_the_token_that_ended_a_draft_is_noticed(three_tokens, verifier):
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, STOPS[1])
    law = law_of(verifier, ct.policy("speculative"), withdrawn(draft), q)
    assert distance_from_target(emitted_starts(law, withdrawn(draft), weights), q) > SEEN


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_in_the_smallest_example_emits_six_to_four(verifier):
    """q = (.5, .5), p = (.8, .2): keeping the doubtful token emits q, dropping it (.6, .4)."""
    q, p = (torch.tensor([own], dtype=torch.float64) for own in ([0.5, 0.5], [0.8, 0.2]))
    for counts, emits in (([1, 1], (0.5, 0.5)), ([1, 0], (0.6, 0.4))):
        draft = Draft(torch.tensor([[0], [1]]), counts, p.expand(2, 1, 2))
        rule = Assignment((ct.policy("speculative"),))
        law = find_verifier(verifier).law(rule, q.expand(2, 2, 2), draft)
        refused = law.stop[:, :1] * law.last[:, 0]
        kept = torch.eye(2).double() * law.stop[:, 1:]
        found = p[0] @ (refused + kept)
        assert found.tolist() == pytest.approx(emits, abs=EXACT)


@dataclass(frozen=True)
class Ahead(FixedTarget):
    """Leans to the draft by how many drafted tokens are to follow."""

    name = "ahead"

    def target(self, q, p):
        return q

    def target_in_block(self, q, p, path):
        lean = path.left[:, None] / 4
        return (1 - lean) * q + lean * p


def test_a_row_may_look_ahead_to_what_was_planned_only(three_tokens):
    """How far a draft got depends on the drafted token; a row that knew would not be emitted."""
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, STOPS[1])
    intended = (q.after[()] + p.after[()]) / 2
    errors = []
    for own in (draft, replace(draft, limits=None)):
        starts = emitted_starts(law_of("block", Ahead(), own, q), own, weights)
        first = torch.zeros(VOCAB, dtype=torch.float64)
        for tokens, share in starts.items():
            first[tokens[0]] += share
        errors.append(float((first - intended).abs().max()))
    # the model's rows with and without a cache differ by its float32 norms
    assert errors[0] < 1e-6 and errors[1] > SEEN
