"""Rows of probabilities: read from files of common formats, and made from scores at temperatures.

The sizes that a file declares are compared with its own size before memory is taken, and no code in
a file is run.
"""

import io
import lzma
import math
import shutil
import tempfile
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.files import first_line, parsed_json, write_whole
from cactus_theory.base.tolerances import NEAR_ONE

SUFFIXES = (".npy", ".npz", ".json")
# most bytes that one compressed array may unpack to: 3,500 float64 rows of 151,936 tokens
UNPACKED = 2**32
# names of target and draft rows in a .npz that holds both
PAIRS = (("target_probs", "draft_probs"), ("target", "draft"))
NO_NPY, NO_NPZ = (f"must be a .{kind} file of numbers" for kind in ("npy", "npz"))
# errors that numpy, zipfile and their codecs raise for broken content
BROKEN = (ValueError, TypeError, EOFError, OverflowError, MemoryError, RuntimeError, SyntaxError,
          tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)  # fmt: skip
# Temperatures by which scores are divided directly. At colder ones float32 lacks the digits for
# quotients that differ by less than 1 (scores of 30 are 3e4 at 1e-3, known to 2e-3), and overflows
# below 1e-37; at hotter ones the temperature itself overflows.
ORDINARY = (1e-3, 1e30)


def load_rows(path: str, *, logits: bool = False, normalise: bool = False) -> np.ndarray:
    """Return the rows (..., V) held by a file.

    ``path`` is a .npy, .npz or .json file (a list of numbers, or of such lists).
    ``file.npz::name`` picks one array of several. ``logits`` become probabilities by a float64
    softmax; −inf is a probability of 0. ``normalise`` divides rows by their sums, as numbers in a
    text may lack digits.

    Floats of 8 bytes or fewer keep their dtype; integers become float64. Rows are not checked to
    be distributions here.

    OSError for a file that is missing or cannot be read; ValueError for an unknown suffix, a
    broken file, content that is not numeric or has no last axis of tokens, and logits without a
    finite maximum.
    """
    name, _, key = str(path).partition("::")
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}; got {suffix!r}")
    if key and suffix != ".npz":
        raise ValueError(f"{path}: only .npz holds named arrays; got {suffix!r}")
    rows = _numeric(path, _read(path, Path(name), suffix, key))
    if logits:
        return checked_logits(path, torch.as_tensor(rows, device="cpu")).softmax(-1).numpy()
    return _divided(path, rows) if normalise else rows


def pair_in(path: str) -> tuple[str, str] | None:
    """Return ``FILE::target_probs`` and ``FILE::draft_probs`` if a .npz holds both, else None.

    The arrays may also be named ``target`` and ``draft``. ValueError for a broken .npz.
    """
    file = Path(path)
    if file.suffix.lower() != ".npz" or not file.is_file():
        return None
    with _archive(path, file) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    for target, draft in PAIRS:
        if {target, draft} <= names:
            return f"{path}::{target}", f"{path}::{draft}"
    return None


def pair_of(target: str, draft: str | None) -> tuple[str, str]:
    """Return the files of target and draft rows; without ``draft``, ``target`` must hold both.

    ValueError if it does not hold both (:func:`pair_in`).
    """
    pair = pair_in(target) if draft is None else (target, draft)
    if pair is None:
        both = " (or ".join(" and ".join(names) for names in PAIRS)
        raise ValueError(
            f"draft: must be given, unless target is a trace or a .npz with {both}); rows are read "
            f"from {', '.join(SUFFIXES)}; got {target} alone"
        )
    return pair


def save_rows(path: str, rows: np.ndarray) -> None:
    """Write rows (..., V) to a .npy file; ValueError for another suffix."""
    if Path(path).suffix.lower() != ".npy":
        raise ValueError(f"{path}: the suffix must be .npy; got {Path(path).suffix!r}")
    content = io.BytesIO()
    np.save(content, rows, allow_pickle=False)
    write_whole(path, content.getvalue())


