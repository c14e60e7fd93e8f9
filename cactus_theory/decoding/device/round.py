"""One round as a function of tensors that keep their place: draft, score, verify.

Its forward passes feed tokens whose places in the ragged cache only the device knows.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.device.capture import Repeated, captures, never_waits
from cactus_theory.decoding.device.verify import Logits, VerifyStep, probabilities
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache import Places, additive
from cactus_theory.decoding.models.fast import FastForward
from cactus_theory.verify.contract import Verdict
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class Outcome:
    """A round's outcome; ``report`` holds ids, accepted count and last token for one read."""

    logits: Logits
    verdict: Verdict
    report: Int[Tensor, "batch K2"]


class Inputs:
    """What the host tells the device before a round, in memory taken once.

    Attributes
    ----------
    tokens : (B, 2) the last two tokens of each text (one twice if it has no more).
    lengths : (B,) tokens of each text.
    wanted : (B,) how many drafted tokens of each row count.
    coins : (B, K + C + 1): for the draft, the verification and the token that follows.
    """

    def __init__(self, batch: int, width: int, accept: int, device: torch.device) -> None:
        self.width, pinned = width, device.type == "cuda"
        self.host_whole = torch.zeros(batch, 4, dtype=torch.int64, pin_memory=pinned)
        self.host_coins = torch.zeros(
            batch, width + accept + 1, dtype=torch.float64, pin_memory=pinned
        )
        self.whole = self.host_whole.to(device, copy=True)
        self.coins = self.host_coins.to(device, copy=True)
        self.tokens, self.lengths, self.wanted = (
            self.whole[:, :2],
            self.whole[:, 2],
            self.whole[:, 3],
        )

    @property
    def table(self) -> np.ndarray:
        """Return the host's side of the coins, to be written to."""
        return self.host_coins.numpy()

    def upload(self, rows: list[list[int]]) -> None:
        """Write (two tokens, length, wanted) of each row and the coins; nothing is waited for.

        The host's side may be written again once the round's report was read.
        """
        self.host_whole.copy_(torch.tensor(rows))
        self.whole.copy_(self.host_whole, non_blocking=True)
        self.coins.copy_(self.host_coins, non_blocking=True)


class StaticForward:
    """The pass of :class:`FastForward`, where positions are tensors instead of host numbers.

    It shares the model's weights and cache. What it writes beyond a text's length is never
    seen: a position attends to slots up to its own, and a later round writes there again.
    """

    def __init__(self, model: CachedModel) -> None:
        if not isinstance(model.forward, FastForward):
            raise ValueError("model: must run in the fast pass; got the library's")
        self.fast = model.forward

    def __call__(
        self,
        token_ids: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        end: int,
        *,
        last: bool = False,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return the logits after each token, or after the last one of a row only.

        Token j of row b is written to slot ``positions[b, j]`` and attends to the slots up to
        it; ``end`` is more than every position that matters.
        """
        fast, (batch, new) = self.fast, token_ids.shape
        x = F.embedding(token_ids.reshape(-1), fast.embedding)
        flat = positions.reshape(-1)
        cos, sin = fast.cos[flat], fast.sin[flat]
        slots = torch.arange(end, device=positions.device)
        mask = fast.stacked(additive(slots > positions[..., None], x)[:, None])
        rows = torch.arange(batch, device=positions.device)[:, None]
        at = Places(slice(0, batch), 0, end, (rows, positions))
        for number, layer in enumerate(fast.layers):
            x = layer(x, (batch, new), cos, sin, fast.memory(number, layer, x), at, mask)
        hidden = fast.norm(x).view(batch, new, -1)
        hidden = hidden[:, -1:] if last else hidden
        return fast.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


class Round:
    """The device's part of a round over one cache per model."""

    def __init__(
        self,
        inputs: Inputs,
        target: StaticForward,
        draft: StaticForward | None,
        temperature: float,
        verify: VerifyStep,
    ) -> None:
        self.inputs, self.target, self.draft = inputs, target, draft
        self.temperature, self.verify = temperature, verify
        device = inputs.whole.device
        self.scored = Repeated(self._score, device)
        self.whole = Repeated(lambda end: self._verify(self._score(end)), device)
        self.in_one: bool | None = None

    def prepare(self, end: int) -> bool:
        """Capture what is needed for caches read up to ``end``; return whether anything was."""
        if not captures(self.inputs.whole.device):
            return False
        if self.in_one is None:
            logits = self._score(end)
            self.in_one = never_waits(lambda: self._verify(logits), logits.token_ids.device)
        return (self.whole if self.in_one else self.scored).prepare(end)

    def __call__(self, end: int) -> Outcome:
        """Return the round's outcome, on the device, for caches read up to ``end``.

        A verification that waits for the device runs by itself after the graph.
        """
        self.prepare(end)
        if self.in_one is False:
            return self._verify(self.scored(end))
        return self.whole(end)

    def _score(self, end: int) -> Logits:
        """Draft K tokens a row and run the target over them."""
        given = self.inputs
        ids, logits = self._propose(end)
        place = given.lengths[:, None] - 1 + torch.arange(ids.shape[1] + 1, device=ids.device)
        fed = torch.cat([given.tokens[:, 1:], ids], 1)
        coins = given.coins[:, given.width : -1], given.coins[:, -1]
        target = self.target(fed, place, end)
        return Logits(target, logits, ids, given.wanted, *coins, given.lengths)

    def _propose(self, end: int) -> tuple[Tensor, Tensor | None]:
        given = self.inputs
        if self.draft is None or not given.width:
            return given.tokens[:, :0], None
        # the cache may lack the token before the last one, if all drafted ones were accepted
        place = given.lengths[:, None] + torch.arange(-2, 0, device=given.whole.device)
        rows = self.draft(given.tokens, place.clamp(min=0), end, last=True)[:, 0]
        ids, logits = [self._drawn(rows, 0)], [rows]
        for step in range(1, given.width):
            place = (given.lengths - 1 + step)[:, None]
            rows = self.draft(ids[-1][:, None], place, end, last=True)[:, 0]
            ids.append(self._drawn(rows, step))
            logits.append(rows)
        certain = self.temperature == 0
        return torch.stack(ids, 1), None if certain else torch.stack(logits, 1)

    def _drawn(self, logits: Float[Tensor, "batch vocab"], step: int) -> Int[Tensor, "batch"]:
        if self.temperature == 0:
            return logits.argmax(-1)
        token = pick(probabilities(logits, self.temperature), self.inputs.coins[:, step])
        return token.clamp_(min=0)  # a row without a law is found where it verifies

    def _verify(self, logits: Logits) -> Outcome:
        verdict = self.verify(logits)
        ends = verdict.num_accepted[:, None], verdict.last[:, None]
        return Outcome(logits, verdict, torch.cat([logits.token_ids, *ends], 1))
