"""``python -m simulations train-pair``: from standard library to shipped pair.

Seven stages, each resumed or skipped according to its file in ``--work-dir``: corpus and
tokenizer, target on text, draft on text, samples of the target, draft distilled on them,
draft trained for its acceptance, report. Training is bit-identical however often it was
interrupted. ``--drafter block`` (or ``recurrent``) trains a head on the states of a target that is
there already: samples, distillation, acceptance, report.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from cactus_theory.base.arguments import threads
from cactus_theory.base.files import FolderLock
from cactus_theory.decoding.drafters._heads import HeadShape

from ..common.inputs import PAIR, folder_digest, load_model
from ..common.inputs import command_line as called_as
from ..common.results import write_json
from . import corpus, heads, ship, train
from .train import Batches, Outcome, Plan

# steps in which the draft's learning rate rises to its peak
DRAFT_WARMUP = 30
FOLDERS = ("work_dir", "out", "corpus", "target")
POSITIVE = (
    "vocab_size target_layers target_width target_head_size draft_layers draft_width "
    "draft_head_size steps draft_steps distil_steps overlap_steps pool_chunks "
    "pool_rows batch_size length overlap_rows threads places anchors head_layers "
    "head_width head_rank"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the shipped pair."""
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/train-pair"), help="checkpoints and samples")
    add("--out", type=Path, default=None, help="where it goes (the shipped pair; DRAFTER in it)")
    add("--drafter", choices=("model", *heads.HEADS), default="model", help="what is trained")
    add("--target", type=Path, default=PAIR / "target", help="whose states a head reads")
    add("--corpus", type=Path, default=None, help="folder of .py files (the standard library)")
    add("--vocab-size", type=int, default=2048)
    for name, layers, width, head in (("target", 11, 192, 64), ("draft", 1, 128, 32)):
        add(f"--{name}-layers", type=int, default=layers)
        add(f"--{name}-width", type=int, default=width)
        add(f"--{name}-head-size", type=int, default=head)
    add("--steps", type=int, default=2200, help="training steps of the target")
    add("--decay", type=float, default=0.35, help="share of the target's steps at a falling rate")
    add("--hold-steps", type=int, default=0, help="steps of the target before any fall")
    add("--draft-steps", type=int, default=1000, help="training steps of the draft on text")
    add("--distil-steps", type=int, default=2000, help="distillation steps of the draft")
    add("--overlap-steps", type=int, default=1500, help="steps of the draft on its acceptance")
    add("--pool-chunks", type=int, default=24, help="batches of samples the target writes")
    add("--pool-rows", type=int, default=128, help="sequences in one batch of samples")
    add("--pool-share", type=float, default=0.75, help="share of samples in a distillation batch")
    add("--batch-size", type=int, default=16, help="sequences in a training step")
    add("--length", type=int, default=256, help="tokens of a training sequence")
    add("--rate", type=float, default=2e-3, help="peak learning rate of the target")
    add("--draft-rate", type=float, default=4e-3, help="peak learning rate of the draft")
    add("--overlap-rate", type=float, default=1.5e-3, help="peak learning rate of those steps")
    add("--loss", choices=heads.LOSSES, default="price", help="of a head, after kl")
    add("--price", type=float, default=1.0, help="acceptance that a nat costs in that loss")
    add("--places", type=int, default=8, help="tokens of a head's block")
    add("--anchors", type=int, default=32, help="blocks in a training sequence")
    add("--head-layers", type=int, default=2)
    add("--head-width", type=int, default=HeadShape.width)
    add("--head-rank", type=int, default=HeadShape.rank, help="117 gives both kinds one size")
    add("--overlap-rows", type=int, default=128, help="held-out continuations the report scores")
    add("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of training")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="one gives bit-identical results")


