"""Describe the finished pair in ``report.json`` and put it where users find it."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from torch import Generator

from ..common.results import machine_kind, write_bytes, write_json
from .corpus import Document, fingerprint, held_out, num_bytes
from .distil import sample
from .model import MAX_POSITIONS, load, num_parameters
from .report import forward_cost, held_out_loss, overlap
from .tokenizer import Stream, as_transformers
from .train import Outcome

MODELS = ("target", "draft")
LICENCE = (
    "Trained on the Python standard library, which is under the Python Software Foundation "
    "licence; the weights and the tokenizer are ours, under the licence of this repository."
)
SAMPLE_PROMPT = 'def read_settings(path, encoding=None):\n    """Return'


def add_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer, the same for both models, in each model's folder."""
    for name in MODELS:
        as_transformers(tokenizer, MAX_POSITIONS).save_pretrained(folder / name)


def write_report(
    args: argparse.Namespace,
    command: str,
    folder: Path,
    documents: list[Document],
    unseen: Stream,
    outcomes: dict[str, Outcome],
) -> None:
    """Measure the stored weights and write ``report.json``."""
    target, draft = (load(folder / name) for name in MODELS)
    size = num_bytes(held_out(documents))
    shared = overlap(
        target, draft, unseen, rows=args.overlap_rows, length=args.length, seed=args.seed + 7
    )
    report = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "held_out": {
            name: asdict(held_out_loss(model, unseen, size))
            for name, model in zip(MODELS, (target, draft), strict=True)
        },
        "overlap_on_target_samples": asdict(shared),
        "forward_cost": asdict(forward_cost(target, draft)),
        "parameters": {"target": num_parameters(target), "draft": num_parameters(draft)},
        "training": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "corpus": describe_corpus(documents, unseen),
        "sample": {"prompt": SAMPLE_PROMPT, "target": continuation(target, folder / "target")},
        "versions": versions(),
        "machine": machine_kind(),
        "precision": {"training": args.precision, "stored": "float16", "measured": "float32"},
        "licence": LICENCE,
    }
    write_json(folder / "report.json", report)


def describe_corpus(documents: list[Document], unseen: Stream) -> dict:
    """Return what identifies the text and its held-out part."""
    return {
        "source": "Python standard library, .py files without tests and generated tables",
        "files": len(documents),
        "bytes": num_bytes(documents),
        "held_out_files": len(held_out(documents)),
        "held_out_bytes": num_bytes(held_out(documents)),
        "held_out_tokens": len(unseen.tokens) - 1,
        "sha256": fingerprint(documents),
    }


def continuation(model, folder: Path, length: int = 160) -> str:
    """Return the model's own continuation of a fixed prompt at temperature 1."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode(SAMPLE_PROMPT).ids])
    row = sample(model, prompt, prompt.shape[1] + length, Generator().manual_seed(1))[0]
    return tokenizer.decode(row[prompt.shape[1] :].tolist(), skip_special_tokens=False)


def versions() -> dict[str, str]:
    """Return the versions the result depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def publish(finished: Path, out: Path) -> None:
    """Copy the finished pair over ``out``, each file whole or not at all; remove stale ones."""
    wanted = {p.relative_to(finished) for p in finished.rglob("*") if p.is_file()}
    for name in MODELS:
        for stale in (out / name).glob("*"):
            if stale.relative_to(out) not in wanted:
                stale.unlink()
    for relative in sorted(wanted):
        write_bytes(out / relative, (finished / relative).read_bytes())


def summary(out: Path) -> dict:
    """Return the headline numbers of a shipped pair."""
    report = json.loads((out / "report.json").read_text())
    keys = ("held_out", "overlap_on_target_samples", "forward_cost", "parameters")
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return {key: report[key] for key in keys} | {"megabytes": round(size / 1e6, 2)}
