"""The kernel launches of one verification step, in a sequence that does not depend on the rows."""

from typing import Any

import torch
from torch import Tensor

from cactus_theory.kernels import _band, _draws, _rows, _verdicts
from cactus_theory.kernels.buffers import BandBuffers, Emitted, Form, LogitRows, Requests, Workspace
from cactus_theory.kernels.policies import BAND, KernelPolicy

# tokens of a part per warp, and the most warps of a program
TOKENS_A_WARP = 1024
MOST_WARPS = 8
# parts of rows that a warp merges: two per thread of 32
PAIRS_A_WARP = 64


class Step:
    """The launches of one verification step; arguments are checked before (``buffers.py``)."""

    def __init__(
        self, policy: KernelPolicy, block: bool, requests: Requests, target: Tensor,
        draft: Tensor | None, work: Workspace, output: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        self.block, self.work, self.form = block, work, _form(work, requests, draft is None)
        # whether bands must be solved (a one-hot p needs none), and the number of Newton steps
        self.solved = policy.kind == BAND and draft is not None
        self.steps = _band.STEPS if policy.knob >= _band.FAR_RATIO else _band.MANY_STEPS
        self.shared: dict[str, Any] = {
            "requests": requests,
            "target": LogitRows(target, target.stride(0), target.stride(1), 1.0 + policy.tilt),
            "draft": None
            if draft is None
            else LogitRows(draft, draft.stride(0), draft.stride(1), 1.0),
            "knob": policy.high_and_low,
            "KIND": policy.kind,
            "softmax": work.softmax, "decision": work.decision, "block": work.block,
            "band": work.bands[0] if self.solved else None, "sums": work.sums,
            "emitted": Emitted(output, output.stride(0), counts),
            "form": self.form,
        }  # fmt: skip

    def run(self) -> None:
        """Launch the kernels of the step on the device of the logits."""
        work, form, edges = self.work, self.form, None
        with torch.cuda.device_of(work.sums.most):
            if not work.width:
                work.decision.accepted.zero_()
            else:
                self.by_parts(_rows.sum_rows, work.batch * form.rows)
                edges = self._run_block() if self.block else self._run_chain()
            self.by_parts(_draws.leftover, work.batch, band=edges)
            launch(_draws.finish, (work.batch,), {**self.shared, "band": edges}, _warps(form))

    def by_parts(self, kernel: Any, rows: int, **other: Any) -> None:
        """Launch a kernel with one program per part of a row."""
        launch(kernel, (rows, self.form.parts), {**self.shared, **other}, _warps(self.form))

    def by_request(self, kernel: Any, **other: Any) -> None:
        """Launch a kernel with one program per request, which merges the parts of its rows."""
        parts = self.form.places * self.form.most_parts
        warps = min(max(parts // PAIRS_A_WARP, 1), MOST_WARPS)
        launch(kernel, (self.work.batch,), {**self.shared, **other}, warps)

    def _run_chain(self) -> BandBuffers | None:
        """Verify token by token; return the state of rejected tokens' bands, None without bands."""
        self.by_request(_verdicts.judge)
        return self._solve(decide=True) if self.solved else None

    def _run_block(self) -> None:
        """Verify blocks; return None, as ``decision.scales`` then has the residuals' scales."""
        self.by_request(_verdicts.block_entries)
        band = self._solve(decide=False) if self.solved else None
        launch(_verdicts.block_walk, (self.work.batch,), {**self.shared, "band": band}, 1)
        if not self.form.deterministic:
            self.by_parts(_verdicts.shortfall, self.work.batch * self.work.width)
        self.by_request(_verdicts.block_judge)

    def _solve(self, decide: bool) -> BandBuffers:
        """Solve bands by Newton steps; return the buffers with the state after the last step.

        With ``decide`` (a chain) the first step computes E (``_band.py``) of all rows to read. The
        sign of E decides the tokens that q_n and p_n leave OPEN. Later steps solve only the rows of
        rejected tokens.
        """
        band, stepped = self.work.bands
        for step in range(self.steps):
            refused = decide and step > 0
            rows = self.work.batch * (1 if refused else self.work.width)
            buffers = {"band": band, "stepped": stepped, "FIRST": step == 0, "REFUSED": refused}
            self.by_parts(_band.band_step, rows, **buffers)
            band, stepped = stepped, band
            if decide and step == 0:
                self.by_request(_verdicts.band_judge, band=band)
        return band


def launch(kernel: Any, grid: tuple[int, ...], shared: dict[str, Any], warps: int) -> None:
    """Launch a kernel with those of the ``shared`` arguments that it takes."""
    arguments = {name: shared[name] for name in kernel.arg_names}
    # some release of Triton warns if ``enable_fp_fusion`` is not given
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if shared["form"].overlapping:
        options["launch_pdl"] = True
    kernel[grid](**arguments, **options)


def _warps(form: Form) -> int:
    """Return the number of warps that share a part of a row."""
    return min(max(form.part // TOKENS_A_WARP, 1), MOST_WARPS)


def _form(work: Workspace, requests: Requests, deterministic: bool) -> Form:
    per_row = isinstance(requests.temperature, Tensor)
    greedy = per_row or bool(requests.temperature == 0)
    sizes = work.width, work.parts, work.part
    return Form(*sizes, deterministic, per_row, greedy, overlaps(work.device))


def overlaps(device: torch.device) -> bool:
    """Return whether a device can launch a kernel while the one before runs (Hopper and later)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
