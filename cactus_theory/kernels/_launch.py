"""The launches of one verification step: a fixed sequence, whatever the rows hold."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cactus_theory.kernels import _band, _draws, _rows, _verdicts
from cactus_theory.kernels.memory import Layout, Workspace
from cactus_theory.kernels.policies import BAND, KernelPolicy

# Newton steps at prices from 0.5 nats on, and below; rows of tests took at most 6 and 11
STEPS, MANY_STEPS = 8, 12
FAR_RATIO = 0.1353352832366127  # e^-2
# tokens a warp takes at once
TOKENS_A_WARP = 1024
MOST_WARPS = 8
# parts of rows that a warp merges: two for each of its threads
PAIRS_A_WARP = 64


@dataclass(frozen=True)
class Step:
    """The arguments of one verification step, checked."""

    policy: KernelPolicy
    block: bool
    layout: Layout
    target: Tensor
    draft: Tensor | None
    ids: Tensor
    temperature: float | Tensor
    seeds: Tensor
    positions: Tensor
    workspace: Workspace
    output: Tensor
    counts: Tensor

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Return the arguments by their names in the kernels; ``_rows.py`` says what they are."""
        work, draft = self.workspace, self.target if self.draft is None else self.draft
        lengths, flat = self.layout.lengths, self.layout.flat
        per_row = isinstance(self.temperature, Tensor)
        high, low = self.policy.high_and_low
        target_batch, target_row = _steps(self.target)
        draft_batch, draft_row = _steps(draft)
        return {
            "target": self.target, "draft": draft, "ids": self.ids,
            "lengths": self.ids if lengths is None else lengths,
            "temperature": self.temperature if per_row else self.target,
            "scalar": 1.0 if per_row else float(self.temperature),
            "seeds": self.seeds, "positions": self.positions,
            "output": self.output, "counts": self.counts, "output_step": self.output.stride(0),
            "target_batch": target_batch, "target_row": target_row,
            "draft_batch": draft_batch, "draft_row": draft_row,
            "ids_step": 0 if flat else self.ids.stride(0),
            "vocab": work.vocab, "high": high, "low": low, "ROWS": work.rows,
            "WIDTH": work.width, "PLACES": next_power(work.width), "PARTS": work.parts,
            "MOST_PARTS": next_power(work.parts), "PART": work.part, "FLAT": flat,
            "HAS_LENGTHS": lengths is not None, "CERTAIN": self.draft is None,
            "PER_ROW": per_row, "GREEDY": per_row or self.temperature == 0,
            "KIND": self.policy.kind, "BLOCK": self.block,
            "SOLVED": self.policy.kind == BAND and self.draft is not None,
            "FROM": self.steps % 2, "OUTPUTS": next_power(work.width + 1),
            **work.tensors,
        }  # fmt: skip

    @property
    def steps(self) -> int:
        """Return how many Newton steps there are."""
        return STEPS if self.policy.knob >= FAR_RATIO else MANY_STEPS

    @property
    def merging_warps(self) -> int:
        """Return how many warps merge the parts of a request's rows."""
        pairs = next_power(self.workspace.width) * next_power(self.workspace.parts)
        return min(max(pairs // PAIRS_A_WARP, 1), MOST_WARPS)

    def run(self) -> None:
        """Launch everything on the device of the logits."""
        work, shared = self.workspace, self.shared
        warps = warps_for(work.part)
        with torch.cuda.device_of(self.target):
            if not work.width:
                work.accepted.zero_()
            else:
                kinds = 1 if self.draft is None else 2
                launch(_rows.sum_rows, (kinds * work.rows, work.parts), shared, warps)
                self._run_block() if self.block else self._run_chain()
            launch(_draws.race, (work.batch, work.parts), shared, warps)
            launch(_draws.finish, (work.batch,), shared, 1)

    def _run_chain(self) -> None:
        launch(_verdicts.judge, (self.workspace.batch,), self.shared, self.merging_warps)
        if self.shared["SOLVED"]:
            self._solve(decide=True)

    def _run_block(self) -> None:
        work, shared = self.workspace, self.shared
        launch(_verdicts.block_entries, (work.batch,), shared, self.merging_warps)
        if shared["SOLVED"]:
            self._solve(decide=False)
        launch(_verdicts.block_walk, (work.batch,), shared, 1)
        if self.draft is not None:
            launch(_verdicts.shortfall, (work.rows, work.parts), shared, warps_for(work.part))
        launch(_verdicts.block_judge, (work.batch,), shared, self.merging_warps)

    def _solve(self, decide: bool) -> None:
        """Take Newton steps; after the first, decide what a chain left open."""
        work = self.workspace
        grid, warps = (work.rows, work.parts), warps_for(work.part)
        for step in range(self.steps):
            at = {**self.shared, "FROM": step % 2, "FIRST": step == 0}
            launch(_band.band_step, grid, at, warps)
            if decide and step == 0:
                launch(_verdicts.band_judge, (work.batch,), {**at, "FROM": 1}, self.merging_warps)


def draw(
    logits: Tensor,
    temperature: float | Tensor,
    seeds: Tensor,
    positions: Tensor,
    place: int,
    work: Workspace,
    out: Tensor,
) -> None:
    """Draw one token from each row of logits, on their device."""
    per_row = isinstance(temperature, Tensor)
    shared = {
        "logits": logits, "seeds": seeds, "positions": positions,
        "temperature": temperature if per_row else logits,
        "scalar": 1.0 if per_row else float(temperature),
        "keys": work.whole_keys, "tokens": work.whole_tokens, "out": out,
        "row_step": logits.stride(0), "vocab": work.vocab, "place": place,
        "PARTS": work.parts, "MOST_PARTS": next_power(work.parts), "PART": work.part,
        "PER_ROW": per_row,
    }  # fmt: skip
    with torch.cuda.device_of(logits):
        launch(_draws.race_alone, (work.batch, work.parts), shared, warps_for(work.part))
        launch(_draws.pick_alone, (work.batch,), shared, 1)


def launch(kernel: Any, grid: tuple[int, ...], shared: dict[str, Any], warps: int) -> None:
    """Launch a kernel with those of the arguments that it has."""
    arguments = {name: shared[name] for name in kernel.arg_names}
    # a release warns where fusion is left unsaid
    kernel[grid](**arguments, num_warps=warps, enable_fp_fusion=True)


def next_power(count: int) -> int:
    """Return the least power of two from ``count`` on, and 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()


def warps_for(part: int) -> int:
    """Return how many warps share a part of a row."""
    return min(max(part // TOKENS_A_WARP, 1), MOST_WARPS)


def _steps(logits: Tensor) -> tuple[int, int]:
    """Return the strides of requests and of rows."""
    if logits.ndim == 2:
        return 0, logits.stride(0)
    return logits.stride(0), logits.stride(1)
