"""Write the ``report.json`` of a pair or a head: quality on held-out texts, and training data."""

import argparse
import json
import math
from collections.abc import Sequence
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
from ..common.results import provenance, write_bytes, write_text
from . import corpus
from .corpus import Document, Stream
from .eagle3 import Unrolled, rows_of
from .samples import SampledTexts, Source, Turn

FOLDERS = ("work_dir", "out")  # flags that do not change any number
MODELS = ("target", "draft")
LICENCE = (
    "Trained on the Python standard library, which is under the Python Software Foundation "
    "licence; the weights and the tokenizer are ours, under the licence of this repository."
)
UNKNOWN = "Unknown: the weights are made from {}, whose licence was not named (--licence)."
STANDARD_LIBRARY = "Python standard library, .py files without tests and generated tables"
PRECISION = {"training": "bfloat16", "stored": "float16", "measured": "float32"}
# most texts that are scored at once
TEXTS = 16
Measures = dict[str, Any]


def publish(args: argparse.Namespace, finished: Path, measured: Measures) -> None:
    """Write the report into a finished folder, and copy the folder to --out, file by file."""
    made = provenance(command_line(args, FOLDERS))
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    versions |= {name: made[name] for name in ("python", "torch")}
    report = {"command": made["command"]} | measured
    report |= {"date": made["date"], "versions": versions, "machine": made["machine"]}
    text = json.dumps(report, indent=2, allow_nan=False)
    write_text(finished / "report.json", f"{text}\n")
    for path in sorted(finished.rglob("*")):
        if path.is_file():
            write_bytes(args.out / path.relative_to(finished), path.read_bytes())
    print(text)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.inference_mode()
def held_out_loss(model: Any, stream: Stream, size: int, context: int = 256) -> Measures:
    """Return a model's mean loss on a stream, per token and per byte.

    Windows of 512 tokens move by 256 and score their second half, so that a token is scored once,
    with 256 to 511 tokens before it; the first window scores all its tokens. ``size`` is the
    documents' number of bytes; end-of-text tokens add to the loss, but not to the bytes.
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
    """Return the mean overlap Σ min(p, q) along continuations that are sampled from the target."""
    piece = Source(beginnings, [Turn(length, frozenset())]).piece(target, rows, (), seed)
    lengths, values = piece.lengths.tolist(), []
    for ids, norms in zip(piece.ids.split(lengths), piece.norms.split(lengths), strict=True):
        q, p = (model(ids[None], use_cache=False).logits[0] for model in (target, draft))
        values.append(losses.overlap(q, p)[~norms.isnan()])
    overlaps = torch.cat(values)
    mean = overlaps.double().mean().item()
    return {"mean": mean, "positions": len(overlaps), "sequences": len(values)}


def measure_pair(
    args: argparse.Namespace, folder: Path, seen: list[Document], unseen: list[Document]
) -> Measures:
    """Measure the stored models on held-out documents, and describe the training texts."""
    models = {name: load_model(folder / name, dtype="float32") for name in MODELS}
    target, draft = models.values()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "target")
    stream, size = corpus.encode_stream(tokenizer, unseen), corpus.num_bytes(unseen)
    own = corpus.beginnings(tokenizer, unseen)
    lengths = {"rows": args.overlap_rows, "length": args.length, "seed": args.seed + 7}
    documents, named = [*seen, *unseen], None if args.corpus is None else args.corpus.name
    return {
        "held_out": {name: held_out_loss(model, stream, size) for name, model in models.items()},
        "overlap_on_target_samples": overlap(target, draft, own, **lengths),
        "parameters": {name: num_parameters(model) for name, model in models.items()},
        "precision": PRECISION,
        "trained": "target on the corpus; draft on the corpus, then on the target's law",
        "corpus": {
            "source": f"--corpus {named}" if named else STANDARD_LIBRARY,
            "documents": len(documents),
            "bytes": corpus.num_bytes(documents),
            "held_out_documents": len(unseen),
            "held_out_bytes": size,
            "sha256": corpus.fingerprint(documents),
        },
        "licence": (args.licence or UNKNOWN.format(named)) if named else LICENCE,
    }


@torch.inference_mode()
def measure_head(
    args: argparse.Namespace, folder: Path, target: Any, seen: SampledTexts, unseen: SampledTexts
) -> Measures:
    """Measure the stored head on held-out texts, and describe its target and training texts.

    The numbers are the mean overlap with the target's row at each place, and the target's mean mass
    on the head's tokens, which is a ceiling for the overlap.
    """
    head = Eagle3Head.load(folder)
    student, weight = Unrolled(head), rows_of(target, head.ids)
    sums, mass = torch.zeros(2, args.places, dtype=torch.float64), 0.0
    for start in range(0, len(unseen.places), TEXTS):
        batch = unseen.batch(range(start, min(start + TEXTS, len(unseen.places))))
        sums += torch.stack(student(batch, weight, args.places, True)[1:])
        for rows, norms in zip(
            batch.rows[batch.counts].split(256), batch.norms[batch.counts].split(256), strict=True
        ):
            mass += float(((rows @ weight.t()).float() - norms[:, None]).exp().sum())
    named, model = args.prompts or args.corpus, Path(str(args.target))
    of_target = num_parameters(head.core.model.embed_tokens)
    return {
        "held_out": {
            "overlap_by_place": [round(value, 4) for value in (sums[0] / sums[1]).tolist()],
            "target_mass_of_draft_vocabulary": round(mass / float(sums[1, 0]), 4),
            "positions": int(sums[1, 0]),
            "texts": len(unseen.places),
        },
        "parameters": num_parameters(head) - of_target,
        "draft_vocab_size": len(head.ids),
        "reads": head.reads,
        "precision": PRECISION,
        "texts": {
            "source": "the target's own" if named is None else named.name,
            "texts": len(seen.places),
            "tokens": sum(len(piece.ids) for piece in seen.pieces),
        },
        "target": {
            "name": model.name if model.is_dir() else str(args.target),
            "digest": model_digest(args.target, (args.revision or [None])[0]),
            "dtype": str(target.dtype).removeprefix("torch."),
        },
    }
