"""Speculative decoding of one text: draft, verify in one forward pass, take back, repeat."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._cache import text_config
from cactus_theory.decoding._checks import opened_text, whole_number
from cactus_theory.decoding._meter import Meter, Recorder
from cactus_theory.decoding._model import CachedModel
from cactus_theory.decoding._sampling import (
    Uniforms,
    checked_temperature,
    probabilities,
    uniforms,
)
from cactus_theory.decoding._text import GrowingText
from cactus_theory.decoding.result import GenerationResult, Stopwatch
from cactus_theory.decoding.vocabulary import check_model_vocabularies
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.verify import verify_chain
from cactus_theory.verify._draw import pick

Progress = Callable[[list[int]], None]


def generate(
    target_model: Any,
    draft_model: Any,
    input_ids: Tensor,
    *,
    policy: str | Policy,
    num_draft_tokens: int = 4,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_token_ids: int | Iterable[int] | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    meter: bool = True,
    record_rows: bool = False,
    on_tokens: Progress | None = None,
) -> GenerationResult:
    """Continue a text with drafted tokens that the target verifies under ``policy``.

    Every round the draft samples up to K tokens at ``temperature``, the target scores them
    in one forward pass, the policy keeps a prefix and one more token follows. With the policy
    ``speculative`` the text has exactly the target's law; at temperature 0 it is the target's
    greedy text.

    Parameters
    ----------
    target_model, draft_model : Hugging Face causal LMs in evaluation mode, one vocabulary.
    input_ids : (1, T) int64, T ≥ 1.
    policy : a Policy, or a spec such as ``"cactus:delta=0.1"``.
    num_draft_tokens : K ≥ 1; fewer are drafted where fewer than K + 1 tokens have room.
    max_new_tokens : never exceeded; T + max_new_tokens must fit both models' positions.
    temperature : of both models; 0 is greedy.
    eos_token_ids : tokens that end the text, anywhere in a round; None for none.
    seed, generator : randomness; ``seed`` is used when there is no ``generator``.
    meter : also add up the emitted KL; its time is kept out of the decode's.
    record_rows : also return the verified rows.
    on_tokens : called with the new ids after every round.

    Raises
    ------
    ValueError
        Vocabularies or devices that differ, ids or lengths out of range, a model in training
        mode, an unknown policy.
    TypeError
        Ids that are not integers.
    """
    rule = find_policy(policy)
    whole_number("num_draft_tokens", num_draft_tokens, 1)
    temperature = checked_temperature(temperature)
    check_model_vocabularies(target_model, draft_model)
    models = {"target_model": target_model, "draft_model": draft_model}
    text = opened_text(models, input_ids, max_new_tokens, eos_token_ids)
    source = uniforms(seed, generator, text.buffer.device)
    run = _Run(target_model, draft_model, text, rule, temperature, source, num_draft_tokens)
    run.meter = Meter(rule) if meter else None
    run.recorder = Recorder() if record_rows else None
    with torch.inference_mode():
        run.clock.lap("other")
        while text.room:
            new = run.round(min(num_draft_tokens, text.room - 1))
            if on_tokens is not None:
                on_tokens(new)
                run.clock.lap("callback")
    return run.result()


class _Run:
    """The state of one decode."""

    def __init__(
        self,
        target_model: Any,
        draft_model: Any,
        text: GrowingText,
        rule: Policy,
        temperature: float,
        uniform: Uniforms,
        width: int,
    ) -> None:
        capacity = text.buffer.shape[1]
        self.clock = Stopwatch()
        self.target = CachedModel(target_model, capacity)
        self.draft = CachedModel(draft_model, capacity)
        self.text, self.rule, self.temperature, self.uniform = text, rule, temperature, uniform
        self.histogram = [0] * (width + 1)
        self.meter: Meter | None = None
        self.recorder: Recorder | None = None

    def round(self, drafted: int) -> list[int]:
        """Draft, verify and settle; return the new ids. ``drafted`` may be 0 at the end."""
        coins = self.uniform(2 * drafted + 1)
        p = self._propose(coins[:drafted])
        ids = self.text.behind(self.text.length, drafted)
        self.clock.lap("other")
        logits = self.target.feed(self.text.behind(self.target.length, drafted), drafted + 1)
        self.clock.lap("target")
        q = probabilities(logits, self.temperature)
        self.clock.lap("other")
        accepted, output = self._verdict(q, p, ids, coins[drafted:])
        self.clock.lap("verify")
        return self._settle(q, p, accepted, output)

    def _propose(self, coins: Float[Tensor, "drafted"]) -> Float[Tensor, "1 drafted vocab"] | None:
        """Sample one drafted token per coin; return the rows they came from."""
        rows = []
        for offset in range(len(coins)):
            fed = self.text.behind(self.draft.length, offset)
            self.clock.lap("other")
            logits = self.draft.feed(fed, 1)
            self.clock.lap("draft")
            row = probabilities(logits, self.temperature)
            self.text.propose(offset, pick(row[:, 0], coins[offset : offset + 1]))
            rows.append(row)
        return torch.cat(rows, 1) if rows else None

    def _verdict(
        self,
        q: Float[Tensor, "1 K1 vocab"],
        p: Float[Tensor, "1 K vocab"] | None,
        ids: Int[Tensor, "1 K"],
        coins: Float[Tensor, "K1"],
    ) -> tuple[int, Int[Tensor, "1 new"]]:
        """Return how many drafted tokens were kept, and them with the token that follows."""
        if p is None:
            return 0, pick(q[:, 0], coins)[None]
        verdict = verify_chain(
            self.rule, q, p, ids, coins=(coins[None, :-1], coins[-1:]), validate=False
        )
        accepted = int(verdict.num_accepted)
        return accepted, verdict.output_token_ids[:, : accepted + 1]

    def _settle(
        self, q: Tensor, p: Tensor | None, accepted: int, output: Int[Tensor, "1 new"]
    ) -> list[int]:
        """Append the tokens, take both models back to them, and note what happened."""
        before = self.text.length
        drafted = 0 if p is None else p.shape[1]
        verified = self.text.buffer[0, before : before + drafted].clone() if self.recorder else None
        new = self.text.settle(output)
        # the last token is fed next round; after a full acceptance the draft lags by one more
        self.target.rollback(self.text.length - 1)
        self.draft.rollback(min(self.draft.length, self.text.length - 1))
        accepted = min(accepted, len(new))
        self.histogram[accepted] += 1
        self.clock.lap("other")
        rows = min(drafted, len(new))
        if p is not None and self.meter is not None:
            self.meter.add(q[0, :rows], p[0, :rows])
        if p is not None and self.recorder is not None and verified is not None:
            self.recorder.add(q[0, :rows], p[0, :rows], verified[:rows], accepted)
        self.clock.lap("meter")
        return new

    def result(self) -> GenerationResult:
        """Return tokens and statistics."""
        self.clock.lap("other")
        accepted = sum(count * calls for count, calls in enumerate(self.histogram))
        reading = None
        if self.meter is not None:
            reading = self.meter.reading(accepted, len(self.text.new_ids))
        recorded = None
        if self.recorder is not None:
            recorded = self.recorder.rows(text_config(self.target.model).vocab_size)
        self.clock.lap("meter")
        return GenerationResult(
            output_token_ids=torch.tensor([self.text.new_ids]),
            ended=self.text.ended,
            target_calls=self.target.calls,
            draft_calls=self.draft.calls,
            accepted_histogram=tuple(self.histogram),
            seconds=self.clock.seconds(),
            meter=reading,
            rows=recorded,
        )
