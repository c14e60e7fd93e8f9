"""The host's part of a decode on a device: coins and lengths in, one read a round out."""

from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding._meter import Meter, charge
from cactus_theory.decoding._round import OnTokens
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins
from cactus_theory.decoding._tally import Tally
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.device.capture import captures
from cactus_theory.decoding.device.forward import StaticForward
from cactus_theory.decoding.device.round import Inputs, Round, Verified
from cactus_theory.decoding.device.verify import Logits, VerifyStep, probabilities, torch_step
from cactus_theory.decoding.failure import DecodingError, failure
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.result import GenerationResult, Stopwatch
from cactus_theory.verify.contract import Assignment, Draft, Verifier
from cactus_theory.verify.draw import NO_TOKEN

Tokens = list[list[int]]
# positions by which the part of the cache that attention reads grows
BUCKET = 256


class DeviceDecode:
    """The state of one decode of B texts; rows that have ended run along until all have.

    Parameters
    ----------
    draft_model : None for plain decoding; ``width`` is then 0.
    verify : the verification step, None for the verifier's own in PyTorch.
    """

    def __init__(
        self,
        target_model: Any,
        draft_model: Any,
        texts: Texts,
        rules: Rules,
        temperature: float,
        coins: Coins,
        width: int,
        verifier: Verifier,
        meter: Meter | None = None,
        verify: VerifyStep | None = None,
    ) -> None:
        self.clock = Stopwatch()
        self.texts, self.coins, self.width, self.verifier = texts, coins, width, verifier
        self.temperature, self.meter = temperature, meter
        self.device = texts.device
        self.tally = Tally(texts.batch, width)
        self.choice = _choice(rules, texts, width)
        self.models = [
            CachedModel(model, capacity(texts, width), texts.batch, fast_forward=True)
            for model in (target_model, draft_model)
            if model is not None
        ]
        forwards = [StaticForward(model) for model in self.models]
        self.inputs = Inputs(texts.batch, width, verifier.coins(width), self.device)
        step = verify or torch_step(verifier, Assignment(rules.rules, self.choice), temperature)
        draft = forwards[1] if draft_model is not None else None
        self.round = Round(self.inputs, forwards[0], draft, temperature, step)
        self.rounds = 0

    def run(self, on_tokens: OnTokens | None) -> GenerationResult:
        """Decode until every row has ended or is full."""
        self.clock.lap("other")
        self._prefill()
        while self.texts.open:
            new = self._advance()
            if on_tokens is not None:
                on_tokens(new)
                self.clock.lap("callback")
        return self._result()

    def _prefill(self) -> None:
        """Feed all but the last token of each prompt; later rounds feed that one."""
        texts = self.texts
        counts = [length - 1 for length in texts.lengths]
        if not any(counts):
            return
        for model, part in zip(self.models, ("target", "draft"), strict=False):
            fed = texts.take([0] * texts.batch, counts)
            model.feed(fed, counts, [1] * texts.batch)
            self.clock.lap(part)

    def _advance(self) -> Tokens:
        """Give every open text at least one token; return the new ids of all."""
        texts = self.texts
        wanted = [min(self.width, texts.room(row) - 1) for row in range(texts.batch)]
        self.coins.fill(self.inputs.table, self.width, wanted, self.verifier.coins)
        drafted = [max(own, 0) for own in wanted]
        self.inputs.upload([self._row(row, own) for row, own in enumerate(drafted)])
        end = _whole_buckets(max(texts.lengths) + self.width)
        self.clock.lap("other")
        if self.round.prepare(end):
            torch.cuda.synchronize(self.device)
        self.clock.lap("capture")
        done = self.round(end)
        tokens = [[*ids[:kept], last] for *ids, kept, last in done.report.tolist()]
        self.rounds += 1
        for row, own in enumerate(tokens):
            if wanted[row] >= 0 and own[-1] == NO_TOKEN:
                raise self._failure(row, done.logits, drafted[row], len(own) - 1)
        new: Tokens = [[]] * texts.batch
        for row, own in enumerate(tokens):
            if wanted[row] >= 0:
                new[row] = own[: texts.append(row, own)]
                self._note(row, drafted[row], own, new[row])
        self.clock.lap("other")
        if self.meter is not None and self.width:
            self._measure(done, drafted, new)
        return new

    def _failure(self, row: int, logits: Logits, drafted: int, accepted: int) -> DecodingError:
        """Return the error for a text that got no token after the accepted ones."""
        before = [self.texts.new_ids(own) for own in range(self.texts.batch)]
        self.tally.stop(range(len(before)), before)
        q = probabilities(logits.target[row], self.temperature)
        p = None if logits.draft is None else probabilities(logits.draft[row], self.temperature)
        places = range(accepted, drafted + 1)
        about = self.models[0].model, ()
        return failure(row, len(before[row]), (q, p), places, about, self._result())

    def _row(self, row: int, drafted: int) -> list[int]:
        ids = self.texts.ids[row]
        return [ids[-2] if len(ids) > 1 else ids[-1], ids[-1], len(ids), drafted]

    def _note(self, row: int, drafted: int, own: list[int], new: list[int]) -> None:
        self.tally.note(row, drafted, own, new)
        if not self.texts.room(row):
            self.tally.finished[row] = self.texts.new_ids(row), self.texts.ended[row]

    def _measure(self, done: Verified, drafted: list[int], new: Tokens) -> None:
        """Give the meter the rows that were verified."""
        logits, meter = done.logits, self.meter
        assert meter is not None
        q = probabilities(logits.target, self.temperature)
        p = None if logits.draft is None else probabilities(logits.draft, self.temperature)
        draft = Draft(logits.token_ids, drafted, p)
        for row, own in enumerate(new):
            place = row, len(self.texts.new_ids(row)) - len(own)
            if own and meter.log is not None:
                meter.log.score(place, own, q[row])
            if own and drafted[row]:
                charge(meter, row, own, q, draft, self.choice, done.verdict, place)
        if captures(self.device):  # measuring is not to be paid by the next round
            torch.cuda.synchronize(self.device)
        self.clock.lap("meter")

    def _result(self) -> GenerationResult:
        measured = self.tally.measured(self.meter)
        self.clock.lap("meter")
        return self.tally.result(
            target_calls=self.rounds,
            draft_calls=self.rounds * self.width,
            seconds=self.clock.seconds(),
            loop="device",
            **measured,
        )


def capacity(texts: Texts, width: int) -> int:
    """Return the positions of a cache: whole buckets, with room for a last round's draft."""
    return _whole_buckets(texts.capacity + width)


def _whole_buckets(positions: int) -> int:
    return -(-positions // BUCKET) * BUCKET


def _choice(rules: Rules, texts: Texts, width: int) -> Tensor | None:
    """Return which policy judges which drafted token, None if there is one policy."""
    if len(rules.rules) == 1:
        return None
    own = [rules.rules.index(rule) for rule in rules.own]  # type: ignore[arg-type]
    return torch.tensor(own, device=texts.device)[:, None].repeat(1, width)
