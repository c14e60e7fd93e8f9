"""From the standard library to the shipped pair, or to a head on the states of a target.

The pair, in stages: corpus and tokenizer, target on text, draft on text, samples of the target,
draft distilled on them, draft trained for its acceptance, report. --drafter recurrent trains a
head on a target that is there already: samples, KL, acceptance at a price, report. Every stage is
resumed or skipped by its file in --work-dir, and training is bit-identical however often it was
interrupted. The shipped head took 31 minutes of one core: --drafter recurrent --distil-steps 1300
--overlap-steps 700 --pool-chunks 6 --pool-share 0.5 --draft-rate 0.003 --head-rank 117.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from cactus_theory import losses
from cactus_theory.base.arguments import threads
from cactus_theory.commands.flags import flag, refuse
from cactus_theory.decoding.drafters.recurrent_head import HeadShape
from cactus_theory.decoding.load import load_model

from ..common.inputs import PAIR, at_least, command_line, folder_digest
from ..common.journal import Journal
from ..common.results import write_text
from . import corpus, heads, ship, train
from .corpus import Document, Stream
from .train import Loss, Plan

FOLDERS = ("work_dir", "out", "corpus", "target")  # which change no number, or have a digest
# flag → default (those of the shipped pair), help
Flags = dict[str, tuple[Any, str]]
SHARED: Flags = {
    "distil_steps": (2000, "steps on the target's law, by KL"),
    "overlap_steps": (1500, "steps on acceptance, after them"),
    "draft_rate": (4e-3, "peak learning rate of what is trained beside the target"),
    "pool_chunks": (24, "batches of samples the target writes"),
    "pool_rows": (128, "sequences in one batch of samples"),
    "pool_share": (0.75, "share of samples in a batch"),
    "batch_size": (16, "sequences in a training step"),
    "length": (256, "tokens of a training sequence"),
    "overlap_rows": (128, "held-out continuations the report scores"),
    "held_out": (corpus.HELD_OUT, "share of the documents that are only scored, by the seed"),
    "seed": (0, ""),
    "threads": (1, "one gives bit-identical results"),
}
OF_THE_PAIR: Flags = {
    "vocab_size": (2048, ""),
    "target_layers": (11, ""),
    "target_width": (192, ""),
    "target_head_size": (64, ""),
    "draft_width": (128, ""),
    "steps": (2200, "training steps of the target"),
    "draft_steps": (1000, "training steps of the draft on text"),
}
OF_A_HEAD: Flags = {
    "target": (PAIR / "target", "whose states it reads"),
    "price": (1.0, "acceptance that a nat costs in the steps on acceptance"),
    "places": (8, "tokens it drafts at most"),
    "head_layers": (2, ""),
    "head_width": (HeadShape.width, ""),
    "head_rank": (HeadShape.rank, "rank of the matrix from the head's states to logits"),
}
# flags that need not be counts
FREE = ("draft_rate", "pool_share", "held_out", "seed", "price")
# peak learning rates of the target, and of the steps on acceptance
TARGET_RATE, OVERLAP_RATE = 2e-3, 1.5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the shipped pair."""
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/train-pair"), help="checkpoints and samples")
    add("--out", type=Path, default=None, help="where it goes (the shipped pair; DRAFTER in it)")
    add("--drafter", choices=("model", "recurrent"), default="model", help="what is trained")
    add("--corpus", type=Path, default=None,
        help=f"a file or a folder of {', '.join(corpus.KINDS)} (the standard library)")  # fmt: skip
    add("--licence", help="of that corpus, for the report")
    kinds = {"of both": SHARED, "of the pair alone": OF_THE_PAIR, "of a head alone": OF_A_HEAD}
    for title, flags in kinds.items():
        add = parser.add_argument_group(title).add_argument
        for name, (default, words) in flags.items():
            kind = Path if isinstance(default, Path) else type(default)
            add(flag(name), type=kind, default=default, help=words or None)


def run(args: argparse.Namespace) -> int:
    """Train, distil, measure and ship; return 0."""
    check_flags(args)
    torch.set_num_threads(threads(args.threads))
    disable_progress_bar()
    out = args.out or (PAIR if args.drafter == "model" else PAIR / args.drafter)
    kinds = (".py",) if args.corpus is None else corpus.KINDS
    root = args.corpus or corpus.standard_library()
    documents = corpus.read_corpus(root, args.held_out, args.seed, kinds)
    with Journal(args.work_dir / "journal.jsonl", _settings(args, documents)) as journal:
        journal.check(lambda key, _: f"job: must not be there, as training keeps none; got {key!r}")
        finished, measured = (_pair if args.drafter == "model" else _head)(args, documents)
        report = (
            {"command": command_line(args, FOLDERS[:2])} | measured | ship.origin(args, documents)
        )
        text = json.dumps(report, indent=2, allow_nan=False)
        write_text(finished / "report.json", f"{text}\n")
        ship.publish(finished, out)
    print(text)
    return 0