def scaled(
    scores: Float[Tensor, "*rows vocab"], temperature: float, out: Tensor | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return scores / temperature for a softmax, up to a constant for each row.

    At very low and very high temperatures (outside ``ORDINARY``), the row's largest score is first
    subtracted, and the division is in float64. This is exact for every positive temperature that a
    float holds. As the temperature falls, the softmax becomes the row of greedy decoding, which
    tied tokens share; as the temperature rises, the row becomes uniform over the scores above −∞.
    """
    if ORDINARY[0] <= temperature <= ORDINARY[1]:
        return torch.div(scores, temperature, out=out)
    wide = scores.double()
    divided = (wide - wide.amax(-1, keepdim=True)).div_(temperature)
    return divided.to(scores.dtype) if out is None else out.copy_(divided)


def greedy(
    scores: Float[Tensor, "*rows vocab"], out: Tensor | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return 1 at the largest score of each row, the first one on ties, 0 elsewhere.

    As a softmax does, a row with NaN, or without a score above −∞, gives NaN throughout.
    """
    most, best = scores.max(-1, keepdim=True)
    rows = torch.empty_like(scores) if out is None else out
    rows.zero_().scatter_(-1, best, 1.0)
    if most.is_cuda or not bool((most > -math.inf).all()):  # False for NaN, too
        rows.masked_fill_(~(most > -math.inf), math.nan)
    return rows


def softmax_in_order(
    scores: Float[Tensor, "*rows vocab"], out: Tensor | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return softmax(scores), whose first largest entry is that of the first largest score.

    Rounding may tie the largest entry with earlier entries; the earlier ones are lowered by an ulp.
    """
    best = scores.argmax(-1, keepdim=True)
    rows = torch.softmax(scores, -1, out=out)
    while True:
        first = rows.argmax(-1, keepdim=True)
        entry = rows.gather(-1, first)
        early = (first != best) & (entry == rows.gather(-1, best))  # False for rows of NaN
        if not bool(early.any()):
            return rows
        lower = torch.nextafter(entry, torch.zeros_like(entry))
        rows.scatter_(-1, first, torch.where(early, lower, entry))


def warn_of_probabilities(name: str, scores: Float[Tensor, "vocab"]) -> None:
    """Warn if a row of supposed logits is a distribution; ``name`` says where the row is from."""
    row = scores.double()
    if bool(((row >= 0) & (row <= 1)).all()) and abs(float(row.sum()) - 1) < NEAR_ONE:
        warnings.warn(
            f"{name}: holds probabilities where logits belong: a row in [0, 1] that sums to "
            f"{float(row.sum()):.4g}, whose softmax is nearly uniform; their logarithms would do",
            stacklevel=2,
        )


def checked_logits(name: str, logits: Tensor) -> Tensor:
    """Return logits in float64; ValueError for a row whose maximum is NaN, ∞ or −∞."""
    if not (logits.ndim and logits.numel()):
        raise ValueError(
            f"{name}: must have shape (..., V), none of it 0; got {tuple(logits.shape)}"
        )
    highest = logits.amax(-1)
    if not bool((finite := highest.isfinite()).all()):
        wrong = float(highest[~finite][0])
        raise ValueError(f"{name}: every row of logits must have a finite maximum; got {wrong}")
    warn_of_probabilities(name, logits.reshape(-1, logits.shape[-1])[0])
    return logits.double()


def _read(path: str, file: Path, suffix: str, key: str) -> Any:
    """Return the content of a file: an array, or the value of a JSON text."""
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "no such file"
        raise OSError(f"{path}: must be a readable file; {what}")
    try:
        if suffix == ".json":
            return parsed_json(f"{path}: must be a .json file", file.read_bytes())
        if suffix == ".npz":
            return _read_npz(path, file, key)
        try:
            return np.lib.format.open_memmap(file, mode="r")
        except BROKEN as error:
            raise ValueError(f"{path}: {NO_NPY}; {first_line(error)}") from None
    except OSError as error:
        raise OSError(f"{path}: must be a readable file; {error.strerror or error}") from None


def _read_npz(path: str, file: Path, key: str) -> Any:
    """Return the array ``key`` of a .npz file; without a ``key`` its only array."""
    with _archive(path, file) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        if not key and len(members) == 1:
            (key,) = members
        if key not in members:
            got, names = repr(key) if key else "no name", ", ".join(members) or "(none)"
            raise ValueError(f"{path}: name one of {names} after '::'; got {got}")
        try:
            return _unpacked(archive, members[key])
        except BROKEN as error:
            raise ValueError(f"{path}: {NO_NPZ}; {key}: {first_line(error)}") from None


def _archive(path: str, file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except BROKEN as error:
        raise ValueError(f"{path}: {NO_NPZ}; {first_line(error)}") from None


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return the array of a member, unless it would unpack to too many bytes.

    The member is first unpacked into a temporary file. Then an array header that declares more data
    than the member holds cannot make numpy allocate memory for these data.
    """
    if member.file_size > max(UNPACKED, member.compress_size):
        raise ValueError(f"must unpack to at most {UNPACKED} bytes; got {member.file_size}")
    with archive.open(member) as packed, tempfile.NamedTemporaryFile(suffix=".npy") as file:
        shutil.copyfileobj(packed, file)
        file.flush()
        return np.array(np.lib.format.open_memmap(file.name, mode="r"))


def _numeric(path: str, value: Any) -> np.ndarray:
    """Return ``value`` as an array of floats with a last axis of tokens."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{path}: rows must have equal lengths") from None
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{path}: must hold rows of at least one token; got shape {array.shape}")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{path}: must hold numbers; got dtype {array.dtype}")
    keep = array.dtype.kind == "f" and array.dtype.itemsize <= 8
    return array.astype(array.dtype.newbyteorder("=") if keep else np.float64)


def _divided(path: str, rows: np.ndarray) -> np.ndarray:
    """Return rows divided by their sums, in float64."""
    wide = rows.astype(np.float64)
    sums = wide.sum(-1, keepdims=True)
    if not ((wide >= 0).all() and (sums > 0).all() and np.isfinite(sums).all()):
        raise ValueError(
            f"{path}: --normalise divides rows of finite numbers that are not negative and not "
            f"all 0; got entries from {wide.min():g} to {wide.max():g}"
        )
    return wide / sums
