"""Read rows of probabilities or logits from common file formats; write .npy."""

import csv
import io
import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory import _arguments as check

SUFFIXES = (".npy", ".npz", ".safetensors", ".csv", ".json")


def load_rows(path: str, *, logits: bool = False) -> np.ndarray:
    """Return the rows (..., V) held by a file.

    Parameters
    ----------
    path : a .npy, .npz, .safetensors, .csv (one row a line, no header) or .json file (a
        list of numbers, or of such lists). ``file.npz::name`` picks one array of several,
        in .safetensors too. A .csv of one line is one row (V,).
    logits : turn rows of logits into probabilities by a float64 softmax; −inf is a
        probability of 0.

    Floats of 8 bytes or fewer keep their dtype; integers and bfloat16 (which numpy lacks)
    become float64 and float32. Rows are not checked to be distributions here.

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    ValueError
        An unknown suffix, a broken file, not numeric, no last axis of tokens, or logits
        without a finite maximum.
    ModuleNotFoundError
        .safetensors without the extra llm.
    """
    name, _, key = str(path).partition("::")
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}; got {suffix!r}")
    if key and suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{path}: only .npz and .safetensors hold named arrays; got {suffix!r}")
    rows = _numeric(path, _read(path, Path(name), suffix, key))
    return _softmax(path, rows) if logits else rows


def save_rows(path: str, rows: np.ndarray) -> None:
    """Write rows (..., V) to a .npy file.

    Raises
    ------
    OSError
        The file cannot be written.
    ValueError
        Another suffix.
    """
    if Path(path).suffix.lower() != ".npy":
        raise ValueError(f"{path}: the suffix must be .npy; got {Path(path).suffix!r}")
    content = io.BytesIO()
    np.save(content, rows, allow_pickle=False)
    write_whole(path, content.getvalue())


def write_whole(path: str | Path, content: bytes) -> None:
    """Write ``content`` to ``path``: all of it, or nothing if writing fails or is interrupted.

    An existing file is replaced only after the new content is on the disk.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    place = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise OSError(f"{path}: must be a writable file; {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read(path: str, file: Path, suffix: str, key: str) -> Any:
    readers = {
        ".npy": _read_npy,
        ".npz": _read_npz,
        ".safetensors": _read_safetensors,
        ".csv": _read_csv,
        ".json": _read_json,
    }
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "no such file"
        raise OSError(f"{path}: must be a readable file; {what}")
    try:
        return readers[suffix](path, file, key)
    except OSError as error:
        raise OSError(f"{path}: must be a readable file; {error.strerror or error}") from None


def _read_npy(path: str, file: Path, key: str) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: must be a .npy file of numbers; {_first_line(error)}") from None


def _read_npz(path: str, file: Path, key: str) -> Any:
    broken = f"{path}: must be a .npz file of numbers"
    try:
        loaded = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{broken}; {_first_line(error)}") from None
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError(f"{broken}; got a bare array")
    with loaded:
        name = _pick(path, list(loaded.files), key)
        try:
            return loaded[name]
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{broken}; {name}: {_first_line(error)}") from None


def _read_safetensors(path: str, file: Path, key: str) -> Any:
    module = check.optional_module("safetensors", "llm")
    try:
        with module.safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(_pick(path, list(tensors.keys()), key))
    except module.SafetensorError as error:
        raise ValueError(f"{path}: must be a .safetensors file; {_first_line(error)}") from None
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _read_csv(path: str, file: Path, key: str) -> Any:
    rows = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            for number, cells in enumerate(csv.reader(lines), 1):
                if cells:
                    rows.append(_csv_row(path, number, cells))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: must be a .csv file of numbers; {_first_line(error)}") from None
    return rows[0] if len(rows) == 1 else rows


def _csv_row(path: str, number: int, cells: list[str]) -> list[float]:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        wrong = next(cell for cell in cells if not _is_float(cell))
        raise ValueError(f"{path}: every cell must be a number; line {number}: {wrong!r}") from None


def _is_float(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_json(path: str, file: Path, key: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: must be a .json file; {_first_line(error)}") from None


def _pick(path: str, names: list[str], key: str) -> str:
    """Return the name asked for, or the only one there is."""
    if key in names:
        return key
    if not key and len(names) == 1:
        return names[0]
    got = repr(key) if key else "no name"
    raise ValueError(f"{path}: name one of {', '.join(names) or '(none)'} after '::'; got {got}")


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


def _softmax(path: str, rows: np.ndarray) -> np.ndarray:
    logits = rows.astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    if not np.isfinite(highest).all():  # NaN, +inf, or −inf everywhere
        wrong = highest[~np.isfinite(highest)][0]
        raise ValueError(f"{path}: every row of logits must have a finite maximum; got {wrong}")
    weights = np.exp(logits - highest)
    return weights / weights.sum(-1, keepdims=True)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
