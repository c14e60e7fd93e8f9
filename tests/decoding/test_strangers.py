"""Processors, callbacks and schedules get copies: whatever they write, the decode is the same."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Schedule, generate
from cactus_theory.decoding.options import NO_CALLBACKS, Callbacks

PROMPTS = torch.tensor([[3, 5, 7, 2], [4, 4, 1, 9]])


def spoil(value):
    """Write into everything that can be reached from a value."""
    if isinstance(value, torch.Tensor):
        value.fill_(1)
    elif isinstance(value, list):
        for part in value:
            spoil(part)
        value.clear()
    elif isinstance(value, tuple):
        for part in value:
            spoil(part)
    elif isinstance(value, dict):
        value.clear()
    elif hasattr(value, "__dataclass_fields__"):
        spoil([getattr(value, name) for name in value.__dataclass_fields__])


class Halved:
    """Reads the logits, returns half of them, and spoils what it got and what it returned."""

    def __init__(self, writes):
        self.writes, self.returned = writes, []

    def __call__(self, ids, scores):
        scores = scores / 2 if not self.writes else scores.div_(2)
        if self.writes:
            spoil([*self.returned, ids])
            self.returned = [scores]
        return scores


class TopKLogitsWarper(Halved):
    """Has the name of a class of the library, and is another."""


class Curious(Schedule):
    """Two policies in turn; looks at rows, and writes where it is told to."""

    policies = (ct.policy("speculative"), ct.policy("band:price=1"))

    def __init__(self, writes):
        self.writes = writes

    def spoiled(self, *parts):
        spoil(list(parts)) if self.writes else None

    def begin(self, prompt):
        self.spoiled(prompt)
        return 0

    def advance(self, state, new_ids):
        count = len(new_ids)
        self.spoiled(new_ids)
        return state + count

    def choose_by_rows(self, state, drafted, target_probs, draft_probs):
        self.spoiled(drafted, target_probs, draft_probs)
        return (state + torch.arange(len(drafted))) % 2

    def choose(self, state, drafted):
        raise AssertionError("choose_by_rows is there")

    def observe(self, state, nodes):
        for node in nodes:
            self.spoiled(*(torch.from_numpy(row) for row in (node.q, node.p) if row is not None))
        return state


def decoded(tiny, writes, ids=PROMPTS, **options):
    result = generate(*tiny, ids, max_new_tokens=12, num_draft_tokens=3, **options)
    return result.output_token_ids.tolist(), result.reading.emitted_divergence_per_token


@pytest.mark.parametrize("kind", [Halved, TopKLogitsWarper])
def test_a_processor_may_write_into_what_it_gets_and_keep_what_it_returns(tiny, kind) -> None:
    for temperature in (1.0, 0.7):
        found = [
            decoded(
                tiny, writes, PROMPTS[:1], policy="band:price=1", temperature=temperature,
                logits_processor=[kind(writes)],
            )
            for writes in (False, True)
        ]  # fmt: skip
        assert found[0] == found[1]


def test_callbacks_may_write_into_what_they_get(tiny) -> None:
    def stop(ids, prompt_length):
        ended = ids[0, -1].item() == 11
        spoil(ids)
        return ended

    def on_rows(*parts):
        spoil(list(parts))

    quiet = {"stop": lambda ids, _: ids[0, -1].item() == 11}
    told = Callbacks(on_rows=on_rows, on_tokens=spoil, on_round=on_rows)
    loud = {"stop": stop, "callbacks": told}
    found = [decoded(tiny, True, policy="band:price=1", **options) for options in (quiet, loud)]
    assert found[0] == found[1]
    plain = [
        generate(tiny[0], None, PROMPTS, max_new_tokens=6, callbacks=seen).output_token_ids.tolist()
        for seen in (NO_CALLBACKS, Callbacks(on_tokens=spoil))
    ]
    assert plain[0] == plain[1]


def test_schedules_may_write_into_what_they_get(tiny) -> None:
    found = [decoded(tiny, writes, policy=Curious(writes)) for writes in (False, True)]
    assert found[0] == found[1]
