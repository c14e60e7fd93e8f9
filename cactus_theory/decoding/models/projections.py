"""Linear maps that are fast for a few rows, and copies of weights for the fast pass.

Copies are kept until the model's weights change; a decode looks for changes when it begins. A
change during a decode takes effect in the next decode.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.threads import one_thread

# most multiply-adds of a map for which FBGEMM's kernel is used, which runs on one thread. Times of
# FBGEMM and of oneDNN in µs, on one thread, over all maps of a model of 4.5 million weights:
# 170 and 480 for 1 row, 230 and 540 for 5, 1,580 and 1,940 for 40, 10,600 and 11,000 for 256
HALF_UP_TO = 2**24
# dtypes of weights that are packed, and numbers of rows for which oneDNN chooses the order: for
# half precision and for single precision
HALVES, PACKED_ROWS, ORDERED_ROWS = (torch.bfloat16, torch.float16), 4, 16
# most rows for which single-precision weights as stored are as fast as in oneDNN's order. Times in
# ms of all projections of 135 M parameters on one thread, as stored and in oneDNN's order: on a
# Xeon with AVX-512 60 and 71 for 1 row, 69 and 75 for 3, 120 and 71 for 4, 174 and 85 for 9; on an
# EPYC with AVX2 alone 46 and 49 for 1 row, 78 and 46 for 2, 103 and 50 for 3, 80 and 55 for 4
FEW_ROWS = 1 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 3
# largest relative error in the self-check of a kernel: sums of some hundred float32 products
KERNEL_ERROR = 1e-4
# module → the state of its weights, and the object made of them
_PREPARED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


class Preparation(threading.local):
    """Seconds that this thread has spent on work done once: laying out weights, checking models.

    The total only grows. A decode counts the difference between its start and its first round.
    """

    seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of a ``with`` block."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


preparation = Preparation()


class Linear:
    """The map x ↦ x Wᵀ + b for x (N, in), with weights laid out once for faster calls.

    Weights in half precision are stored once in oneDNN's layout, into which ``F.linear`` would
    bring them in each call. All projections of a model of 135 M parameters then take 25 ms for 1
    to 9 rows, instead of 37 to 52 ms. Single-precision weights that float16 holds exactly (those of
    a float16 checkpoint) are read from memory in float16 and multiplied in single precision. The
    products are the same, and half as much memory is read. All other weights are stored transposed:
    one row of 192 → 2048 takes 30 µs instead of 50 µs.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Tensor | None = None) -> None:
        weight = weight.detach()
        self.bias, self.half, self.packed = bias, _half(weight), _packed(weight)
        if self.half is None and self.packed is None:
            weight = weight.t().contiguous().t()
        self.weight, self.entries = weight if self.packed is None else None, weight.numel()

    def __call__(self, x: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        """Return x Wᵀ + b."""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.half is not None and x.shape[0] * self.entries <= HALF_UP_TO:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.half, self.bias)
        assert self.weight is not None  # None only if packed
        return F.linear(x, self.weight, self.bias)


class Ordered:
    """A linear module with a second copy of single-precision weights, in oneDNN's memory layout.

    The copy is read if x has more than a few rows (``FEW_ROWS``): ``F.linear`` then takes longer,
    as it brings the weights into this layout in each call.
    """

    def __init__(self, module: Any) -> None:
        self.weight, bias = module.weight.detach(), module.bias
        self.bias = None if bias is None else bias.detach()
        self.packed = _packed(self.weight, (torch.float32,), ORDERED_ROWS, KERNEL_ERROR)

    def __call__(self, x: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        """Return x Wᵀ + b."""
        if self.packed is None or len(x) <= FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def joined(parts: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return the weights and the biases of linear modules, each joined along the outputs."""
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias for part in parts]
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def exact_in_half(weight: Tensor) -> bool:
    """Return whether single-precision weights on a CPU lose nothing in half precision."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return bool((weight.half().float() == weight).all())


def _half(weight: Tensor) -> Any:
    """Return the weight as FBGEMM stores it; None if half precision is inexact or has no kernel.

    A product with a test row is compared with PyTorch's, since kernels differ by processor.
    """
    if not exact_in_half(weight):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecation warning
            half = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            row = torch.linspace(-1, 1, weight.shape[1], device=weight.device)[None]
            products = torch.fbgemm_linear_fp16_weight_fp32_activation(row, half, None)
    except (AttributeError, TypeError, RuntimeError):  # another PyTorch, another processor
        return None
    expected, scale = row @ weight.t(), row.abs() @ weight.abs().t()
    return half if bool(((products - expected).abs() <= KERNEL_ERROR * scale).all()) else None


def _packed(
    weight: Tensor,
    dtypes: Sequence[torch.dtype] = HALVES,
    rows: int = PACKED_ROWS,
    error: float | None = None,
) -> Any:
    """Return a weight in oneDNN's layout for calls with ``rows`` rows; None without such a kernel.

    ``error`` is the largest relative error that a self-check allows, by default the dtype's ε.
    """
    if weight.dtype not in dtypes or weight.device.type != "cpu" or not weight.numel():
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        row = torch.linspace(-1, 1, weight.shape[1], device="cpu").to(weight.dtype)[None]
        products = torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")
    except (AttributeError, TypeError, RuntimeError):  # another PyTorch, another processor
        return None
    expected, scale = F.linear(row, weight), F.linear(row.abs(), weight.abs())
    tolerance = (error or torch.finfo(weight.dtype).eps) * scale.float()
    return packed if bool(((products - expected).float().abs() <= tolerance).all()) else None


def packs(weight: Tensor) -> bool:
    """Return whether weights of this dtype and device are kept in oneDNN's memory layout."""
    return _packed(weight.detach()[:1, :1]) is not None


def prepared(module: Any, make: Callable[..., Any], *others: Tensor) -> Any:
    """Return ``make(module, *others)``, computed again only if the weights have changed.

    Weights are compared by address, shape, dtype and the sum of their bits, as not every change
    raises PyTorch's version counter. A change that keeps all of these, such as two values
    exchanged, is not detected.
    """
    weights = [weight.detach() for weight in (*module.parameters(), *others)]
    state = [(one.data_ptr(), one.shape, one.dtype, _sum_of_bits(one)) for one in weights]
    known = _PREPARED.get(module)
    if known is None or known[0] != state:
        with preparation.timed(), one_thread():
            known = _PREPARED[module] = (state, make(module, *others))
    return known[1]


def _sum_of_bits(weight: Tensor) -> float:
    """Return the sum of a weight's 8-byte words, or of its values if they do not fill words."""
    size = weight.element_size()
    if weight.numel() * size % 8 or weight.storage_offset() * size % 8:
        return float(weight.sum())
    return int(weight.flatten().view(torch.int64).sum())
