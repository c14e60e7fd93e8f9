"""Rows of a batch stop drafting each for itself, and everything that counts drafts stays right."""

from collections import Counter

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import EarlyExit, ModelDrafter, generate
from cactus_theory.decoding._sampling import Warp
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import DraftContext
from cactus_theory.decoding.drafters.model import ACCEPTANCE, PLACES
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.verify import Assignment, Draft, find_verifier

PROMPT = torch.tensor([[1, 5, 9]])
EXACT = 1e-12  # sums of two products


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_in_the_smallest_example_emits_six_to_four(verifier):
    """q = (0.5, 0.5), p = (0.8, 0.2): the doubtful token emits q; dropping it, (0.6, 0.4)."""
    q, p = (torch.tensor([own], dtype=torch.float64) for own in ([0.5, 0.5], [0.8, 0.2]))
    for counts, emits in (([1, 1], (0.5, 0.5)), ([1, 0], (0.6, 0.4))):
        draft = Draft(torch.tensor([[0], [1]]), counts, p.expand(2, 1, 2))
        rule = Assignment((ct.policy("speculative"),))
        law = find_verifier(verifier).law(rule, q.expand(2, 2, 2), draft)
        refused = law.stop[:, :1] * law.last[:, 0]
        kept = torch.eye(2).double() * law.stop[:, 1:]
        found = p[0] @ (refused + kept)
        assert found.tolist() == pytest.approx(emits, abs=EXACT)


def opened(drafter, target, prompts, width):
    """Return the drafter at work on these prompts, and their texts."""
    texts = Texts(prompts, 60, frozenset(), torch.device("cpu"))
    warp = Warp(1.0)
    return drafter.begin(DraftContext(target, texts, warp, Stopwatch(), width)), texts


def rounds(drafter, target, width=6, turns=12, seed=0):
    """Yield each proposal with the texts, the drafting and what was wanted."""
    prompts = [[1, 5, 9], [2], [3, 3, 7, 3, 3, 7, 3], [8, 4, 8, 1]]
    drafting, texts = opened(drafter, target, prompts, width)
    source = torch.Generator().manual_seed(seed)
    for turn in range(turns):
        wanted = [max(width - (row + turn) % 4, 0) * ((row + turn) % 5 > 0) for row in range(4)]
        coins = torch.rand(4, width, generator=source, dtype=torch.float64)
        draft = drafting.propose(wanted, coins)
        yield draft, texts, drafting, wanted
        last = torch.randint(0, 24, (4,), generator=source)
        drafted = zip(draft.token_ids.tolist(), draft.counts, last.tolist(), strict=True)
        taken = [[*ids[: min((turn + row) % 4, count)], token]
                 for row, (ids, count, token) in enumerate(drafted)]  # fmt: skip
        texts.settle(taken, last)
        drafting.settle()


@pytest.mark.parametrize("name", ["model", "early exit"])
def test_rows_stop_where_the_product_falls_and_are_fed_no_further(tiny, name):
    target, model = tiny
    stop = 0.5
    drafter = ModelDrafter(model, stop=stop) if name == "model" else EarlyExit(1, stop=stop)
    early = calls = 0
    with torch.inference_mode():
        for draft, texts, drafting, wanted in rounds(drafter, target):
            assert draft.token_ids.shape[1] == max(draft.counts)
            assert drafting.calls - calls == max(draft.counts)  # the loop ends with its last row
            calls = drafting.calls
            for row, (count, most) in enumerate(zip(draft.counts, wanted, strict=True)):
                assert min(most, 1) <= count <= most
                at = draft.token_ids[row, :count, None]
                each = draft.probs[row, :count].gather(-1, at)[:, 0].numpy()
                product = np.interp(each, PLACES, ACCEPTANCE).cumprod() if count else np.ones(1)
                assert (product[:-1] >= stop).all()
                assert count == most or product[-1] < stop
                early += count < most
                if count:  # the last drafted token is not fed
                    assert drafting.model.lengths[row] == texts.lengths[row] + count - 1
    assert early > 10


def test_a_zero_threshold_never_stops_and_one_stops_at_once(tiny):
    target, model = tiny
    options = {"policy": "speculative", "max_new_tokens": 40, "num_draft_tokens": 5, "seed": 2}
    free = generate(target, model, PROMPT, **options)
    never = generate(target, ModelDrafter(model, stop=0), PROMPT, **options)
    assert never.output_token_ids.tolist() == free.output_token_ids.tolist()
    assert never.reading.rounds == free.reading.rounds and never.draft_calls == free.draft_calls
    always = generate(target, ModelDrafter(model, stop=1.0), PROMPT, **options)
    assert {drafted for drafted, _, _ in always.reading.rounds} <= {0, 1}


def test_callbacks_are_told_what_was_drafted(tiny):
    target, model = tiny
    seen = []
    ids = torch.tensor([[1, 5, 9], [2, 4, 8], [3, 3, 7]])
    drafter = ModelDrafter(model, stop=0.5)
    told = Callbacks(on_round=lambda counts, seconds: seen.append(counts))
    result = generate(target, drafter, ids, policy="speculative", num_draft_tokens=6,
                      max_new_tokens=30, callbacks=told)  # fmt: skip
    assert sum((Counter(counts.rounds) for counts in seen), Counter()) == result.reading.rounds
    assert sum(counts.num_tokens for counts in seen) == result.num_tokens
    steps = (max(drafted for drafted, _, _ in counts.rounds) for counts in seen)
    assert sum(steps) == result.draft_calls


@pytest.mark.parametrize("width", [3, 8])
def test_deterministic_drafts_are_not_stopped(tiny, width):
    target, model = tiny
    options = {"max_new_tokens": 24, "temperature": 0.0, "policy": "speculative"}
    free, stopped = (
        generate(target, drafter, PROMPT, num_draft_tokens=width, **options)
        for drafter in (model, ModelDrafter(model, stop=0.9))
    )
    assert stopped.reading.rounds == free.reading.rounds
