"""Damaged files of every kind that commands read, the same ones in every run.

What a header may claim and what prompts may hold is in tests/test_trusted.py.
"""

import io
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.traces import Cycle, save_trace

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
    save_trace(folder / "trace", [[cycle]] * 5, **sizes)
    best = {"policy": "band:price=1", "verifier": "block",
            "num_draft_tokens": 2}  # fmt: skip
    tuned = {"format": "cactus-theory tuned", "version": 2, "level": 0.1, "divergence": "kl",
             "source": {"temperature": 1.0, "target_weights": "a"},
             "recommended": best}  # fmt: skip
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024,
              "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
              "intermediate_size": 8, "auto_map": {"AutoConfig": "spying.Config"}}  # fmt: skip
    return {
        "rows.npy": held.getvalue(),
        "rows.npz": many.getvalue(),
        "rows.json": json.dumps(ROWS.tolist()).encode(),
        "prompts.txt": "Once upon a time\nthere was é\n".encode(),
        "prompts.jsonl": b'{"prompt": "a"}\n{"turns": ["b", "c"]}\n',
        "tuned.json": json.dumps(tuned).encode(),
        "manifest.json": (folder / "trace" / "manifest.json").read_bytes(),
        "text-00000.safetensors": (folder / "trace" / "text-00000.safetensors").read_bytes(),
        "config.json": json.dumps(config).encode(),
    }  # fmt: skip
