"""Check rows and tensors. Messages name the argument, its allowed values, and the value given."""

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tolerances import NEAR_ONE, ROW_SUM_TOLERANCE

ArrayLike = Any  # torch.Tensor, numpy.ndarray, or nested sequences of floats

ROUNDED = (
    "; rows that were rounded may be divided by their sums (normalise=True; on the command line "
    "--normalise)"
)
LOGITS = "; did you mean logits? Their softmax is probabilities (on the command line --logits)"

# most entries (rows times vocabulary) that are computed at once, but always one row at least:
# larger temporaries are mapped anew at every call; with 2^18 laws took up to five times as long
AT_ONCE = 1 << 16
# torch declares no types for these two; a tensor with an axis gives a list, nested if it has more
from_numpy: Callable[[np.ndarray], Tensor] = cast(Any, torch).from_numpy
as_list: Callable[[Tensor], list[Any]] = methodcaller("tolist")


def as_tensor(name: str, value: ArrayLike) -> Tensor:
    """Return ``value`` as a floating torch tensor; raise TypeError for other dtypes and layouts.

    Rows that require gradients are detached, so that results are part of no graph.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            raise TypeError(f"{name}: must be dense rows; got a nested tensor")
        tensor = value.detach()
    elif isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: must be rows without a mask; got a masked array; fill it first")
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name}: rows must have equal lengths; {error}") from None
        # a list such as [0, 1] holds rows, too; an array of integers is rejected
        if array.dtype.kind in "iu" and not isinstance(value, np.ndarray):
            array = array.astype(np.float64)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise TypeError(f"{name}: must hold floats; got dtype {array.dtype}")
        # ``from_numpy`` takes no other byte order and no negative stride, and warns of read-only
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        # ascontiguousarray gives a single number an axis
        tensor = from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if tensor.dtype not in ROW_SUM_TOLERANCE:
        raise TypeError(
            f"{name}: dtype must be float64, float32, float16 or bfloat16; got {tensor.dtype}"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "on the meta device" if tensor.is_meta else "sparse"
        raise TypeError(f"{name}: must be dense rows with values; got a tensor that is {kind}")
    return tensor


def check_tensor(name: str, value: Any, must_be: str, *dtypes: torch.dtype) -> None:
    """Raise TypeError, with ``must_be``, unless ``value`` is a tensor of one of the ``dtypes``."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: must be {must_be}; got {kind}")


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(as_list(mask.nonzero()[0]))


def place(at: Sequence[int], shape: Sequence[int]) -> str:
    """Return the name of a row of a batch for messages, such as ``row 1 of 6 (from 0)``."""
    if not shape:
        return "the row"
    return f"row {', '.join(map(str, at))} of {' x '.join(map(str, shape))} (from 0)"


def check_probabilities(name: str, probs: Tensor, normalise: bool = False) -> None:
    """Raise ValueError unless every row of ``probs`` (..., V) is a distribution.

    With ``normalise`` any positive sum will do: the caller divides rows by their sums. On CUDA only
    the shape is checked: reading values back would stall the device.
    """
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise ValueError(f"{name}: needs a last axis of at least one token; got {describe(probs)}")
    if probs.is_cuda or probs.numel() == 0:
        return
    # a few rows at a time, so that the second pass finds them in the CPU's cache
    rows, size = probs[None] if probs.ndim == 1 else probs, AT_ONCE * len(probs) // probs.numel()
    parts = map(_range_and_sums, torch.split(rows, max(1, size)))
    least, most, sums = zip(*parts, strict=True)
    least, most = torch.stack(least).amin(), torch.stack(most).amax()
    if not bool((least >= 0) & (most < torch.inf)):  # for rows with NaN both are NaN
        bad, bound, hint = ~torch.isfinite(probs), "be finite", ""
        if not bad.any():
            bad, bound, hint = probs < 0, "not be negative", LOGITS
        at = _first(bad)
        where = f"token {at[-1]} of {place(at[:-1], probs.shape[:-1])}"
        raise ValueError(f"{name}: entries must {bound}; got {probs[at].item()} at {where}{hint}")
    sums = torch.cat(sums).view(probs.shape[:-1])
    if normalise:
        if not (sums > 0).all():
            at = place(_first(~(sums > 0)), sums.shape)
            raise ValueError(
                f"{name}: every row must have a positive sum to be divided by; {at} sums to 0"
            )
        return
    tolerance = ROW_SUM_TOLERANCE[probs.dtype]
    bad = (sums - 1).abs() > tolerance
    if bad.any():
        at = _first(bad)
        total = sums[at].item()
        hint = ROUNDED if abs(total - 1) < NEAR_ONE else LOGITS if float(most) > 1 else ""
        raise ValueError(
            f"{name}: every row must sum to 1 within {tolerance:g} ({probs.dtype}); "
            f"{place(at, sums.shape)} sums to {total:.12g}{hint}"
        )


