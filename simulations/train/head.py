"""An EAGLE-3 head for any Llama-like target, on texts that the target writes itself.

The stages are: pieces of texts with the target's states, the draft vocabulary, training on the
first place by KL, on all places by KL, on all places by total variation, report. Files in
--work-dir let every stage be resumed or skipped; a resumed run ends with the same bits.
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

from cactus_theory.commands.flags import PROMPTS, add_chat, add_models, given_prompts, rendered_ids
from cactus_theory.commands.models import choose_threads
from cactus_theory.decoding.drafters.eagle3 import Eagle3Drafter
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.load import Pair, dtype_rule, load_pair
from cactus_theory.decoding.models.recognised import obstacle
from cactus_theory.decoding.options import own_ends

from ..common.inputs import (
    Numbers,
    add_numbers,
    check_numbers,
    digest,
    folder_digest,
    model_digest,
)
from ..common.journal import Journal
from . import corpus, eagle3, report
from .eagle3 import Batch, Unrolled, rows_of
from .fit import Plan, fit
from .samples import SampledTexts, Source, Turn, own_prompts, written

FLAGS: Numbers = {
    "draft_vocab": (8192, "tokens that the head scores: those that the texts hold most often"),
    "pieces": (25, "files of texts that the target writes"),
    "piece_texts": (160, "texts of a piece, written together"),
    "prompt_tokens": (64, "most tokens of a user's turn that the target writes"),
    "answer_tokens": (192, "most tokens that follow"),
    "places": (5, "steps that training unrolls, tokens that the head learns to draft in a row"),
    "anchors": (48, "units of a text from which a training step drafts the later places"),
    "first_steps": (600, "training steps on the first place alone, by KL"),
    "steps": (1200, "steps on all places, by KL"),
    "overlap_steps": (200, "steps on all places, by total variation"),
    "batch_size": (12, "texts of a training step"),
    "rate": (1e-3, "peak learning rate"),
    "held_out": (0.05, "share of prompts or documents whose texts are only scored, by the seed"),
    "seed": (0, ""),
}
# tokens per text that are sampled to estimate the time of all texts
PROBED = 8
# stage → (flag of its steps, share of the peak rate, share of steps with a falling rate, by KL?)
STAGES = {
    "first": ("first_steps", 1.0, 0.3, True),
    "all": ("steps", 1.0, 0.5, True),
    "overlap": ("overlap_steps", 0.3, 1.0, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, required=True, drafted=False)
    add = parser.add_argument
    text = f"prompts for the target ({PROMPTS}); without, it writes its own"
    add("--prompts", type=Path, metavar="FILE", help=text)
    add_chat(parser)
    add("--corpus", type=Path, help=f"or texts for it to continue from: {', '.join(corpus.KINDS)}")
    add("--init", type=Path, metavar="FOLDER", help="a head to go on from, with its vocabulary")
    add("--work-dir", type=Path, default=Path("build/train-head"), help="pieces and checkpoints")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--threads", type=int, help="of torch (1 for a small target, else one a core)")
    add_numbers(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    check_numbers(args, FLAGS)
    if args.corpus is not None and args.prompts is not None:
        raise ValueError(f"--corpus: must not be given with --prompts; got {args.corpus}")
    if args.places + 2 > args.answer_tokens:
        raise ValueError(f"--places: must be at most --answer-tokens − 2; got {args.places}")
    if args.device != "cpu":
        raise ValueError(f"--device: must be cpu, where heads are trained; got {args.device}")
    disable_progress_bar()
    pair = load_pair(args.target, None, args.device, args.dtype,
                     revision=(args.revision or [None])[0], trust_code=args.trust_code)  # fmt: skip
    target = pair.target.requires_grad_(False)
    if (reason := obstacle(target, 1)) is not None:
        raise ValueError(f"--target: must be a Llama-like model of full weights; {reason}")
    choose_threads(args.threads, target)
    seen, unseen = sources(args, pair)
    with Journal(args.work_dir / "journal.jsonl", _settings(args, seen, unseen)):
        reads = eagle3.reads_of(target)
        states = (*reads, target.config.num_hidden_layers)
        say_costs(args, target, seen, states)
        embedding = target.get_input_embeddings().weight.detach()
        paths = seen.pieces(
            target, args.work_dir / "seen", args.pieces, args.piece_texts, states, args.seed
        )
        texts, folder = SampledTexts(paths, embedding), args.work_dir / "unseen"
        paths = unseen.pieces(target, folder, 1, args.piece_texts, states, args.seed + 1)
        scored = SampledTexts(paths, embedding)
        own = start(args, target, texts, reads)
        outcomes, finished = taught(args, own, target, texts), args.work_dir / "head"
        name = str(args.target.resolve() if isinstance(args.target, Path) else args.target)
        eagle3.write(own, finished, target, name, args.places)
        measured = report.measure_head(args, finished, target, texts, scored)
        report.publish(args, finished, measured | {"training": outcomes})
    return 0


def sources(args: argparse.Namespace, pair: Pair) -> tuple[Source, Source]:
    """Return the sources of the training texts and of the held-out texts."""
    tokenizer, ends = pair.tokenizer, frozenset(own_ends(pair.target))
    answer = Turn(args.answer_tokens, ends)
    if args.corpus is not None:
        parts = corpus.read_corpus(args.corpus, args.held_out, args.seed)
        beginnings = [corpus.beginnings(tokenizer, part) for part in parts]
    elif args.prompts is not None:
        ids = rendered_ids(args, tokenizer, given_prompts(args))
        numbers = map(str, range(len(ids)))
        beginnings = corpus.parted("--prompts", ids, numbers, args.held_out, args.seed)
    else:
        own = own_prompts(tokenizer, ends, args.prompt_tokens, args.answer_tokens)
        return own, own
    seen, unseen = (Source(part, [answer]) for part in beginnings)
    return seen, unseen


def say_costs(args: argparse.Namespace, target: Any, seen: Source, reads: Sequence[int]) -> None:
    """Print an estimate of the texts' time and disk space to stderr, from a few tokens."""
    few, began = Turn(PROBED, frozenset()), time.monotonic()
    beginnings = [seen.beginnings[0]] * args.piece_texts
    piece = written(target, beginnings, few, reads, Generator().manual_seed(0))
    speed = PROBED * args.piece_texts / (time.monotonic() - began)
    tokens = args.pieces * args.piece_texts * sum(turn.most for turn in seen.turns)
    size = len(reads) * piece.states[0, 0].nbytes / 1e9  # GB per token
    print(
        f"texts: at most {tokens:,} tokens, {tokens / speed / 3600:.2g} hours at {speed:.0f} a "
        f"second, {tokens * size:.2g} GB on disk, {tokens / args.pieces * size:.2g} GB at a time",
        file=sys.stderr,
    )


