"""An EAGLE-3 head for any Llama-like target, on texts that the target writes itself.

In stages: pieces of texts with the target's states, the draft vocabulary, places one after the
other by KL, all places by KL, all places by total variation, report. Every stage is resumed or
skipped by its files in --work-dir, and a run that was killed ends with the same bits.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator
from transformers.utils.logging import disable_progress_bar

from cactus_theory.commands.flags import PROMPTS, add_chat, flag, given_prompts, rendered_ids
from cactus_theory.commands.models import add_models, choose_threads
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.load import Pair, dtype_rule, load_pair
from cactus_theory.decoding.models.recognised import obstacle

from ..common.inputs import at_least, digest, folder_digest, model_digest
from . import corpus, eagle3, report
from .batches import Texts, embedding_of
from .fit import Plan, fit
from .samples import Source, Turn, own_prompts, written
from .unroll import Batch, Unrolled, rows_of

# flag → default, help
FLAGS: dict[str, tuple[Any, str]] = {
    "draft_vocab": (8192, "tokens that the head scores: those that the texts hold most often"),
    "pieces": (25, "files of texts that the target writes"),
    "piece_texts": (160, "texts of a piece, written together"),
    "prompt_tokens": (64, "most tokens of a user's turn that the target writes"),
    "answer_tokens": (192, "most tokens that follow"),
    "places": (5, "tokens after one another that the head learns to draft"),
    "anchors": (48, "units of a text from which a training step drafts the later places"),
    "first_steps": (600, "training steps on the first place alone, by KL"),
    "steps": (1200, "steps on all places, by KL"),
    "overlap_steps": (200, "steps on all places, by total variation"),
    "batch_size": (12, "texts of a training step"),
    "rate": (1e-3, "peak learning rate"),
    "held_out": (0.05, "share of prompts or documents whose texts are only scored, by the seed"),
    "seed": (0, ""),
}
FREE = ("rate", "held_out", "seed")
# stage: share of the peak rate, of the steps over which it falls, and whether KL is learned
# tokens a text that are written to learn what all take
PROBED = 8
STAGES = {"first": (1.0, 0.3, True), "all": (1.0, 0.5, True), "overlap": (0.3, 1.0, False)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_models(parser, required=True, drafted=False)
    add = parser.add_argument
    add("--prompts", type=Path, metavar="FILE",
        help=f"that the target answers ({PROMPTS}); without, it writes its own")  # fmt: skip
    add_chat(parser)
    add("--corpus", type=Path,
        help=f"or texts whose beginnings it continues: {', '.join(corpus.KINDS)}")  # fmt: skip
    add("--init", type=Path, metavar="FOLDER", help="a head to go on from, with its vocabulary")
    add("--work-dir", type=Path, default=Path("build/train-head"), help="pieces and checkpoints")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--threads", type=int, help="of torch (1 for a small target, else one a core)")
    for name, (default, words) in FLAGS.items():
        add(flag(name), type=type(default), default=default, help=words or None)


def run(args: argparse.Namespace) -> int:
    """Write texts, train, measure and ship; return 0."""
    check_flags(args)
    disable_progress_bar()
    pair = load_pair(args.target, None, args.device, args.dtype,
                     revision=(args.revision or [None])[0], trust_code=args.trust_code)  # fmt: skip
    target = pair.target.requires_grad_(False)
    if (reason := obstacle(target, 1)) is not None:
        raise ValueError(f"--target: must be a Llama-like model of full weights; {reason}")
    choose_threads(args.threads, target)
    seen, unseen = sources(args, pair)
    with report.held(args, _settings(args, seen, unseen)):
        reads = eagle3.reads_of(target)
        states = (*reads, target.config.num_hidden_layers)
        say_costs(args, target, seen, states)
        paths = seen.pieces(
            target, args.work_dir / "seen", args.pieces, args.piece_texts, states, args.seed
        )
        scored = unseen.pieces(target, args.work_dir / "unseen", 1, args.piece_texts, states,
                               args.seed + 1)  # fmt: skip
        texts = Texts(paths, embedding_of(target))
        own = start(args, target, texts, reads)
        outcomes = taught(args, own, target, texts)
        finished = args.work_dir / "head"
        name = args.target.name if isinstance(args.target, Path) else args.target
        eagle3.write(own, finished, target, name, args.places)
        measured = report.measure_head(args, finished, target, Texts(scored, texts.embedding))
        made = {"training": outcomes} | report.target_of(args, target, texts)
        report.publish(args, finished, measured | made)
    return 0


def sources(args: argparse.Namespace, pair: Pair) -> tuple[Source, Source]:
    """Return where texts begin: those that are learned from, and those that are only scored."""
    target, tokenizer = pair.target, pair.tokenizer
    ends = target.generation_config.eos_token_id
    ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    answer = Turn(args.answer_tokens, ends)
    if args.corpus is not None:
        documents = corpus.read_corpus(args.corpus, args.held_out, args.seed)
        parts = corpus.training(documents), corpus.held_out(documents)
        beginnings = [corpus.beginnings(tokenizer, part) for part in parts]
    elif args.prompts is not None:
        ids = rendered_ids(args, tokenizer, given_prompts(args))
        held = [corpus.is_held_out(str(at), args.held_out, args.seed) for at in range(len(ids))]
        beginnings = [[own for own, unseen in zip(ids, held, strict=True) if unseen == part]
                      for part in (False, True)]  # fmt: skip
        for name, part in zip(("learned from", "held out"), beginnings, strict=True):
            if not part:
                raise ValueError(f"--prompts: must hold one that is {name}; got {len(ids)} lines")
    else:
        own = own_prompts(tokenizer, ends, args.prompt_tokens, args.answer_tokens)
        return own, own
    return Source(beginnings[0], [answer]), Source(beginnings[1], [answer])


def say_costs(args: argparse.Namespace, target: Any, seen: Source, reads: Sequence[int]) -> None:
    """Say on stderr what the texts will take, measured on a few tokens of them."""
    few, began = [Turn(PROBED, frozenset())], time.monotonic()
    beginnings = [seen.beginnings[0]] * args.piece_texts
    piece = written(target, beginnings, few, reads, Generator().manual_seed(0))
    speed = PROBED * args.piece_texts / (time.monotonic() - began)
    tokens = args.pieces * args.piece_texts * sum(turn.most for turn in seen.turns)
    size = len(reads) * piece.states[0, 0].nbytes / 1e9  # of a token
    print(
        f"texts: at most {tokens:,} tokens, {tokens / speed / 3600:.2g} hours at {speed:.0f} a "
        f"second, {tokens * size:.2g} GB on disk, {tokens / args.pieces * size:.2g} GB at a time",
        file=sys.stderr,
    )


def start(args: argparse.Namespace, target: Any, texts: Texts, reads: Sequence[int]) -> Eagle3Head:
    """Return the head that training begins with."""
    if args.init is not None:
        own = Eagle3Head.load(args.init)
        own.check(target)
        if tuple(own.layers(target)) != tuple(reads) or not own.shares:
            raise ValueError(f"--init: must be a head that this command made; got {args.init}")
        return own.requires_grad_(True)
    ids = (piece.ids for piece in texts.pieces)
    kept = eagle3.draft_vocabulary(ids, args.draft_vocab, target.config.vocab_size)
    return eagle3.build(target, kept, reads, args.seed)


def taught(args: argparse.Namespace, own: Eagle3Head, target: Any, texts: Texts) -> dict[str, Any]:
    """Fit a head in stages; return what each took."""
    student, rows = Unrolled(own), rows_of(target, own.ids)
    numbers = (args.first_steps, args.steps, args.overlap_steps)
    outcomes = {}
    for seed, (name, steps) in enumerate(zip(STAGES, numbers, strict=True)):
        share, decay, by_kl = STAGES[name]
        plan = Plan(
            steps, args.batch_size, texts.rows, share * args.rate, 50, decay, 0.01, args.seed + seed
        )
        places, checkpoint = 1 if name == "first" else args.places, args.work_dir / f"{name}.pt"

        def loss(model: Unrolled, batch: Batch, places=places, by_kl=by_kl) -> torch.Tensor:
            total, _, counts = model(batch, rows, places, by_kl)
            return total / counts[0]

        batches = texts.shuffled(args.batch_size, args.anchors, plan.seed)
        outcomes[name] = fit(student, plan, batches, loss, checkpoint, label=name)
    own.eval()
    return outcomes


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag out of its range, or two that name texts."""
    at_least(args, **{name: 1 for name in FLAGS if name not in FREE}, seed=0)
    if args.corpus is not None and args.prompts is not None:
        raise ValueError(f"--corpus: must not be given with --prompts; got {args.corpus}")
    for name, low, high in (("rate", 0, 1), ("held_out", 0, 1)):
        if not low < (value := getattr(args, name)) < high:
            raise ValueError(f"{flag(name)}: must be in (0, 1); got {value}")
    if args.places + 2 > args.answer_tokens:
        raise ValueError(f"--places: must be at most --answer-tokens − 2; got {args.places}")
    if args.device != "cpu":
        raise ValueError(f"--device: must be cpu, where heads are trained; got {args.device}")


def _settings(args: argparse.Namespace, seen: Source, unseen: Source) -> dict[str, Any]:
    """Return all that decides a result: folders and threads cannot change it."""
    texts = json.dumps([seen.beginnings, unseen.beginnings]).encode()
    return {
        **{name: getattr(args, name) for name in FLAGS},
        "dtype": dtype_rule(args.dtype, args.device),
        "target": model_digest(args.target, (args.revision or [None])[0]),
        "texts": digest(texts),
        "init": None if args.init is None else folder_digest(args.init),
    }
