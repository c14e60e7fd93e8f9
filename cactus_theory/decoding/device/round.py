"""A round on the device as a function of tensors at fixed addresses: draft, score, verify.

The tokens' slots in the ragged cache are tensors on the device, not numbers on the host. On CUDA
the function is captured as a graph and replayed; elsewhere it is called.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.device.verify import Logits, VerifyStep, probabilities
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache import Sight, Slots
from cactus_theory.decoding.models.llama_forward import FastForward
from cactus_theory.verify.draft import Verdict
from cactus_theory.verify.draw import pick

Result = TypeVar("Result")
# runs before a capture, so that libraries have chosen kernels and allocated workspace by then
WARM_UP = 2


def captures(device: torch.device) -> bool:
    """Return whether rounds run as CUDA graphs on a device."""
    return device.type == "cuda"


class Repeated(Generic[Result]):
    """The function ``compute(end)``, captured once as a CUDA graph for every ``end``.

    ``end`` is the number of cache positions that attention reads. ``compute`` must read and write
    tensors at fixed addresses, never wait for the device, and be repeatable on the same inputs. The
    next call overwrites the result.
    """

    def __init__(self, compute: Callable[[int], Result], device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.captured: dict[int, tuple[Any, Result]] = {}
        self.pool: Any = None

    def prepare(self, end: int) -> bool:
        """Capture the function for ``end`` if not done before; return whether this call did so."""
        if not captures(self.device) or end in self.captured:
            return False
        self.captured[end] = self._capture(end)
        return True

    def __call__(self, end: int) -> Result:
        """Return the result for the inputs in memory."""
        if not captures(self.device):
            return self.compute(end)
        self.prepare(end)
        graph, result = self.captured[end]
        graph.replay()
        return result

    def _capture(self, end: int) -> tuple[Any, Result]:
        """Return a graph that shares the memory of earlier graphs, and the result's tensors."""
        stream = torch.cuda.Stream(self.device)  # PyTorch asks for warm-up runs on a side stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.compute(end)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.compute(end)
        self.pool = graph.pool()
        return graph, result


def never_waits(job: Callable[[], Any], device: torch.device) -> bool:
    """Return whether a job runs without waiting for the CUDA device; True for other devices."""
    if not captures(device):
        return True
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the debug mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            job()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return True


@dataclass(frozen=True)
class Outcome:
    """A round's outcome; ``report`` has each text's drafted ids, number accepted and last token."""

    logits: Logits
    verdict: Verdict
    report: Int[Tensor, "batch K2"]


class Inputs:
    """Inputs of a round that the host copies to the device, in memory allocated once.

    ``tokens`` (B, 2) are the last two tokens of each text (a single token twice), ``lengths`` (B,)
    the texts' numbers of tokens, ``draft_lengths`` (B,) the numbers of drafted tokens to verify.
    ``coins`` (B, K + C + 1) are for drafting (K is ``width``), for acceptance (C is ``accept``) and
    for the recovered or bonus token.
    """

    def __init__(self, batch: int, width: int, accept: int, device: torch.device) -> None:
        self.width, pinned = width, device.type == "cuda"
        shape = batch, width + accept + 1
        self.host_counts = torch.zeros(batch, 4, dtype=torch.int64, pin_memory=pinned, device="cpu")
        self.host_coins = torch.zeros(shape, dtype=torch.float64, pin_memory=pinned, device="cpu")
        self.counts = self.host_counts.to(device, copy=True)
        self.coins = self.host_coins.to(device, copy=True)
        self.tokens, self.lengths = self.counts[:, :2], self.counts[:, 2]
        self.draft_lengths = self.counts[:, 3]

    @property
    def table(self) -> np.ndarray:
        """Return the host's memory of the coins, to write to before :meth:`upload`."""
        return self.host_coins.numpy()

    def upload(self, rows: list[list[int]]) -> None:
        """Copy (two tokens, length, draft length) of each row and the coins, without waiting.

        The host's memory may be written to again after the round's report has been read.
        """
        self.host_counts.copy_(torch.tensor(rows, device="cpu"))
        self.counts.copy_(self.host_counts, non_blocking=True)
        self.coins.copy_(self.host_coins, non_blocking=True)


