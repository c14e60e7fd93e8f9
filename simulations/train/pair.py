"""From the standard library to the shipped pair.

The stages are: corpus and tokenizer, target on text, draft on text, texts sampled from the target,
draft distilled on these texts, draft trained for acceptance, report. Files in --work-dir let every
stage be resumed or skipped; training gives the same bits however often it was interrupted.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from cactus_theory import losses
from cactus_theory.base.arguments import threads
from cactus_theory.decoding.load import load_model

from ..common.inputs import PAIR, Numbers, add_numbers, check_numbers
from ..common.journal import Journal
from . import corpus, fit, report
from .corpus import Document
from .fit import Plan
from .samples import Piece, Source, Turn

# the defaults are the settings of the shipped pair
FLAGS: Numbers = {
    "vocab_size": (2048, ""),
    "target_layers": (11, ""),
    "target_width": (192, ""),
    "target_head_size": (64, ""),
    "draft_width": (128, ""),
    "steps": (2200, "training steps of the target"),
    "draft_steps": (1000, "training steps of the draft on text"),
    "distil_steps": (2000, "steps on the target's law, by KL"),
    "overlap_steps": (1500, "steps on acceptance, after them"),
    "pool_chunks": (24, "files of texts that the target writes"),
    "pool_rows": (128, "texts of a file, written together"),
    "batch_size": (16, "sequences in a training step"),
    "length": (256, "tokens of a training sequence, and of what the target writes"),
    "overlap_rows": (128, "held-out continuations the report scores"),
    "held_out": (corpus.HELD_OUT, "share of the documents that are only scored, by the seed"),
    "seed": (0, ""),
    "threads": (1, "one gives bit-identical results"),
}
# peak learning rates of the target, of the draft, and of the draft's steps on acceptance
TARGET_RATE, DRAFT_RATE, OVERLAP_RATE = 2e-3, 4e-3, 1.5e-3
# share of texts sampled from the target in a batch of the draft
POOL_SHARE = 0.75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/train-pair"), help="checkpoints and samples")
    add("--out", type=Path, default=PAIR, help="where the finished pair goes")
    text = f"a file or a folder of {', '.join(corpus.KINDS)} (the standard library)"
    add("--corpus", type=Path, default=None, help=text)
    add("--licence", help="of that corpus, for the report")
    add_numbers(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    check_numbers(args, FLAGS)
    if args.licence is not None and args.corpus is None:
        raise ValueError(f"--licence: must be given with --corpus; got {args.licence!r} alone")
    torch.set_num_threads(threads(args.threads))
    disable_progress_bar()
    kinds = (".py",) if args.corpus is None else corpus.KINDS
    root = args.corpus or Path(sysconfig.get_paths()["stdlib"])
    seen, unseen = corpus.read_corpus(root, args.held_out, args.seed, kinds)
    settings = {name: getattr(args, name) for name in FLAGS if name != "threads"}
    settings["corpus_sha256"] = corpus.fingerprint([*seen, *unseen])
    with Journal(args.work_dir / "journal.jsonl", settings):
        finished, measured = trained(args, seen, unseen)
        report.publish(args, finished, measured)
    return 0


def trained(
    args: argparse.Namespace, seen: list[Document], unseen: list[Document]
) -> tuple[Path, dict[str, Any]]:
    tokenizer = corpus.train_tokenizer([document.text for document in seen], args.vocab_size)
    stream, finished = corpus.encode_stream(tokenizer, seen), args.work_dir / "pair"
    outcomes = {}

    def taught(name: str, model: Any, numbers: Any, batches: Any, loss: Any, **more: Any) -> None:
        steps, rate, seed = numbers
        plan = Plan(steps, args.batch_size, args.length, rate, seed=args.seed + seed, **more)
        checkpoint = args.work_dir / f"{name}.pt"
        outcomes[name] = fit.fit(model, plan, batches, loss, checkpoint)

    shape = args.target_layers, args.target_width, args.vocab_size
    model = fit.build(*shape, args.seed, args.target_head_size)
    text = fit.text_batches(stream, args.batch_size, args.length)
    taught("target", model, (args.steps, TARGET_RATE, 0), text, fit.text_loss)
    fit.save(model, finished / "target")
    target = load_model(finished / "target", dtype="float32")

    draft = fit.build(1, args.draft_width, args.vocab_size, args.seed + 1)
    stage = args.draft_steps, DRAFT_RATE, 1
    taught("draft_text", draft, stage, text, fit.text_loss, warmup_steps=30)
    source = Source(corpus.beginnings(tokenizer, seen), [Turn(args.length, frozenset())])
    folder, sizes = args.work_dir / "samples", (args.pool_chunks, args.pool_rows)
    pool = source.pieces(target, folder, *sizes, (), args.seed)
    own = fit.text_batches(_stream_of(pool), args.batch_size, args.length)

    def mixed(step: int, generator: torch.Generator) -> torch.Tensor:
        window = text(step, generator)
        rows = round(POOL_SHARE * len(window))
        return torch.cat([own(step, generator)[:rows], window[rows:]])

    for name, stage, decay, loss in (
        ("draft_distilled", (args.distil_steps, DRAFT_RATE, 2), 0.6, losses.forward_kl),
        ("draft_matched", (args.overlap_steps, OVERLAP_RATE, 3), 1.0, losses.total_variation),
    ):
        of_target = fit.target_loss(target, loss)
        taught(name, draft, stage, mixed, of_target, warmup_steps=30, decay=decay)
    fit.save(draft, finished / "draft")
    for name in report.MODELS:
        tokenizer.save_pretrained(finished / name)
    return finished, report.measure_pair(args, finished, seen, unseen) | {"training": outcomes}


def _stream_of(pool: list[Path]) -> corpus.Stream:
    """Return the sampled texts as one stream; each text begins with an end-of-text token."""
    pieces = [Piece.read(path) for path in pool]
    ends = torch.cat([piece.lengths for piece in pieces]).cumsum(0)
    starts = torch.cat([torch.ones(1, dtype=torch.int64), ends[:-1] + 1])
    return corpus.Stream(torch.cat([piece.ids for piece in pieces]).to(torch.int32), starts)
