"""Measure what was trained, for ``report.json``, and put it where users find it."""

import argparse
import math
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Generator

from cactus_theory import losses
from cactus_theory.decoding.load import load_model

from ..common.inputs import PAIR, folder_digest
from ..common.results import machine_kind, write_bytes
from . import heads
from .corpus import (
    Document,
    Stream,
    as_transformers,
    fingerprint,
    held_out,
    num_bytes,
    prefixes,
    sample,
)
from .train import MAX_POSITIONS, num_parameters

MODELS = ("target", "draft")
LICENCE = (
    "Trained on the Python standard library, which is under the Python Software Foundation "
    "licence; the weights and the tokenizer are ours, under the licence of this repository."
)
UNKNOWN = "Unknown: the weights are made from {}, whose licence was not named (--licence)."
STANDARD_LIBRARY = "Python standard library, .py files without tests and generated tables"
# tokens of the prefixes of texts along which overlaps are measured
PREFIX = 32
Measures = dict[str, Any]


@torch.inference_mode()
def held_out_loss(model: Any, stream: Stream, size: int, context: int = 256) -> Measures:
    """Score every token of the stream once, with between 256 and 511 tokens before it.

    Windows of 512 move by 256 and score their second half; the first one scores all.
    ``size`` is the length of the documents in bytes, without end-of-text tokens, which count.
    """
    tokens = stream.tokens.long()
    total, count = 0.0, 0
    for end in range(context, len(tokens) - 1 + context, context):
        window = tokens[max(0, end - 2 * context) : end + 1]
        new = len(window) - 1 if end <= context else min(context, len(tokens) - 1 - end + context)
        logits = model(window[None, :-1], use_cache=False).logits[0, -new:]
        total += F.cross_entropy(logits, window[-new:], reduction="sum").item()
        count += new
    bits = total / math.log(2) / size
    return {"nats_per_token": total / count, "bits_per_byte": bits, "tokens": count}


@torch.inference_mode()
def overlap(
    target: Any,
    draft: Any,
    stream: Stream,
    *,
    rows: int,
    length: int,
    seed: int,
    prefix_tokens: int = PREFIX,
) -> Measures:
    """Average the overlap of q and p over the target's continuations of held-out prefixes."""
    generator = Generator().manual_seed(seed)
    values = []
    for _ in range(0, rows, 32):
        prefix = prefixes(stream, 32, prefix_tokens, generator)
        context = sample(target, prefix, length, generator)[:, :-1]
        q, p = (model(context, use_cache=False).logits for model in (target, draft))
        values.append(losses.overlap(q, p)[:, prefix_tokens - 1 :].flatten())
    overlaps = torch.cat(values)
    return {
        "mean": overlaps.double().mean().item(),
        "positions": len(overlaps),
        "sequences": len(values) * 32,
        "prefix_tokens": prefix_tokens,
    }


def measure_pair(
    args: argparse.Namespace, folder: Path, documents: list[Document], unseen: Stream
) -> Measures:
    """Measure the stored models on unseen files."""
    models = {name: load_model(folder / name, dtype="float32") for name in MODELS}
    target, draft = models.values()
    size = num_bytes(held_out(documents))
    lengths = {"rows": args.overlap_rows, "length": args.length, "seed": args.seed + 7}
    return {
        "held_out": {name: held_out_loss(own, unseen, size) for name, own in models.items()},
        "overlap_on_target_samples": overlap(target, draft, unseen, **lengths),
        "parameters": {name: num_parameters(model) for name, model in models.items()},
        "precision": {"training": "bfloat16", "stored": "float16", "measured": "float32"},
    }


def measure_head(args: argparse.Namespace, folder: Path, target: Any, unseen: Stream) -> Measures:
    """Measure the stored head along the target's own unseen texts."""
    head = heads.RecurrentHead.load(folder)
    generator = Generator().manual_seed(args.seed + 7)
    prefix = prefixes(unseen, args.overlap_rows, PREFIX, generator)
    texts = sample(target, prefix, args.length + 1, generator)
    return {
        "overlap_by_place": heads.overlaps(head, target, texts, args.seed + 8),
        "parameters": num_parameters(head),
        "seed": args.seed,
        "reads": list(head.shape.reads),
    }


def origin(args: argparse.Namespace, documents: list[Document]) -> Measures:
    """Return when, where, of what and from which texts, of which a part is held out."""
    unseen, own = held_out(documents), args.corpus is not None
    corpus = {
        "source": f"--corpus {args.corpus.name}" if own else STANDARD_LIBRARY,
        "documents": len(documents),
        "bytes": num_bytes(documents),
        "held_out_documents": len(unseen),
        "held_out_bytes": num_bytes(unseen),
        "sha256": fingerprint(documents),
    }
    packages = (torch, transformers, tokenizers)
    versions = {package.__name__: package.__version__ for package in packages}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "corpus": corpus,
        "versions": {"python": platform.python_version()} | versions,
        "machine": machine_kind(),
        "licence": (args.licence or UNKNOWN.format(args.corpus.name)) if own else LICENCE,
    } | _trained(args)


def _trained(args: argparse.Namespace) -> Measures:
    """Return the model, its corpus and, of a head, its target and the target's licence."""
    if args.drafter == "model":
        return {"trained": "target on the corpus; draft on the corpus, then on the target's law"}
    files = sorted(args.target.glob("LICEN[CS]E*"))
    named = files[0].read_text(encoding="utf-8").strip() if files else "unknown"
    licence = LICENCE if args.target.resolve() == PAIR / "target" else named
    return {
        "trained": f"{args.drafter} head on the target's states, along the corpus and its samples",
        "target": {"name": args.target.name, "sha256": folder_digest(args.target),
                   "licence": licence},
    }  # fmt: skip


def add_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer, the same for both models, in each model's folder."""
    for name in MODELS:
        as_transformers(tokenizer, MAX_POSITIONS).save_pretrained(folder / name)


def tokenizer_of(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--target: must be a model's folder with a tokenizer.json; got {folder}")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def publish(finished: Path, out: Path) -> None:
    """Copy what is finished over ``out``, each file whole or not at all."""
    for path in sorted(finished.rglob("*")):
        if path.is_file():
            write_bytes(out / path.relative_to(finished), path.read_bytes())