class StaticForward:
    """The fast pass (:class:`FastForward`) with positions as tensors on the device.

    The pass shares the model's weights and cache. States beyond a text's length are never read: a
    token attends to slots up to its position, and a later round overwrites the slots after.
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
        """Return the logits after each token or, with ``last``, after the last token of each row.

        Token j of row b is written to slot ``positions[b, j]`` and attends to all slots up to this
        slot. Attention reads ``end`` slots, more than every position whose logits are used.
        """
        fast, (batch, new) = self.fast, token_ids.shape
        embedded = F.embedding(token_ids.reshape(-1), fast.embedding)
        slots = torch.arange(end, device=positions.device)
        sight = Sight(positions, key_positions=None, hidden=slots > positions[..., None])
        rows = torch.arange(batch, device=positions.device)[:, None]
        at = Slots(start=0, end=end, index=(rows, positions), sight=sight)
        states = fast.through(embedded, (batch, new), at)
        return fast.logits(states[:, -1:] if last else states)


class Round:
    """The device's part of a round: draft, score and verify, over one cache per model."""

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
        device = inputs.counts.device
        # graphs without and with the verification; ``in_graph``: whether it can be captured
        self.scored = Repeated(self._score, device)
        self.whole = Repeated(lambda end: self._verify(self._score(end)), device)
        self.in_graph: bool | None = None

    def prepare(self, end: int) -> bool:
        """Capture the graph for ``end`` if not done before; return whether this call did so."""
        if not captures(self.inputs.counts.device):
            return False
        if self.in_graph is None:
            logits = self._score(end)
            self.in_graph = never_waits(lambda: self._verify(logits), logits.token_ids.device)
        return (self.whole if self.in_graph else self.scored).prepare(end)

    def __call__(self, end: int) -> Outcome:
        """Return the round's outcome, on the device; attention reads ``end`` cache positions.

        A verification that waits for the device cannot be captured, and runs after the graph.
        """
        self.prepare(end)
        if self.in_graph is False:
            return self._verify(self.scored(end))
        return self.whole(end)

    def _score(self, end: int) -> Logits:
        """Draft, and run the target over each text's last token and its drafted tokens."""
        inputs = self.inputs
        ids, logits = self._propose(end)
        positions = inputs.lengths[:, None] - 1 + torch.arange(ids.shape[1] + 1, device=ids.device)
        fed = torch.cat([inputs.tokens[:, 1:], ids], 1)
        coins = inputs.coins[:, inputs.width : -1], inputs.coins[:, -1]
        target = self.target(fed, positions, end)
        return Logits(target, logits, ids, inputs.draft_lengths, *coins, inputs.lengths)

    def _propose(self, end: int) -> tuple[Tensor, Tensor | None]:
        """Draft K tokens for every text; return ids (B, K) and logits, None if deterministic."""
        inputs = self.inputs
        if self.draft is None or not inputs.width:
            return inputs.tokens[:, :0], None
        # after a round that accepted all drafted tokens, the cache lacks the last but one token
        positions = inputs.lengths[:, None] + torch.arange(-2, 0, device=inputs.counts.device)
        positions = positions.clamp(min=0)  # a text of one token feeds it twice at position 0
        after = self.draft(inputs.tokens, positions, end, last=True)[:, 0]
        ids, logits = [self._drawn(after, 0)], [after]
        for step in range(1, inputs.width):
            position = (inputs.lengths - 1 + step)[:, None]
            after = self.draft(ids[-1][:, None], position, end, last=True)[:, 0]
            ids.append(self._drawn(after, step))
            logits.append(after)
        deterministic = self.temperature == 0
        return torch.stack(ids, 1), None if deterministic else torch.stack(logits, 1)

    def _drawn(self, logits: Float[Tensor, "batch vocab"], step: int) -> Int[Tensor, "batch"]:
        if self.temperature == 0:
            return logits.argmax(-1)
        token = pick(probabilities(logits, self.temperature), self.inputs.coins[:, step])
        return token.clamp_(min=0)  # −1 from a row that is no distribution: verification raises

    def _verify(self, logits: Logits) -> Outcome:
        verdict = self.verify(logits)
        ends = verdict.num_accepted[:, None], verdict.last[:, None]
        return Outcome(logits, verdict, torch.cat([logits.token_ids, *ends], 1))
