"""The ``report.json`` of a head: how good it is on texts it never saw, and of what it is."""

import argparse
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from cactus_theory.decoding.drafters.eagle3 import Eagle3Head

from ..common.inputs import model_digest
from ..common.results import machine_kind
from ..train_pair.train import num_parameters
from .batches import Texts
from .unroll import Unrolled, rows_of

TEXTS = 16


@torch.inference_mode()
def overlaps(head: Eagle3Head, target: Any, texts: Texts, places: int) -> dict[str, Any]:
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


def measured(folder: Path, target: Any, texts: Texts, places: int) -> dict[str, Any]:
    """Measure the stored head on held-out texts."""
    head = Eagle3Head.load(folder)
    found = overlaps(head, target, texts, places)
    head.core.model.embed_tokens = torch.nn.Identity()  # the target's
    return {
        "held_out": found,
        "parameters": num_parameters(head),
        "draft_vocab_size": len(head.ids),
        "reads": head.reads,
    }


def origin(args: argparse.Namespace, target: Any, texts: Texts) -> dict[str, Any]:
    """Return when, where, of which target and from which texts a head was made."""
    named = args.prompts or args.corpus
    folder = Path(str(args.target))
    files = sorted(folder.glob("LICEN[CS]E*")) if folder.is_dir() else []
    versions = {package.__name__: package.__version__ for package in (torch, transformers)}
    return {
        "date": datetime.now(UTC).date().isoformat(),
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
        "precision": {"training": "bfloat16", "stored": "float16", "measured": "float32"},
        "versions": {"python": platform.python_version()} | versions,
        "machine": machine_kind(),
    }
