"""Damaged and hostile files of every kind that commands read, the same ones in every run."""

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.traces import Cycle, save_trace
from cactus_theory.tuning import Costs

ROWS = np.array([[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125]])
DEEP = b"[" * 10**5
LONG = b"9" * 5000
# values of a wrong type or size for most fields of a JSON file
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1e308, 10**400, float("nan"), float("inf"), "", "x" * 10**5, "../x",
    "spying.py:spy", "/etc/passwd", [], [[]], {}, {"a": []}, [None],
)  # fmt: skip
Damage = Iterator[tuple[str, bytes]]


class Mine:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.marker,)


def damaged(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to any file: cuts, flipped bits, other content, a pickle."""
    chance = random.Random(seed)
    for share in (0, 0.02, 0.1, 0.3, 0.5, 0.8, 0.95):
        yield f"cut at {share}", content[: int(share * len(content))]
    yield "cut by one", content[:-1]
    for number in range(12):
        flipped = bytearray(content)
        for _ in range(1 + number // 3):
            place = chance.randrange(min(len(content), 400) if number % 2 else len(content))
            flipped[place] ^= 1 << chance.randrange(8)
        yield f"flipped {number}", bytes(flipped)
    yield "noise", chance.randbytes(300)
    yield "zeros", bytes(300)
    yield "twice", content + content
    yield "utf-16", content.decode("latin-1").encode("utf-16")
    yield "pickle", pickle.dumps(Mine(marker))


def damaged_json(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to a JSON file: that, depth, length, and a wrong value per field."""
    yield from damaged(content, marker, seed)
    yield "deep", DEEP
    yield "deep objects", b'{"a":' * 10**5
    yield "deep enough", b"[" * 900 + b"]" * 900
    yield "long", LONG
    yield "latin-1", '{"é": 1}'.encode("latin-1")
    yield "a list", b"[" + content + b"]"
    found = json.loads(content)
    for place, (name, path) in enumerate(_fields(found)):
        yield f"no {name}", _without(found, path)
        for wrong in (WRONG[place % len(WRONG)], WRONG[(7 * place + 3) % len(WRONG)]):
            yield f"{name} = {wrong!r:.20}", _with(found, path, wrong)


def damaged_npy(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to a .npy file: that, and headers that lie."""
    yield from damaged(content, marker, seed)
    for shape in ("(10**12,)", "(1000000000000,)", f"({10**30}, 2)", "(-1, 4)", "(2, -4)", "()",
                  "(0, 4)", "(4, 2, 1000)", "'x'", "(2.0, 4)", "(" * 90, "(1,) * 10**9",
                  ):  # fmt: skip
        yield f"shape {shape:.20}", npy(shape) + ROWS.tobytes()
    for descr in ("|O", "<f16", "<c16", "|b1", "<U9", "V0", "<M8[s]", "<i8", "nix", "|S0"):
        yield f"dtype {descr}", npy("(2, 4)", descr) + ROWS.tobytes()
    held = io.BytesIO()
    np.save(held, np.array([Mine(marker)], dtype=object), allow_pickle=True)
    yield "pickled array", held.getvalue()


def npy(shape: str, descr: str = "<f8") -> bytes:
    """Return the start of a .npy file that claims this."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def damaged_npz(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to a .npz file: that, and members that are damaged .npy files."""
    yield from damaged(content, marker, seed)
    held = io.BytesIO()
    np.save(held, ROWS)
    for name, member in list(damaged_npy(held.getvalue(), marker, seed))[19::2]:
        yield f"member {name}", zipped(member)
    many = io.BytesIO()
    np.savez(many, a=ROWS, b=ROWS)
    yield "two members", many.getvalue()


def zipped(member: bytes) -> bytes:
    """Return a .npz file of one member."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("rows.npy", member)
    return held.getvalue()


def damaged_safetensors(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to a .safetensors file: that, and headers that lie."""
    yield from damaged(content, marker, seed)
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(own for own in header if own != "__metadata__")
    for change in (
        {"shape": [10**12]}, {"shape": [10**30, 2]}, {"shape": [-1]}, {"dtype": "F8_E4M3"},
        {"dtype": "F64x"}, {"dtype": "I8"}, {"data_offsets": [0, 10**15]},
        {"data_offsets": [64, 0]}, {"dtype": "BOOL"}, {"dtype": "C64"}, {"shape": []},
    ):  # fmt: skip
        yield f"header {change}", tensors(header | {name: header[name] | change}, data)
    yield "long header", struct.pack("<Q", 2**62) + content[8:]
    yield "deep header", struct.pack("<Q", len(DEEP)) + DEEP
    save = __import__("safetensors.torch").torch.save
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool):
        yield f"{dtype}", save({"rows": torch.ones(2, 4).to(dtype)})


def tensors(header: dict[str, Any], data: bytes) -> bytes:
    """Return a .safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def damaged_csv(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to a .csv file: that, and cells that are no numbers."""
    yield from damaged(content, marker, seed)
    for cell in ("nan", "inf", "-1", "1e999", "9" * 5000, "=cmd()", '"', "0x1", "é", "1" * 200000):
        yield f"cell {cell:.10}", content.replace(b"0.5", cell.encode(), 1)


def damaged_prompts(content: bytes, marker: Path, seed: int) -> Damage:
    """Yield what can happen to prompts: that, and lines that are no JSON or no text."""
    yield from damaged(content, marker, seed)
    for line in (DEEP, b'{"prompt":' + DEEP, b'{"prompt": %b}' % LONG, b'{"prompt": NaN}',
                 b'{"prompt": "\\ud800"}', b'{"turns": []}', b'{"messages": [{"role": 3}]}',
                 b'{"prompt": {"a": 1}}', b"\xff\xfe", b"{}", b"{\x00}"):  # fmt: skip
        yield f"line {line[:20]!r}", content + line + b"\n"


def _fields(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    keys = found.keys() if isinstance(found, dict) else range(len(found))
    for key in list(keys)[:20]:
        yield "/".join(map(str, (*path, key))), (*path, key)
        if isinstance(found[key], dict | list) and len(path) < 3:
            yield from _fields(found[key], (*path, key))


def _with(found: Any, path: tuple[Any, ...], value: Any) -> bytes:
    changed = json.loads(json.dumps(found))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(changed).encode()


def _without(found: Any, path: tuple[Any, ...]) -> bytes:
    changed = json.loads(json.dumps(found))
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return json.dumps(changed).encode()


def whole(folder: Path) -> dict[str, bytes]:
    """Return undamaged files by kind, the trace's in ``folder / "trace"``."""
    rows, held, many = torch.from_numpy(ROWS), io.BytesIO(), io.BytesIO()
    np.save(held, ROWS)
    np.savez_compressed(many, rows=ROWS)
    three = torch.cat([rows, rows[:1]])
    cycle = Cycle(0, 0, torch.tensor([1, 0]), three, rows)
    sizes = {"vocab_size": 4, "num_draft_tokens": 2}
    save_trace(folder / "trace", [[cycle] * 2, [cycle]], **sizes)
    costs = Costs.ratios(0.1).as_json() | {"verify": {"speculative@chain": [0.0, 0.0],
                                                      "speculative@block": [0.0, 0.0]}}  # fmt: skip
    best = {"policy": "band:price=1", "verifier": "block",
            "num_draft_tokens": 2}  # fmt: skip
    tuned = {"format": "cactus-theory tuned", "version": 1, "level": 0.1, "divergence": "kl",
             "source": {"temperature": 1.0, "target_weights": "a"},
             "recommended": best}  # fmt: skip
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024,
              "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
              "intermediate_size": 8, "auto_map": {"AutoConfig": "spying.Config"}}  # fmt: skip
    from safetensors.numpy import save

    return {
        "rows.npy": held.getvalue(),
        "rows.npz": many.getvalue(),
        "rows.safetensors": save({"rows": ROWS}),
        "rows.csv": b"0.5,0.25,0.125,0.125\n0.25,0.5,0.125,0.125\n",
        "rows.json": json.dumps(ROWS.tolist()).encode(),
        "prompts.txt": "Once upon a time\nthere was é\n".encode(),
        "prompts.jsonl": b'{"prompt": "a"}\n{"turns": ["b", "c"]}\n',
        "tuned.json": json.dumps(tuned).encode(),
        "costs.json": json.dumps(tuned | {"costs": costs, "batches": []}).encode(),
        "manifest.json": (folder / "trace" / "manifest.json").read_bytes(),
        "text-00000.safetensors": (folder / "trace" / "text-00000.safetensors").read_bytes(),
        "config.json": json.dumps(config).encode(),
    }  # fmt: skip


# how a file is damaged, by the end of its name
DAMAGES = {
    ".npy": damaged_npy,
    ".npz": damaged_npz,
    ".safetensors": damaged_safetensors,
    ".csv": damaged_csv,
    ".json": damaged_json,
    ".txt": damaged_prompts,
    ".jsonl": damaged_prompts,
}
