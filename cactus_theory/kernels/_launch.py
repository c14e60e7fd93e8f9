"""The launches of one verification step: a fixed sequence, whatever the rows hold."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from cactus_theory.kernels import _band, _draws, _rows, _verdicts
from cactus_theory.kernels.buffers import BandBuffers, Emitted, Form, LogitRows, Requests, Workspace
from cactus_theory.kernels.layout import Layout
from cactus_theory.kernels.policies import BAND, KernelPolicy
from cactus_theory.kernels.tiles import warps_for, warps_merging


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
        """Return the arguments by their names in the kernels, as ``buffers.py`` defines them."""
        work, flat = self.workspace, self.layout.flat
        return {
            "requests": Requests(
                self.ids, 0 if flat else self.ids.stride(0), self.layout.lengths,
                self.temperature, work.vocab, self.seeds, self.positions,
            ),
            "target": _rows_in(self.target, 1),
            "draft": None if self.draft is None else _rows_in(self.draft, 0),
            "knob": self.policy.high_and_low,
            "KIND": self.policy.kind,
            "softmax": work.softmax, "decision": work.decision, "block": work.block,
            "band": work.bands[0] if self.solved else None, "sums": work.sums,
            "emitted": Emitted(self.output, self.output.stride(0), self.counts),
            "form": _form(work, self.temperature, flat, self.draft is None),
        }  # fmt: skip

    @property
    def solved(self) -> bool:
        """Return whether the bands of rows must be solved: a band with draft rows."""
        return self.policy.kind == BAND and self.draft is not None

    @property
    def steps(self) -> int:
        """Return the number of Newton steps at this price."""
        return _band.STEPS if self.policy.knob >= _band.FAR_RATIO else _band.MANY_STEPS

    @property
    def merging_warps(self) -> int:
        """Return the number of warps that merge the parts of a request's rows."""
        form = self.shared["form"]
        return warps_merging(form.places * form.most_parts)

    def run(self) -> None:
        """Launch everything on the device of the logits."""
        work, shared, form = self.workspace, self.shared, self.shared["form"]
        warps, edges = warps_for(form.part), None
        with torch.cuda.device_of(self.target):
            if not work.width:
                work.decision.accepted.zero_()
            else:
                launch(_rows.sum_rows, (work.batch * form.rows, form.parts), shared, warps)
                if self.block:
                    self._run_block()
                else:
                    edges = self._run_chain()
            shared = {**shared, "band": edges}
            launch(_draws.leftover, (work.batch, form.parts), shared, warps)
            launch(_draws.finish, (work.batch,), shared, warps)

    def _run_chain(self) -> BandBuffers | None:
        """Decide token by token; return the buffers with the edges of refused rows."""
        launch(_verdicts.judge, (self.workspace.batch,), self.shared, self.merging_warps)
        return self._solve(decide=True) if self.solved else None

    def _run_block(self) -> None:
        work, shared, form = self.workspace, self.shared, self.shared["form"]
        launch(_verdicts.block_entries, (work.batch,), shared, self.merging_warps)
        band = self._solve(decide=False) if self.solved else None
        launch(_verdicts.block_walk, (work.batch,), {**shared, "band": band}, 1)
        if self.draft is not None:
            grid = work.batch * work.width, form.parts
            launch(_verdicts.shortfall, grid, shared, warps_for(form.part))
        launch(_verdicts.block_judge, (work.batch,), shared, self.merging_warps)

    def _solve(self, decide: bool) -> BandBuffers:
        """Take Newton steps; after the first, decide the OPEN tokens of a chain.

        Then only the rows of refused tokens are left.
        """
        work, form = self.workspace, self.shared["form"]
        warps = warps_for(form.part)
        band, stepped = work.bands
        for step in range(self.steps):
            refused = decide and step > 0
            at = {**self.shared, "band": band, "stepped": stepped}
            at |= {"FIRST": step == 0, "REFUSED": refused}
            rows = work.batch * (1 if refused else work.width)
            launch(_band.band_step, (rows, form.parts), at, warps)
            band, stepped = stepped, band
            if decide and step == 0:
                at = {**self.shared, "band": band}
                launch(_verdicts.band_judge, (work.batch,), at, self.merging_warps)
        return band


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
    form = _form(work, temperature, flat=False, deterministic=True)
    shared = {
        "requests": Requests(None, 0, None, temperature, work.vocab, seeds, positions),
        "rows": LogitRows(logits, logits.stride(0), 0),
        "sums": work.sums, "place": place, "out": out, "form": form,
    }  # fmt: skip
    warps = warps_for(form.part)
    with torch.cuda.device_of(logits):
        launch(_draws.sum_alone, (work.batch, form.parts), shared, warps)
        launch(_draws.pick_alone, (work.batch,), shared, warps)


def launch(kernel: Any, grid: tuple[int, ...], shared: dict[str, Any], warps: int) -> None:
    """Launch a kernel with the arguments that it names."""
    arguments = {name: shared[name] for name in kernel.arg_names}
    # some release of Triton warns if ``enable_fp_fusion`` is not given
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if shared["form"].overlapping:
        options["launch_pdl"] = True
    kernel[grid](**arguments, **options)


def _form(work: Workspace, temperature: float | Tensor, flat: bool, deterministic: bool) -> Form:
    per_row = isinstance(temperature, Tensor)
    greedy = per_row or temperature == 0
    overlapping = overlaps(work.device)
    return Form(
        work.width, work.parts, work.part, flat, deterministic, per_row, greedy, overlapping
    )


def overlaps(device: torch.device) -> bool:
    """Return whether kernels there can be launched while the one before still runs (Hopper on)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _rows_in(logits: Tensor, bonus: int) -> LogitRows:
    """Return rows with their strides; flat, a request has ``bonus`` more than drafted tokens."""
    if logits.ndim == 2:
        return LogitRows(logits, tl.constexpr(bonus), logits.stride(0))
    return LogitRows(logits, logits.stride(0), logits.stride(1))
