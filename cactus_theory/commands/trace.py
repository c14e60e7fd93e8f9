"""``cactus-theory trace``: log all rows of a pair along texts drawn from the target.

Prompts are taken in a random order from --seed. The folder of --out is written text by text.
If a run was killed, the same command goes on after the last complete text; its --cycles may be
fewer than before. A cycle takes (2 K + 1) · V · 2 bytes, 70 KB at K = 8 and V = 2,048. With --cut a
row takes at most about 16 KB, whatever V is. Compare policies on the folder with
``cactus-theory compare FOLDER --policy SPEC``.
"""

import argparse
from pathlib import Path

from cactus_theory.base import defaults
from cactus_theory.base.names import MODES
from cactus_theory.commands.flags import PROMPTS, add_chat, add_cuts, add_models, add_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_models(parser, required=True)
    add("--prompts", required=True, metavar="FILE", help=PROMPTS)
    add_chat(parser)
    add("--draft-mode", choices=MODES, default=MODES[0], help="how to draft (%(default)s)")
    add("--num-draft-tokens", type=int, default=8, metavar="K")
    add("--cycles", type=int, default=1300, help="rounds to log, at least: texts are not cut")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of a text")
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add_cuts(parser)
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    cut = "store the likeliest tokens of a row, and the rest in cells of alike probabilities"
    add("--cut", action="store_true", help=f"{cut}: a trace to hand around")
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    add("--out", type=Path, default=Path("build/trace"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Log the rounds, and print how many rounds and bytes were logged."""
    from cactus_theory.commands.inputs import given_cuts
    from cactus_theory.commands.models import opened
    from cactus_theory.decoding.drafters import drafter_by
    from cactus_theory.decoding.truncation import Cuts
    from cactus_theory.traces.log import log_shown

    if args.draft is None:
        raise ValueError("--draft: must be given; got none")
    pair, _, ids = opened(args, drawn=True)
    trace = log_shown(
        pair,
        ids,
        args.out,
        args.cycles,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        draft_model=drafter_by(args.draft_mode, pair.draft),
        num_draft_tokens=args.num_draft_tokens,
        temperature=args.temperature,
        cuts=given_cuts(args) or Cuts(),
        eos_token_ids=args.eos_token_ids,
        cut=args.cut,
    )
    size = sum(entry.bytes for entry in trace.manifest.shards) / 1e6
    print(
        f"{args.out}: {len(trace)} cycles of {trace.texts} texts, K = {args.num_draft_tokens}, "
        f"V = {trace.header.vocab_size}, {size:.1f} MB"
    )
    if trace.texts < len(ids):
        print(
            f"{len(ids) - trace.texts} of {len(ids)} prompts were not reached: --cycles logs more"
        )
    return 0
