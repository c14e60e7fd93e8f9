r"""The arguments of kernels, in groups of tensors and numbers, and checks of their shapes.

A kernel takes the groups that it reads and writes, and the :class:`Form` that it is compiled for.
B requests draft up to K tokens each; a row over the vocabulary V has C parts. Inputs are
:class:`Requests`, the target's and the draft's :class:`LogitRows` (None for a deterministic draft)
and the :class:`SplitKnob`. Intermediate results are in the tensors of a :class:`Workspace`, which
are small and whose shapes do not depend on the rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int, Int32, Int64
from torch import Tensor

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
WHOLE, COUNTS = (torch.int64,), (torch.int32, torch.int64)
# (largest vocabulary, tokens of a row in one program)
PART_BY_VOCABULARY = ((512, 512), (1024, 1024), (16384, 2048), (65536, 4096))
LONGEST_PART = 8192


class Requests(NamedTuple):
    """Drafted tokens, temperature, seed and position of each request."""

    ids: Int64[Tensor, "B K"]  # −1 after the last token
    ids_step: int  # elements from one request to the next
    lengths: Int[Tensor, "B"] | None  # draft lengths; None if ids end at −1
    temperature: Float32[Tensor, "B"] | float  # T; 0 is greedy
    vocab: int  # vocabulary size V
    seeds: Int64[Tensor, "B"]  # keys of the random numbers
    positions: Int64[Tensor, "B"]  # tokens of the text at the start of the round


class LogitRows(NamedTuple):
    """Logits of a model, and the strides of the rows."""

    logits: Float[Tensor, "*rows V"]  # target (B, K + 1, V), draft (B, K, V)
    step: int  # elements from one request to the next
    row_step: int  # elements from one row to the next
    power: float  # probabilities are softmax(power · l/T); 1 + θ for a tilted target, else 1


class SplitKnob(NamedTuple):
    """A policy's knob as a sum of two float32 numbers, for float64 precision in a kernel."""

    high: float
    low: float


class Softmax(NamedTuple):
    """Softmax constants of a request's target rows, followed by its draft rows, if any."""

    most: Float32[Tensor, "B 2 K C"]  # a part's largest logit
    whole: Float32[Tensor, "B 2 K C"]  # a part's Σ exp((l − most)/T)
    likeliest: Int32[Tensor, "B 2 K C"]  # a part's first token with that logit; if T may be 0
    peaks: Float32[Tensor, "B 2 K"]  # M, the row's largest logit
    weights: Float32[Tensor, "B 2 K"]  # 1/S, S the row's Σ exp((l − M)/T)


class BandBuffers(NamedTuple):
    """State of the Newton search for each row's upper edge; steps alternate between two states."""

    points: Float64[Tensor, "B K"]  # the latest estimate of the edge
    lower: Float64[Tensor, "B K"]  # lower end of the bracket
    upper: Float64[Tensor, "B K"]  # upper end
    flags: Int32[Tensor, "B K"]  # bits of READ, LOW_SEEN, HIGH_SEEN
    excess: Float32[Tensor, "B K C"]  # E at the point, by parts
    slopes: Float32[Tensor, "B K C"]  # E′ at the point, by parts


class DecisionBuffers(NamedTuple):
    """Verdicts, numbers of accepted tokens, and s of the residual (s q − p)₊ after them."""

    verdicts: Int32[Tensor, "B K"]  # REFUSED, ACCEPTED or OPEN, for each drafted token
    accepted: Int32[Tensor, "B"]  # number of accepted tokens
    scales: Float64[Tensor, "B"]  # scale s of the residual


class BlockBuffers(NamedTuple):
    """Probabilities, alive ratios and residuals at the nodes of each block."""

    q: Float64[Tensor, "B K"]  # q_n of the drafted token
    p: Float64[Tensor, "B K"]  # p_n of the drafted token
    alive: Float64[Tensor, "B K"]  # alive ratio P at the drafted token's row
    scales: Float64[Tensor, "B K"]  # scale s of the row's residual
    closed: Float64[Tensor, "B K"]  # mass of the residual; 0 if the node fails anyway; −1: sum it
    lefts: Float32[Tensor, "B K C"]  # Σ (s q − p)₊, by parts
    sure: Int32[Tensor, "B"]  # last node with P = 1; the draft's length if all is accepted


class Sums(NamedTuple):
    """Sums by parts of the row from which each request's last token is drawn."""

    most: Float32[Tensor, "B C"]  # a part's largest logit
    whole: Float32[Tensor, "B C"]  # a part's Σ exp((l − most)/T)
    likeliest: Int32[Tensor, "B C"]  # a part's first token with that logit; if T may be 0
    left: Float32[Tensor, "B C"]  # a part's Σ (s q − p)₊ after a rejection, else 0


class Emitted(NamedTuple):
    """Outputs of the step."""

    output: Int64[Tensor, "B K1"]  # emitted tokens, then −1
    step: int  # elements from one request to the next
    counts: Int64[Tensor, "B"]  # number of accepted tokens