def _pair(args: argparse.Namespace, documents: list[Document]) -> tuple[Path, dict[str, Any]]:
    """Train both models; return their folder, and what is measured of them."""
    seen = corpus.training(documents)
    tokenizer = corpus.train_tokenizer([document.text for document in seen], args.vocab_size)
    stream, finished = corpus.encode_stream(tokenizer, seen), args.work_dir / "pair"
    outcomes = {}

    shape = train.Shape(args.target_layers, args.target_width, args.target_head_size)
    model = train.build(shape, args.vocab_size, args.seed)
    plan = _plan(args, args.steps, TARGET_RATE, 0)
    text, checkpoint = train.text_batches(stream, plan), args.work_dir / "target.pt"
    outcomes["target"] = train.fit(model, plan, text, train.text_loss, checkpoint, label="target")
    train.save(model, finished / "target")
    target = load_model(finished / "target", dtype="float32")

    shape = train.Shape(1, args.draft_width)
    draft = train.build(shape, args.vocab_size, args.seed + 1)
    plan, checkpoint = _student(args, args.draft_steps, 1), args.work_dir / "draft-text.pt"
    outcomes["draft_text"] = train.fit(
        draft, plan, text, train.text_loss, checkpoint, label="draft, text"
    )
    judges = {
        "draft_distilled": lambda plan: train.target_loss(target, losses.forward_kl),
        "draft_matched": lambda plan: train.target_loss(target, train.rejected),
    }
    outcomes |= _taught(args, draft, stream, target, judges)
    train.save(draft, finished / "draft")
    ship.add_tokenizer(tokenizer, finished)
    unseen = corpus.encode_stream(tokenizer, corpus.held_out(documents))
    return finished, ship.measure_pair(args, finished, documents, unseen) | {"training": outcomes}


def _head(args: argparse.Namespace, documents: list[Document]) -> tuple[Path, dict[str, Any]]:
    """Train a head by KL, then at a price; return its folder, and what is measured of it."""
    target, tokenizer = load_model(args.target, dtype="float32"), ship.tokenizer_of(args.target)
    stream = corpus.encode_stream(tokenizer, corpus.training(documents))
    sizes = {"layers": args.head_layers, "width": args.head_width, "rank": args.head_rank}
    head = heads.build(target, args.seed + 1, args.places, **sizes)
    judges = {
        "kl": lambda plan: heads.head_loss(target, heads.by_kl, plan.seed),
        "price": lambda plan: heads.head_loss(target, heads.at_price(args.price), plan.seed),
    }
    outcomes, finished = _taught(args, head, stream, target, judges), args.work_dir / "head"
    head.save(finished)
    unseen = corpus.encode_stream(tokenizer, corpus.held_out(documents))
    return finished, ship.measure_head(args, finished, target, unseen) | {"training": outcomes}


def _taught(
    args: argparse.Namespace,
    student: Any,
    stream: Stream,
    target: Any,
    judges: dict[str, Callable[[Plan], Loss]],
) -> dict[str, Any]:
    """Fit a student to the target's law, then to its acceptance, on text and the target's own."""
    plans = (
        _student(args, args.distil_steps, 2, decay=0.6),
        _student(args, args.overlap_steps, 3, rate=OVERLAP_RATE, decay=1.0),
    )
    pool = corpus.build_pool(
        target, stream, args.work_dir / "samples",
        chunks=args.pool_chunks, rows=args.pool_rows, length=args.length + 1, seed=args.seed,
    )  # fmt: skip
    text = train.text_batches(stream, plans[0])
    batches = train.mixed_batches(pool, text, args.pool_share)
    outcomes = {}
    for (name, judge), plan in zip(judges.items(), plans, strict=True):
        checkpoint = args.work_dir / f"{name}.pt"
        outcomes[name] = train.fit(student, plan, batches, judge(plan), checkpoint, label=name)
    return outcomes


def _student(args: argparse.Namespace, steps: int, seed: int, **more: Any) -> Plan:
    """Return the plan of a stage of the draft or a head: their rates rise faster."""
    return _plan(args, steps, more.pop("rate", args.draft_rate), seed, warmup_steps=30, **more)


def _plan(args: argparse.Namespace, steps: int, rate: float, seed: int, **more: Any) -> Plan:
    return Plan(steps, args.batch_size, args.length, rate, seed=args.seed + seed, **more)


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag out of its range, or one that what is trained does not read."""
    unread = OF_A_HEAD if args.drafter == "model" else OF_THE_PAIR
    usual = {name: default for name, (default, _) in unread.items()}
    refuse(args, unread, f"must not be given with --drafter {args.drafter}", **usual)
    counts = [name for name in SHARED | OF_THE_PAIR | OF_A_HEAD if name not in (*FREE, *FOLDERS)]
    at_least(args, **dict.fromkeys(counts, 1), seed=0)
    if not 0 < args.draft_rate <= 1:
        raise ValueError(f"--draft-rate: must be in (0, 1]; got {args.draft_rate}")
    if not 0 <= args.pool_share <= 1:
        raise ValueError(f"--pool-share: must be in [0, 1]; got {args.pool_share}")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out: must be in (0, 1); got {args.held_out}")
    if args.licence is not None and args.corpus is None:
        raise ValueError(f"--licence: must be given with --corpus; got {args.licence!r} alone")
    if not args.price >= 0:
        raise ValueError(f"--price: must be at least 0; got {args.price}")
    if args.places >= args.length:
        raise ValueError(f"--places: must be below --length {args.length}; got {args.places}")


def _settings(args: argparse.Namespace, documents: list[Document]) -> dict[str, Any]:
    """Return all that decides a result: folders and threads cannot change it."""
    names = ["drafter", *SHARED, *OF_THE_PAIR, *OF_A_HEAD]
    settings = {name: getattr(args, name) for name in names if name not in (*FOLDERS, "threads")}
    settings["corpus_sha256"] = corpus.fingerprint(documents)
    if args.drafter != "model":
        settings["target_sha256"] = folder_digest(args.target)
    return settings