def run(args: argparse.Namespace) -> int:
    """Train, distil, measure and ship; return 2 with one line when an argument is wrong."""
    try:
        check_flags(args)
        torch.set_num_threads(threads(args.threads))
        disable_progress_bar()
        with FolderLock(args.work_dir):
            (_run if args.drafter == "model" else _run_head)(args)
    except ValueError as error:
        print(f"train-pair: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    documents = corpus.read_corpus(args.corpus or corpus.standard_library())
    _claim(args, corpus.fingerprint(documents))
    trained_on = corpus.training(documents)
    tokenizer = corpus.train_tokenizer([d.text for d in trained_on], args.vocab_size)
    stream = corpus.encode_stream(tokenizer, trained_on)
    finished = args.work_dir / "pair"

    target_outcome = train_target(args, stream, finished / "target")
    target = load_model(finished / "target")
    draft_outcomes = train_draft(args, stream, target, finished / "draft")

    ship.add_tokenizer(tokenizer, finished)
    unseen = corpus.encode_stream(tokenizer, corpus.held_out(documents))
    outcomes = {"target": target_outcome, **draft_outcomes}
    ship.write_report(args, command_line(args), finished, documents, unseen, outcomes)
    out = args.out or PAIR
    ship.publish(finished, out)
    print(json.dumps(ship.summary(out), indent=2))


def _run_head(args: argparse.Namespace) -> None:
    documents = corpus.read_corpus(args.corpus or corpus.standard_library())
    _claim(args, corpus.fingerprint(documents), target_sha256=folder_digest(args.target))
    target, tokenizer = load_model(args.target), ship.tokenizer_of(args.target)
    stream = corpus.encode_stream(tokenizer, corpus.training(documents))
    head, outcomes = train_head(args, stream, target)
    finished = args.work_dir / "head"
    head.save(finished)
    unseen = corpus.encode_stream(tokenizer, corpus.held_out(documents))
    report = ship.write_head_report(args, command_line(args), target, documents, unseen, outcomes)
    ship.publish(finished, args.out or PAIR / args.drafter)
    print(json.dumps(report, indent=2))


def train_head(args: argparse.Namespace, stream, target) -> tuple[heads.Head, dict[str, Outcome]]:
    """Train a head by KL, then by ``args.loss``; return it and what each took."""
    sizes = {"layers": args.head_layers, "width": args.head_width, "rank": args.head_rank}
    head = heads.build(args.drafter, target, args.seed + 1, args.places, **sizes)
    plan = replace(
        _text_plan(args, args.distil_steps, args.draft_rate, args.seed + 1),
        warmup_steps=DRAFT_WARMUP,
    )
    batches = _mixed(args, stream, target, train.text_batches(stream, plan))
    plans = {
        "kl": train.distil_plan(args.distil_steps, plan, args.draft_rate),
        args.loss: train.overlap_plan(args.overlap_steps, plan, args.overlap_rate),
    }
    outcomes = {}
    for loss, own in plans.items():
        judge = heads.LOSSES[loss](args.price)
        mean_loss = heads.head_loss(target, judge, args.anchors, own.seed)
        path, label = args.work_dir / f"head-{loss}.pt", f"{args.drafter}, {loss}"
        outcomes[loss] = train.fit(head, own, batches, mean_loss, path, label=label)
    return head, outcomes


def train_target(args: argparse.Namespace, stream, folder: Path) -> Outcome:
    """Train the target on text and store it in ``folder``."""
    shape = train.Shape(args.target_layers, args.target_width, args.target_head_size)
    model = train.build(shape, args.vocab_size, args.seed)
    plan = _text_plan(args, args.steps, args.rate, args.seed)
    plan = replace(plan, decay=args.decay, hold_steps=args.hold_steps)
    checkpoint, batches = args.work_dir / "target.pt", train.text_batches(stream, plan)
    outcome = train.fit(model, plan, batches, train.text_loss, checkpoint, label="target")
    train.save(model, folder)
    return outcome


def train_draft(args: argparse.Namespace, stream, target, folder: Path) -> dict[str, Outcome]:
    """Train the draft on text, on the target's distribution, on acceptance; store it."""
    shape = train.Shape(args.draft_layers, args.draft_width, args.draft_head_size)
    draft = train.build(shape, args.vocab_size, args.seed + 1)
    plan = _text_plan(args, args.draft_steps, args.draft_rate, args.seed + 1)
    plan = replace(plan, warmup_steps=DRAFT_WARMUP)
    text = train.text_batches(stream, plan)
    checkpoint = args.work_dir / "draft-text.pt"
    on_text = train.fit(draft, plan, text, train.text_loss, checkpoint, label="draft, text")

    batches = _mixed(args, stream, target, text)
    distil = train.distil_plan(args.distil_steps, plan, args.draft_rate)
    loss, checkpoint = train.distil_loss(target), args.work_dir / "draft-distilled.pt"
    distilled = train.fit(draft, distil, batches, loss, checkpoint, label="draft, distilled")

    overlap = train.overlap_plan(args.overlap_steps, plan, args.overlap_rate)
    loss, checkpoint = train.overlap_loss(target), args.work_dir / "draft-matched.pt"
    matched = train.fit(draft, overlap, batches, loss, checkpoint, label="draft, matched")
    train.save(draft, folder)
    return {"draft_text": on_text, "draft_distilled": distilled, "draft_matched": matched}


def _mixed(args: argparse.Namespace, stream, target, text: Batches) -> Batches:
    """Return batches of text of which a share is the target's own, sampled first."""
    pool_plan = corpus.PoolPlan(args.pool_chunks, args.pool_rows, args.length + 1, args.seed)
    pool = corpus.build_pool(target, stream, pool_plan, args.work_dir / "samples")
    return train.mixed_batches(pool, text, args.pool_share)


def _text_plan(args: argparse.Namespace, steps: int, rate: float, seed: int) -> Plan:
    half = args.precision == "bfloat16"
    return Plan(steps, args.batch_size, args.length, rate, seed=seed, half=half)


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag out of its range."""
    for name in POSITIVE:
        if getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.pool_share <= 1:
        raise ValueError(f"--pool-share must be in [0, 1], got {args.pool_share}")
    for name in ("rate", "draft_rate", "overlap_rate"):
        if not 0 < getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} must be in (0, 1), got {getattr(args, name)}")
    if not 0 < args.decay <= 1:
        raise ValueError(f"--decay must be in (0, 1], got {args.decay}")
    for flag, value in (("--seed", args.seed), ("--hold-steps", args.hold_steps)):
        if value < 0:
            raise ValueError(f"{flag} must not be negative, got {value}")
    if not args.price >= 0:
        raise ValueError(f"--price must be at least 0, got {args.price}")
    if args.drafter != "model" and args.loss == "kl":
        raise ValueError("--loss must follow kl with another, got kl")
    if args.places >= args.length:
        raise ValueError(f"--places must be below --length {args.length}, got {args.places}")
    if args.corpus is not None and not args.corpus.is_dir():
        raise ValueError(f"--corpus must be a folder, got {args.corpus}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def command_line(args: argparse.Namespace) -> str:
    """Return the command with every flag not at its default, folders left out."""
    return called_as("train-pair", add_arguments, args, FOLDERS)


def _claim(args: argparse.Namespace, corpus_sha256: str, **digests: str) -> None:
    """Refuse a work directory whose checkpoints came from other data or flags."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    # folders and threads cannot change the result
    names = [name for name in vars(parser.parse_args([])) if name not in (*FOLDERS, "threads")]
    flags = {name: getattr(args, name) for name in names}
    origin = {"corpus_sha256": corpus_sha256} | digests | flags
    path = args.work_dir / "origin.json"
    if path.exists() and (before := json.loads(path.read_text())) != origin:
        changed = sorted(k for k in origin.keys() | before.keys() if origin.get(k) != before.get(k))
        raise ValueError(f"--work-dir must hold the same run, got another {', '.join(changed)}")
    write_json(path, origin)
