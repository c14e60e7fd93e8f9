"""Linear maps for a few rows at a time, by whichever kernel is faster for that many.

What is made of a model's weights is made anew when any changes, which a fingerprint tells.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# multiply-adds from which oneDNN's kernel on packed weights beats the default one on a CPU;
# measured: 106 against 54 µs for 40 rows of 128 → 704, 9 against 12 µs for 5 of 128 → 384
PACKED_FROM = 450_000
# multiply-adds up to which FBGEMM's kernel, which runs on one thread, is the one to take. Measured
# on one thread over all maps of a model of 4.5 million weights, it against oneDNN's, in µs:
# 170 and 480 for 1 row, 230 and 540 for 5, 1,580 and 1,940 for 40, 10,600 and 11,000 for 256
HALF_UP_TO = 2**24
# the self-check of FBGEMM's kernel: a sum of some hundred products in single precision
KERNEL_ERROR = 1e-4


class Linear:
    """x ↦ x Wᵀ + b for x (N, in); weights are turned and packed once, for faster calls later.

    Weights that half precision holds exactly, as they do where a checkpoint was stored so, are
    read in half precision and multiplied in single: the same products from half the memory.
    A single row of 192 → 2048 takes 50 µs against weights as they are stored, 30 µs turned.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Tensor | None = None) -> None:
        self.turned, self.bias = weight.detach().t().contiguous(), bias
        self.packed = _packed(weight)
        self.half = _half(weight.detach())

    def __call__(self, x: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        """Return the image of each row."""
        rows = x.shape[0]
        work = rows * self.turned.numel()
        if self.half is not None and work <= HALF_UP_TO:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.half, self.bias)
        if self.packed is None or rows < 2 or work < PACKED_FROM:
            if self.bias is None:
                return torch.mm(x, self.turned)
            return torch.addmm(self.bias, x, self.turned)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def joined(parts: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of linear modules side by side."""
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias for part in parts]
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def lay_together(parts: Sequence[Any]) -> None:
    """Move the weights of linear modules of one input into one memory, one after another.

    The modules stay what they are; :func:`adjacent` then reads all weights as one, which takes
    one kernel instead of several. For models that nothing else holds parts of.
    """
    whole = joined(parts)[0]
    for part, weight in zip(parts, whole.split([part.out_features for part in parts]), strict=True):
        part.weight = torch.nn.Parameter(weight, requires_grad=False)


def adjacent(parts: Sequence[Any]) -> Float[Tensor, "out in"] | None:
    """Return the weights of linear modules as one, None where they are not one memory."""
    weights = [part.weight.detach() for part in parts]
    first, inner = weights[0], weights[0].shape[1]
    at = first.storage_offset()
    for part, weight in zip(parts, weights, strict=True):
        same_memory = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_memory or weight.storage_offset() != at or weight.stride() != (inner, 1):
            return None
        if part.bias is not None or weight.dtype != first.dtype or weight.shape[1] != inner:
            return None
        at += weight.numel()
    return first.as_strided((sum(map(len, weights)), inner), (inner, 1), first.storage_offset())


def exact_in_half(weight: Tensor) -> bool:
    """Return whether single-precision weights on a CPU lose nothing in half precision."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return bool((weight.half().float() == weight).all())


def _half(weight: Tensor) -> Any:
    """Return the weight in FBGEMM's order, None where it would change or there is no kernel."""
    if not exact_in_half(weight):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says once that a later PyTorch may do without it
            half = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            row = torch.linspace(-1, 1, weight.shape[1])[None]
            products = torch.fbgemm_linear_fp16_weight_fp32_activation(row, half, None)
    except (AttributeError, TypeError, RuntimeError):  # another PyTorch, another processor
        return None
    expected, scale = row @ weight.t(), row.abs() @ weight.abs().t()
    return half if bool(((products - expected).abs() <= KERNEL_ERROR * scale).all()) else None


def _packed(weight: Tensor) -> Any:
    """Return the weight in oneDNN's order, None where it has none."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)
    except (AttributeError, RuntimeError):  # a build without it
        return None


# weights of the models in use, for as long as these live and keep them unchanged
_PREPARED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def prepared(
    module: Any, make: Callable[..., Any], compared: bool = True, others: Sequence[Tensor] = ()
) -> Any:
    """Return what ``make`` makes of a module, made once as long as its weights stay as they are.

    ``compared`` compares their content too: version counters would miss
    ``weight.data.copy_(…)``, and weights made in inference mode have none. So it is for ``others``,
    which ``make`` is given, too.
    """
    parameters = [weight.detach() for weight in (*module.parameters(), *others)]
    state: list[Any] = [(weight.data_ptr(), weight.shape, weight.dtype) for weight in parameters]
    if compared:
        state.append(fingerprint(parameters))
    known = _PREPARED.get(module)
    if known is None or known[0] != state:
        known = _PREPARED[module] = (state, make(module, *others))
    return known[1]


WIDE = 4096  # 8-byte words a block: their multipliers stay in the processor's first cache


def fingerprint(weights: Sequence[Tensor]) -> list[int]:
    """Return Σⱼ bⱼ wᵢⱼ mod 2⁶⁴ for every block i of the tensors' bytes, WIDE 8-byte words each.

    The multipliers are random and odd, hence invertible: a single changed word is always seen,
    and other changes are missed for one in about 2⁶² choices of multipliers. The order of the
    values counts. The 21 MB of a model of 5 million weights take 2.7 ms; their sums take 0.9 ms.
    """
    return torch.cat([part for weight in weights for part in _blocks(weight)]).tolist()


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    words = _words(weight)
    multipliers, rest = _multipliers(words.device), words.shape[0] % WIDE
    whole = words.shape[0] - rest
    if whole:
        yield _times(words[:whole].view(-1, WIDE), multipliers)
    if rest:
        yield _times(words[None, whole:], multipliers[:rest])


def _words(weight: Tensor) -> Tensor:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    if raw.shape[0] % 8:
        raw = F.pad(raw, (0, -raw.shape[0] % 8))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _times(rows: Tensor, multipliers: Tensor) -> Tensor:
    """Return the products of integer rows with a vector; only the CPU has them as one call."""
    return rows @ multipliers if rows.device.type == "cpu" else (rows * multipliers).sum(-1)


@lru_cache(maxsize=4)
def _multipliers(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        drawn = torch.randint(-(2**62), 2**62, (WIDE,), generator=torch.Generator().manual_seed(0))
        return (2 * drawn + 1).to(device)
