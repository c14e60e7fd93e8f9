"""One decode of a batch, round by round: draft, verify in one forward pass, roll back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._meter import Meter, Recorder, charge, verified
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins
from cactus_theory.decoding._tally import Tally
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.drafters import Drafter, Setting
from cactus_theory.decoding.drafters._base import nothing
from cactus_theory.decoding.failure import DecodingError, failure
from cactus_theory.decoding.models import CachedModel, text_config
from cactus_theory.decoding.pace import Pace, Round
from cactus_theory.decoding.result import GenerationResult, Stopwatch
from cactus_theory.policies._lent import copied
from cactus_theory.verify.contract import Draft, Verdict, Verifier
from cactus_theory.verify.draw import NO_TOKEN

OnTokens = Callable[[list[list[int]]], None]
OnRound = Callable[[Round], None]
# the target's rows (B, K + 1, V), the draft, the number of each text, its new tokens before
OnRows = Callable[[Tensor, Draft, list[int], list[int]], None]


class Decode:
    """The state of one decode of B texts."""

    def __init__(
        self,
        target_model: Any,
        drafter: Drafter | None,
        texts: Texts,
        rules: Rules,
        warp: Warp,
        coins: Coins,
        pace: Pace,
        width: int,
        verifier: Verifier,
        fast_forward: bool | None = None,
        observers: tuple[Meter | None, Recorder | None] = (None, None),
        on_rows: OnRows | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        self.clock = Stopwatch()
        self.target = CachedModel(
            target_model, texts.capacity, texts.batch, slack=1, fast_forward=fast_forward
        )
        self.texts, self.rules, self.warp, self.coins, self.pace = texts, rules, warp, coins, pace
        following = verifier.needs_next_draft_row
        setting = Setting(target_model, texts, warp, self.clock, width, fast_forward, following)
        self.drafting = None if drafter is None else drafter.begin(setting)
        self.meter, self.recorder = observers
        self.on_rows, self.on_round = on_rows, on_round
        self.verifier = verifier
        self.tally = Tally(texts.batch, width)
        self.batch = texts.batch
        self.places = list(range(texts.batch))

    def run(self, on_tokens: OnTokens | None) -> GenerationResult:
        """Decode until every row has ended or is full."""
        self.clock.lap("other")
        while self.texts.open:
            new = self.round(self.pace.width())
            if on_tokens is not None:
                on_tokens(new)
                self.clock.lap("callback")
        return self.result()

    def round(self, width: int) -> list[list[int]]:
        """Give every text that is not finished at least one token; return the new ids of all."""
        before = dict(self.clock.parts)
        texts = self.texts
        wanted = [min(width, texts.room(row) - 1) for row in range(texts.batch)]
        draft_coins, accept, draw = self.coins.toss(wanted, self.verifier.coins)
        steps = self.drafting.calls if self.drafting else 0
        draft = self._propose(wanted, draft_coins)
        steps = (self.drafting.calls if self.drafting else 0) - steps
        q = self._score(draft)
        assigned = self.rules.assign(q, draft)
        self.clock.lap("other")
        coins = accept[:, : self.verifier.coins(max(draft.lengths))]
        verdict = self.verifier.verify(assigned, q, draft, coins, draw)
        tokens = verdict.rows()
        self.clock.lap("verify")
        for row, own in enumerate(tokens):
            if own[-1] == NO_TOKEN:
                raise self._failure(row, q, draft, len(own) - 1)
        new = self._settle(tokens, verdict)
        self._observe(q, draft, assigned.choice, verdict, new, tokens)
        for row, own in enumerate(new):
            self.rules.advance(row, own)
        self._note(before, draft.lengths, new, tokens, steps)
        everywhere: list[list[int]] = [[] for _ in range(self.batch)]
        for place, own in zip(self.places, new, strict=True):
            everywhere[place] = list(own)
        self._retire()
        return everywhere

    def _failure(self, row: int, q: Tensor, draft: Draft, accepted: int) -> DecodingError:
        """Return the error for a text that got no token after the accepted ones."""
        before = [self.texts.new_ids(own) for own in range(self.texts.batch)]
        self.tally.stop(self.places, before)
        rows = q[row], None if draft.probs is None else draft.probs[row]
        places = range(accepted, draft.lengths[row] + 1)
        about = self.target.model, self.warp.processors
        return failure(self.places[row], len(before[row]), rows, places, about, self.result())

    def _retire(self) -> None:
        """Set finished texts aside and close the gaps in the batch."""
        texts = self.texts
        opened = [texts.room(row) > 0 for row in range(texts.batch)]
        if all(opened):
            return
        for row, on in enumerate(opened):
            if not on:
                self.tally.finished[self.places[row]] = (texts.new_ids(row), texts.ended[row])
        rows = closed_up(opened)
        if not rows:
            return
        parts = [texts, self.target, self.coins, self.rules, self.warp, self.drafting]
        for part in parts:
            if part is not None:
                part.keep(rows)
        self.places = [self.places[row] for row in rows]

    def _propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        if self.drafting is None or not any(wanted):
            return nothing(self.texts)
        proposal = self.drafting.propose(wanted, coins)
        self.clock.lap("other")
        return proposal

    def _score(self, draft: Draft) -> Float[Tensor, "batch K1 vocab"]:
        """Return the target's rows after the settled text and after each drafted token."""
        texts, lengths, drafted = self.texts, self.target.lengths, draft.lengths
        keep = [count + 1 for count in drafted]
        counts = [
            length - cached + count
            for length, cached, count in zip(texts.lengths, lengths, drafted, strict=True)
        ]
        fed = texts.take(lengths, counts)
        self.clock.lap("other")
        logits = self.target.feed(fed, counts, keep, self._parents(draft, counts))
        self.clock.lap("target")
        return self.warp(logits, texts, 0, drafted)

    def _parents(self, draft: Draft, counts: Sequence[int]) -> Int[Tensor, "batch new"] | None:
        """Return the parent of each fed token among the fed ones; None for chains."""
        if draft.parents is None:
            return None
        fed = max(counts)
        parents = torch.arange(-1, fed - 1, device=draft.parents.device).repeat(len(counts), 1)
        for row, (count, own) in enumerate(zip(counts, draft.lengths, strict=True)):
            first = count - own  # the settled tokens that are fed along
            follows = draft.parents[row, :own]
            parents[row, first:count] = torch.where(follows >= 0, follows + first, first - 1)
        return parents

    def _settle(self, tokens: list[list[int]], verdict: Verdict) -> list[list[int]]:
        """Append the tokens of each row and roll the models back to them."""
        texts, before = self.texts, list(self.texts.lengths)
        if verdict.path is not None:  # the draft stands in the texts in its own order
            for offset in range(verdict.path.shape[1]):
                texts.propose(offset, verdict.accepted_token_ids[:, offset])
        taken = texts.settle(tokens, verdict.last)
        new = [own[:count] for own, count in zip(tokens, taken, strict=True)]
        for row, length in enumerate(texts.lengths):
            if verdict.path is None:
                self.target.rollback(row, length - 1)  # the last token is fed next round
            else:
                path = verdict.path[row, : length - 1 - before[row]].tolist()
                self.target.select(row, before[row], path)
        if self.drafting is not None:
            self.drafting.settle()
        self.clock.lap("other")
        return new

    def _observe(
        self,
        q: Tensor,
        draft: Draft,
        choice: Tensor | None,
        verdict: Verdict,
        new: list[list[int]],
        tokens: list[list[int]],
    ) -> None:
        """Show the meter, the recorder and the schedules the rows that were verified."""
        if self.on_rows is not None:
            made = map(len, map(self.texts.new_ids, range(len(new))))
            before = [after - len(own) for after, own in zip(made, new, strict=True)]
            self.on_rows(*copied((q, draft, self.places, before)))
        if self.meter is None and self.recorder is None and not self.rules.observing:
            return
        for row, own in enumerate(new):
            place = self.places[row], len(self.texts.new_ids(row)) - len(own)
            if self.meter is not None and self.meter.log is not None:
                path = None if verdict.path is None else verdict.path[row]
                self.meter.log.score(place, own, q[row], path)
            count = min(draft.lengths[row], len(own))
            if not count:
                continue
            charged = verdict.charged_rows(row, count)
            accepted = min(len(tokens[row]) - 1, len(own))
            self.rules.observe(row, charged, accepted, q, draft)
            if self.meter is not None:
                charge(self.meter, row, own, q, draft, choice, verdict, place)
            if self.recorder is not None:
                ids = draft.token_ids[row, charged]
                self.recorder.add(*verified(row, charged, q, draft), ids, accepted)
        self.clock.lap("meter")

    def _note(
        self,
        before: dict[str, float],
        drafted: Sequence[int],
        new: list[list[int]],
        tokens: list[list[int]],
        steps: int,
    ) -> None:
        """Count what happened and update the pace."""
        kept = refused = 0
        for row, (own, emitted, count) in enumerate(zip(tokens, new, drafted, strict=True)):
            accepted, cut = self.tally.note(self.places[row], count, own, emitted)
            kept += accepted
            refused += accepted < count and not cut
        if not self.pace.learns and self.on_round is None:
            return
        now = self.clock.parts
        spent = {part: now.get(part, 0.0) - before.get(part, 0.0) for part in now}
        done = Round(
            drafted=sum(drafted),
            accepted=kept,
            refused=refused,
            emitted=sum(map(len, new)),
            steps=max(steps, max(drafted), 1),
            draft_seconds=spent.get("draft", 0.0),
            target_seconds=spent.get("target", 0.0),
            seconds=sum(s for part, s in spent.items() if part not in ("meter", "callback")),
            verify_seconds=spent.get("verify", 0.0),
            rows=len(new),
        )
        self.pace.note(done)
        if self.on_round is not None:
            self.on_round(done)
            self.clock.lap("callback")

    def result(self) -> GenerationResult:
        """Return tokens and statistics."""
        self.clock.lap("other")
        recorded = None
        measured = self.tally.measured(self.meter)
        if self.recorder is not None:
            recorded = self.recorder.rows(text_config(self.target.model).vocab_size)
        self.clock.lap("meter")
        return self.tally.result(
            target_calls=self.target.calls,
            draft_calls=0 if self.drafting is None else self.drafting.calls,
            seconds=self.clock.seconds(),
            rows=recorded,
            **measured,
        )


def closed_up(opened: Sequence[bool]) -> list[int]:
    """Return the open rows so that gaps are filled from the end and few rows move."""
    rows = [row for row, on in enumerate(opened) if on]
    movers = [row for row in reversed(rows) if row >= len(rows)]
    return [row if on else movers.pop(0) for row, on in enumerate(opened[: len(rows)])]