def start(
    args: argparse.Namespace, target: Any, texts: SampledTexts, reads: Sequence[int]
) -> Eagle3Head:
    if args.init is not None:
        own = Eagle3Head.load(args.init)
        Eagle3Drafter(own).check(target)
        if tuple(own.layers(target)) != tuple(reads) or not own.shares:
            raise ValueError(f"--init: must be a head that this command made; got {args.init}")
        return own.requires_grad_(True)
    ids = (piece.ids for piece in texts.pieces)
    kept = eagle3.draft_vocabulary(ids, args.draft_vocab, target.config.vocab_size)
    return eagle3.build(target, kept, reads, args.seed)


def taught(
    args: argparse.Namespace, own: Eagle3Head, target: Any, texts: SampledTexts
) -> dict[str, Any]:
    student, rows = Unrolled(own), rows_of(target, own.ids)
    outcomes = {}
    for seed, (name, (steps, share, decay, by_kl)) in enumerate(STAGES.items(), args.seed):
        sizes = getattr(args, steps), args.batch_size, texts.rows
        plan = Plan(*sizes, share * args.rate, 50, decay, 0.01, seed)
        places, checkpoint = 1 if name == "first" else args.places, args.work_dir / f"{name}.pt"

        def loss(model: Unrolled, batch: Batch, places=places, by_kl=by_kl) -> torch.Tensor:
            total, _, counts = model(batch, rows, places, by_kl)
            return total / counts[0]

        batches = texts.shuffled(args.batch_size, args.anchors, plan.seed)
        outcomes[name] = fit(student, plan, batches, loss, checkpoint)
    own.eval()
    return outcomes


def _settings(args: argparse.Namespace, seen: Source, unseen: Source) -> dict[str, Any]:
    """Return all settings that a result depends on; folders and threads are not among them."""
    return {
        **{name: getattr(args, name) for name in FLAGS},
        "dtype": dtype_rule(args.dtype, args.device),
        "target": model_digest(args.target, (args.revision or [None])[0]),
        "texts": digest(json.dumps([seen.beginnings, unseen.beginnings]).encode()),
        "init": None if args.init is None else folder_digest(args.init),
    }