def _range_and_sums(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    least, most = rows.aminmax()
    return least, most, rows.sum(-1, dtype=torch.float64)


def describe(tensor: Tensor) -> str:
    """Return a tensor's shape as text for messages."""
    return f"shape {tuple(tensor.shape)}"


def check_pair(target: Tensor, draft: Tensor, names: tuple[str, str]) -> None:
    """Raise ValueError unless two rows of probabilities share device and vocabulary."""
    if target.device != draft.device:
        raise ValueError(
            f"{names[1]}: device must equal that of {names[0]} ({target.device}); "
            f"got {draft.device}"
        )
    if target.ndim and draft.ndim and target.shape[-1] != draft.shape[-1]:
        raise ValueError(
            f"{names[1]}: vocabulary must equal that of {names[0]} ({target.shape[-1]} tokens); "
            f"got {draft.shape[-1]}"
        )


def ungraphed(row: Tensor) -> Tensor:
    """Return a row detached from its graph; a row without a graph is returned as it is."""
    return row.detach() if row.requires_grad else row


def float64_rows(*rows: Tensor) -> tuple[Tensor, ...]:
    """Return rows in float64 without a graph; a row that is so already is returned as it is."""
    return tuple(ungraphed(row).double() for row in rows)


def normalised(probs: Tensor) -> Tensor:
    """Return float64 rows divided by their float64 sum."""
    rows = probs.double()
    total = rows.sum(-1, keepdim=True)
    return rows / total if rows is probs else rows.div_(total)


def checked_rows(
    target_probs: ArrayLike,
    draft_probs: ArrayLike,
    normalise: bool = False,
    names: tuple[str, str] = ("target_probs", "draft_probs"),
) -> tuple[Tensor, Tensor]:
    """Check rows (..., V) of target and draft; return them unchanged, broadcast to one shape.

    With ``normalise`` rows may have any positive sum: the caller divides by it. Error messages call
    the rows by ``names``.
    """
    target, draft = as_tensor(names[0], target_probs), as_tensor(names[1], draft_probs)
    check_pair(target, draft, names)
    check_probabilities(names[0], target, normalise)
    check_probabilities(names[1], draft, normalise)
    if target.shape == draft.shape:
        return target, draft
    try:
        shape = np.broadcast_shapes(target.shape, draft.shape)
    except ValueError:
        raise ValueError(
            f"{names[1]}: shape must broadcast with {names[0]} {tuple(target.shape)}; "
            f"got {tuple(draft.shape)}"
        ) from None
    return target.expand(shape), draft.expand(shape)


def probability_rows(
    target_probs: ArrayLike, draft_probs: ArrayLike, normalise: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows of :func:`checked_rows` in float64, divided by their sums."""
    target, draft = checked_rows(target_probs, draft_probs, normalise)
    return normalised(target), normalised(draft)


def like(value: Tensor, original: ArrayLike) -> Any:
    """Return the float64 tensor ``value`` as a tensor or array with the dtype of ``original``."""
    if isinstance(original, Tensor):
        return value.to(original.dtype)
    array = value.numpy()
    return array.astype(cast(Any, original).dtype) if isinstance(original, np.ndarray) else array


def scalar_like(value: Tensor, original: ArrayLike) -> Any:
    """Return ``value`` in its dtype, as an array unless ``original`` is a tensor."""
    return value if isinstance(original, Tensor) else value.numpy()


def row_numbers(
    name: str, value: Any, batch: torch.Size, device: torch.device, low: float, high: float
) -> Tensor:
    """Return ``value`` as float64 of shape ``batch``, each entry inside [low, high]."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{name}: must be a number or an array of numbers; got {value!r}"
        ) from None
    if tensor.numel() and not bool(((tensor >= low) & (tensor <= high)).all()):
        wrong = tensor[~((tensor >= low) & (tensor <= high))].flatten()[0].item()
        raise ValueError(f"{name}: must lie in [{low:g}, {high:g}]; got {wrong!r}")
    try:
        return tensor.expand(batch)
    except RuntimeError:
        raise ValueError(
            f"{name}: must broadcast to the rows' batch shape {tuple(batch)}; "
            f"got {describe(tensor)}"
        ) from None


def working_device(name: str, value: str | torch.device) -> torch.device:
    """Return the device ``value``; ValueError if this machine or this build of torch lacks it."""
    try:
        torch.zeros(1, device=value).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{name}: must be a device of this machine; got {value}; {why}") from None
    return torch.device(value)