@dataclass(frozen=True)
class Form:
    """Sizes and flags that a kernel is compiled for."""

    width: int  # K, the most drafted tokens of a request
    parts: int  # C, parts of a row
    part: int  # tokens of a part
    deterministic: bool  # whether p is one-hot, without draft rows
    per_row: bool  # whether each request has its own temperature
    greedy: bool  # whether some T may be 0
    overlapping: bool  # whether a kernel is launched while the one before still runs

    @property
    def rows(self) -> int:
        """Return the number of rows of a request that are summed: K, or 2 K with draft rows."""
        return self.width if self.deterministic else 2 * self.width

    @property
    def places(self) -> int:
        """Return the least power of two ≥ K, the length of a kernel's arrays by drafted token."""
        return next_power(self.width)

    @property
    def outputs(self) -> int:
        """Return the least power of two ≥ K + 1, the length of arrays of emitted tokens."""
        return next_power(self.width + 1)

    @property
    def most_parts(self) -> int:
        """Return the least power of two ≥ C, the length of arrays by part of a row."""
        return next_power(self.parts)


class Workspace:
    """Memory for the intermediate results of :func:`verify_logits`, to reuse in every step.

    A workspace serves one step at a time, with the sizes that it was made for. With a workspace and
    ``out`` a step allocates no memory. The workspace holds a few numbers for each part of each row,
    and for each request.

    Parameters
    ----------
    batch : B, the number of requests.
    width : K, the most drafted tokens of a request.
    vocab : V, the size of the vocabulary.
    device : device of the logits.

    Attributes
    ----------
    block : after a step with the verifier ``block``, ``block.alive``, (B, K) float64, has the alive
        ratio P at each drafted token's row.

    Examples
    --------
    >>> Workspace(batch=2, width=4, vocab=1000, device="cpu").sizes
    (2, 4, 1000)
    """

    def __init__(
        self, batch: int, width: int, vocab: int, device: torch.device | str = "cuda"
    ) -> None:
        self.batch, self.width, self.vocab = batch, width, vocab
        self.device = torch.device(device)
        self.part = part_for(vocab)
        self.parts = -(-vocab // self.part)
        self.softmax, self.decision = self._zeros(Softmax), self._zeros(DecisionBuffers)
        self.bands = self._zeros(BandBuffers), self._zeros(BandBuffers)
        self.block, self.sums = self._zeros(BlockBuffers), self._zeros(Sums)

    def _zeros(self, group: Any) -> Any:
        """Return a group of zeros with the shapes of its class's annotations; no axis is empty."""
        sizes = {"B": self.batch, "K": self.width, "C": self.parts, "2": 2}
        return group(
            *(
                torch.zeros(
                    [max(sizes[axis], 1) for axis in annotation.dim_str.split()],
                    dtype=getattr(torch, annotation.dtypes[0]),
                    device=self.device,
                )
                for annotation in group.__annotations__.values()  # such as Float32[Tensor, "B C"]
            )
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return (batch, width, vocab)."""
        return self.batch, self.width, self.vocab


def part_for(vocab: int) -> int:
    """Return the number of tokens in a part of a row, which depends on the vocabulary alone."""
    return next((part for most, part in PART_BY_VOCABULARY if vocab <= most), LONGEST_PART)


def next_power(count: int) -> int:
    """Return the least power of two ≥ ``count``; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()


def check_shapes(target: Tensor, draft: Tensor | None, ids: Tensor) -> tuple[int, int, int]:
    """Return (B, K, V) of logits and ids; raise if dtypes, shapes or strides do not match."""
    _check_logits("target_logits", target, "(B, K + 1, V)")
    if ids.dtype != torch.int64:
        raise TypeError(f"draft_token_ids: must be int64; got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"draft_token_ids: shape must be (B, K); got {tuple(ids.shape)}")
    if ids.shape[-1] > 1 and ids.stride(-1) != 1:
        raise ValueError(f"draft_token_ids: stride must be 1 along K; got {ids.stride()}")
    (batch, width), vocab = ids.shape, target.shape[-1]
    _shaped("target_logits", target, (batch, width + 1, vocab))
    if draft is not None:
        _check_logits("draft_logits", draft, "(B, K, V)")
        _shaped("draft_logits", draft, (batch, width, vocab))
    return batch, width, vocab


def _check_logits(name: str, logits: Tensor, shape: str) -> None:
    """Raise unless the logits have a dtype that kernels read and are contiguous along V."""
    if logits.dtype not in LOGITS:
        raise TypeError(f"{name}: must be float32, bfloat16 or float16; got {logits.dtype}")
    if logits.ndim != 3 or not logits.shape[-1]:
        raise ValueError(f"{name}: shape must be {shape}; got {tuple(logits.shape)}")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"{name}: stride must be 1 along V; got {logits.stride()}")


def check_per_request(
    batch: int, device: torch.device, dtypes: tuple[torch.dtype, ...], **tensors: Tensor
) -> None:
    """Raise unless the values are (B,), contiguous, of one of the dtypes and on the device."""
    for name, value in tensors.items():
        _shaped(name, value, (batch,))
        if value.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name}: must be {allowed}; got {value.dtype}")
        if value.device != device:
            raise ValueError(f"{name}: must be on {device}; got {value.device}")
        if not value.is_contiguous():
            raise ValueError(f"{name}: must be contiguous; got strides {value.stride()}")


def checked_temperature(
    temperature: float | Tensor, batch: int, device: torch.device
) -> float | Tensor:
    """Return the temperature, one number or (B,) float32; raise for an invalid temperature."""
    if isinstance(temperature, Tensor):
        check_per_request(batch, device, (torch.float32,), temperature=temperature)
        return temperature
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: must lie in [0, inf); got {temperature!r}")
    return float(temperature)


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape must be {shape}; got {tuple(value.shape)}")
