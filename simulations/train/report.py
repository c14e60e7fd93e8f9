"""The ``report.json`` of a pair or a head: how good it is on texts it never saw, and of what."""

import argparse
import json
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from cactus_theory import losses
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.load import load_model

from ..common.inputs import command_line, model_digest
from ..common.journal import Journal
from ..common.results import machine_kind, write_bytes, write_text
from . import corpus
from .batches import Texts
from .corpus import Document, Stream
from .samples import Source, Turn
from .unroll import Unrolled, rows_of

FOLDERS = ("work_dir", "out")  # flags that change no number
MODELS = ("target", "draft")
LICENCE = (
    "Trained on the Python standard library, which is under the Python Software Foundation "
    "licence; the weights and the tokenizer are ours, under the licence of this repository."
)
UNKNOWN = "Unknown: the weights are made from {}, whose licence was not named (--licence)."
STANDARD_LIBRARY = "Python standard library, .py files without tests and generated tables"
# most texts that are scored at once
TEXTS = 16
Measures = dict[str, Any]


@contextmanager
def held(args: argparse.Namespace, settings: Measures) -> Iterator[None]:
    """Hold the work folder, which no other run, and none of other settings, may write to."""
    with Journal(args.work_dir / "journal.jsonl", settings) as journal:
        journal.check(lambda key, _: f"job: must not be there, as training keeps none; got {key!r}")
        yield


def publish(args: argparse.Namespace, finished: Path, measured: Measures) -> None:
    """Write the report of a finished folder; copy it over --out, each file whole or not at all."""
    packages = (torch, transformers, tokenizers)
    versions = {package.__name__: package.__version__ for package in packages}
    report = {"command": command_line(args, FOLDERS)} | measured | {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
        "machine": machine_kind(),
    }  # fmt: skip
    text = json.dumps(report, indent=2, allow_nan=False)
    write_text(finished / "report.json", f"{text}\n")
    for path in sorted(finished.rglob("*")):
        if path.is_file():
            write_bytes(args.out / path.relative_to(finished), path.read_bytes())
    print(text)


def num_parameters(model: nn.Module) -> int:
    """Count parameters, the tied embedding once."""
    return sum(p.numel() for p in model.parameters())


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
    target: Any, draft: Any, beginnings: Sequence[Sequence[int]], rows: int, length: int, seed: int
) -> Measures:
    """Average the overlap of q and p over the target's continuations of beginnings."""
    piece = Source(beginnings, [Turn(length, frozenset())]).piece(target, rows, (), seed)
    lengths, values = piece.lengths.tolist(), []
    for ids, norms in zip(piece.ids.split(lengths), piece.norms.split(lengths), strict=True):
        q, p = (model(ids[None], use_cache=False).logits[0] for model in (target, draft))
        values.append(losses.overlap(q, p)[~norms.isnan()])
    overlaps = torch.cat(values)
    return {
        "mean": overlaps.double().mean().item(),
        "positions": len(overlaps),
        "sequences": len(values),
    }


def measure_pair(args: argparse.Namespace, folder: Path, documents: list[Document]) -> Measures:
    """Measure the stored models on unseen files."""
    models = {name: load_model(folder / name, dtype="float32") for name in MODELS}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "target")
    target, draft = models.values()
    unseen = corpus.held_out(documents)
    stream, size = corpus.encode_stream(tokenizer, unseen), corpus.num_bytes(unseen)
    own = corpus.beginnings(tokenizer, unseen)
    lengths = {"rows": args.overlap_rows, "length": args.length, "seed": args.seed + 7}
    return {
        "held_out": {name: held_out_loss(model, stream, size) for name, model in models.items()},
        "overlap_on_target_samples": overlap(target, draft, own, **lengths),
        "parameters": {name: num_parameters(model) for name, model in models.items()},
        "precision": {"training": "bfloat16", "stored": "float16", "measured": "float32"},
        "trained": "target on the corpus; draft on the corpus, then on the target's law",
    }


def corpus_of(args: argparse.Namespace, documents: list[Document]) -> Measures:
    """Return from which texts a pair was made, of which a part is held out, and its licence."""
    unseen, own = corpus.held_out(documents), args.corpus is not None
    described = {
        "source": f"--corpus {args.corpus.name}" if own else STANDARD_LIBRARY,
        "documents": len(documents),
        "bytes": corpus.num_bytes(documents),
        "held_out_documents": len(unseen),
        "held_out_bytes": corpus.num_bytes(unseen),
        "sha256": corpus.fingerprint(documents),
    }
    licence = (args.licence or UNKNOWN.format(args.corpus.name)) if own else LICENCE
    return {"corpus": described, "licence": licence}


@torch.inference_mode()
def overlaps(head: Eagle3Head, target: Any, texts: Texts, places: int) -> Measures:
    """Return the mean overlap of each place with the target's row there, along texts.

    And the share of the target's mass on the head's tokens, which no overlap exceeds.
    """
    student, weight = Unrolled(head), rows_of(target, head.ids)
    sums, mass = torch.zeros(2, places, dtype=torch.float64), 0.0
    for start in range(0, len(texts.places), TEXTS):
        batch = texts.batch(range(start, min(start + TEXTS, len(texts.places))))
        _, overlap, counts = student(batch, weight, places, True)
        sums += torch.stack([overlap, counts])
        for rows, norms in zip(batch.rows[batch.counts].split(256),
                               batch.norms[batch.counts].split(256), strict=True):  # fmt: skip
            mass += float(((rows @ weight.t()).float() - norms[:, None]).exp().sum())
    return {
        "overlap_by_place": [round(value, 4) for value in (sums[0] / sums[1]).tolist()],
        "target_mass_of_draft_vocabulary": round(mass / float(sums[1, 0]), 4),
        "positions": int(sums[1, 0]),
        "texts": len(texts.places),
    }


def measure_head(args: argparse.Namespace, folder: Path, target: Any, texts: Texts) -> Measures:
    """Measure the stored head on held-out texts."""
    head = Eagle3Head.load(folder)
    found = overlaps(head, target, texts, args.places)
    head.core.model.embed_tokens = nn.Identity()  # the target's
    return {
        "held_out": found,
        "parameters": num_parameters(head),
        "draft_vocab_size": len(head.ids),
        "reads": head.reads,
        "precision": {"training": "bfloat16", "stored": "float16", "measured": "float32"},
    }


def target_of(args: argparse.Namespace, target: Any, texts: Texts) -> Measures:
    """Return of which target and from which texts a head was made."""
    named = args.prompts or args.corpus
    folder = Path(str(args.target))
    files = sorted(folder.glob("LICEN[CS]E*")) if folder.is_dir() else []
    return {
        "texts": {
            "source": "the target's own" if named is None else named.name,
            "texts": len(texts.places),
            "tokens": sum(len(piece.ids) for piece in texts.pieces),
        },
        "target": {
            "name": folder.name if folder.is_dir() else str(args.target),
            "digest": model_digest(args.target, (args.revision or [None])[0]),
            "dtype": str(target.dtype).removeprefix("torch."),
            "licence": files[0].read_text(encoding="utf-8").strip() if files else "unknown",
        },
    }
