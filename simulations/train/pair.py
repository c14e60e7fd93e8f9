"""From the standard library to the shipped pair.

In stages: corpus and tokenizer, target on text, draft on text, texts that the target writes, draft
distilled on them, draft trained for its acceptance, report. Every stage is resumed or skipped by
its file in --work-dir, and training is bit-identical however often it was interrupted.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from cactus_theory import losses
from cactus_theory.base.arguments import threads
from cactus_theory.commands.flags import flag
from cactus_theory.decoding.load import load_model

from ..common.inputs import PAIR, at_least
from . import corpus, fit, report
from .corpus import Document
from .fit import Plan
from .samples import Piece, Source, Turn

# flag → default (those of the shipped pair), help
FLAGS: dict[str, tuple[Any, str]] = {
    "vocab_size": (2048, ""),
    "target_layers": (11, ""),
    "target_width": (192, ""),
    "target_head_size": (64, ""),
    "draft_width": (128, ""),
    "steps": (2200, "training steps of the target"),
    "draft_steps": (1000, "training steps of the draft on text"),
    "distil_steps": (2000, "steps on the target's law, by KL"),
    "overlap_steps": (1500, "steps on acceptance, after them"),
    "draft_rate": (4e-3, "peak learning rate of the draft"),
    "pool_chunks": (24, "files of texts that the target writes"),
    "pool_rows": (128, "texts of a file, written together"),
    "pool_share": (0.75, "share of these texts in a batch"),
    "batch_size": (16, "sequences in a training step"),
    "length": (256, "tokens of a training sequence, and of what the target writes"),
    "overlap_rows": (128, "held-out continuations the report scores"),
    "held_out": (corpus.HELD_OUT, "share of the documents that are only scored, by the seed"),
    "seed": (0, ""),
    "threads": (1, "one gives bit-identical results"),
}
# flags that need not be counts
FREE = ("draft_rate", "pool_share", "held_out", "seed")
# peak learning rates of the target, and of the steps on acceptance
TARGET_RATE, OVERLAP_RATE = 2e-3, 1.5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the shipped pair."""
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/train-pair"), help="checkpoints and samples")
    add("--out", type=Path, default=PAIR, help="where the finished pair goes")
    add("--corpus", type=Path, default=None,
        help=f"a file or a folder of {', '.join(corpus.KINDS)} (the standard library)")  # fmt: skip
    add("--licence", help="of that corpus, for the report")
    for name, (default, words) in FLAGS.items():
        add(flag(name), type=type(default), default=default, help=words or None)


def run(args: argparse.Namespace) -> int:
    """Train, distil, measure and ship; return 0."""
    check_flags(args)
    torch.set_num_threads(threads(args.threads))
    disable_progress_bar()
    kinds = (".py",) if args.corpus is None else corpus.KINDS
    root = args.corpus or corpus.standard_library()
    documents = corpus.read_corpus(root, args.held_out, args.seed, kinds)
    settings = {name: getattr(args, name) for name in FLAGS if name != "threads"}
    with report.held(args, settings | {"corpus_sha256": corpus.fingerprint(documents)}):
        finished, measured = trained(args, documents)
        report.publish(args, finished, measured | report.corpus_of(args, documents))
    return 0


def trained(args: argparse.Namespace, documents: list[Document]) -> tuple[Path, dict[str, Any]]:
    """Train both models; return their folder, and what is measured of them."""
    seen = corpus.training(documents)
    tokenizer = corpus.train_tokenizer([document.text for document in seen], args.vocab_size)
    stream, finished = corpus.encode_stream(tokenizer, seen), args.work_dir / "pair"
    outcomes = {}

    def taught(name: str, model: Any, plan: Plan, batches: Any, loss: Any) -> None:
        checkpoint, label = args.work_dir / f"{name}.pt", name.replace("_", ", ")
        outcomes[name] = fit.fit(model, plan, batches, loss, checkpoint, label=label)

    shape = fit.Shape(args.target_layers, args.target_width, args.target_head_size)
    model = fit.build(shape, args.vocab_size, args.seed)
    plan = _plan(args, args.steps, TARGET_RATE, 0)
    text = fit.text_batches(stream, plan)
    taught("target", model, plan, text, fit.text_loss)
    fit.save(model, finished / "target")
    target = load_model(finished / "target", dtype="float32")

    draft = fit.build(fit.Shape(1, args.draft_width), args.vocab_size, args.seed + 1)
    plan = _plan(args, args.draft_steps, args.draft_rate, 1, warmup_steps=30)
    taught("draft_text", draft, plan, text, fit.text_loss)
    source = Source(corpus.beginnings(tokenizer, seen), [Turn(args.length, frozenset())])
    pool = source.pieces(
        target, args.work_dir / "samples", args.pool_chunks, args.pool_rows, (), args.seed
    )
    own = fit.text_batches(_stream_of(pool), plan)
    batches = fit.mixed_batches(own, text, args.pool_share)
    stages = {
        "draft_distilled": (args.distil_steps, args.draft_rate, 0.6, losses.forward_kl),
        "draft_matched": (args.overlap_steps, OVERLAP_RATE, 1.0, fit.rejected),
    }
    for seed, (name, (steps, rate, decay, loss)) in enumerate(stages.items(), 2):
        plan = _plan(args, steps, rate, seed, warmup_steps=30, decay=decay)
        taught(name, draft, plan, batches, fit.target_loss(target, loss))
    fit.save(draft, finished / "draft")
    for name in report.MODELS:
        tokenizer.save_pretrained(finished / name)
    return finished, report.measure_pair(args, finished, documents) | {"training": outcomes}


def _stream_of(pool: list[Path]) -> corpus.Stream:
    """Return the texts that a target wrote, each of which begins with end-of-text."""
    pieces = [Piece.read(path) for path in pool]
    ends = torch.cat([piece.lengths for piece in pieces]).cumsum(0)
    starts = torch.cat([torch.ones(1, dtype=torch.int64), ends[:-1] + 1])
    return corpus.Stream(torch.cat([piece.ids for piece in pieces]).to(torch.int32), starts)


def _plan(args: argparse.Namespace, steps: int, rate: float, seed: int, **more: Any) -> Plan:
    return Plan(steps, args.batch_size, args.length, rate, seed=args.seed + seed, **more)


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag out of its range."""
    at_least(args, **{name: 1 for name in FLAGS if name not in FREE}, seed=0)
    if not 0 < args.draft_rate <= 1:
        raise ValueError(f"--draft-rate: must be in (0, 1]; got {args.draft_rate}")
    if not 0 <= args.pool_share <= 1:
        raise ValueError(f"--pool-share: must be in [0, 1]; got {args.pool_share}")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out: must be in (0, 1); got {args.held_out}")
    if args.licence is not None and args.corpus is None:
        raise ValueError(f"--licence: must be given with --corpus; got {args.licence!r} alone")
