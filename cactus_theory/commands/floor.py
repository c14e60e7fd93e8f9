"""``cactus-theory floor``: how far rounding moves a target's rows: less means little.

That is KL in nats a token: rows of passes over K + 1 tokens from those of passes over one.
"""

import sys
from argparse import ArgumentParser, Namespace

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.tables import print_json, print_table
from cactus_theory.base.terminal import Progress, one_line
from cactus_theory.commands.flags import PROMPTS, add_chat, flag, given_prompts, rendered_ids
from cactus_theory.commands.models import add_models, add_threads, loaded
from cactus_theory.traces.noise_floor import noise_floor

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: ArgumentParser) -> None:
    """Describe the command line; needs no optional package."""
    add = parser.add_argument
    add_models(parser, required=True, drafted=False)
    add("--prompts", metavar="FILE", required=True, help=PROMPTS)
    add_chat(parser)
    add("--dtypes", nargs="+", choices=DTYPES, help="one line for each of these (--dtype)")
    add("--num-draft-tokens", type=int, default=defaults.NUM_DRAFT_TOKENS, metavar="K",
        help="a pass is over K + 1 (%(default)s)")  # fmt: skip
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add("--texts", type=int, default=32, metavar="N", help="at most so many texts (32)")
    add("--max-new-tokens", type=int, default=defaults.MAX_NEW_TOKENS, metavar="N",
        help="of a text (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    add("--json", action="store_true", help="print one JSON object only")


def run(args: Namespace) -> int:
    """Print the table, or JSON; a dtype that does not run here is named; return 0."""
    for name in ("num_draft_tokens", "texts", "max_new_tokens"):
        check.whole_number(flag(name), getattr(args, name), 1)
    texts, floors, ids = given_prompts(args)[: args.texts], [], []
    for name in args.dtypes or [args.dtype]:
        pair = loaded(args, dtype=name)
        ids = ids or rendered_ids(args, pair.tokenizer, texts)  # said once
        with Progress(f"reading passes, {name}", len(texts)) as progress:
            try:
                floor = noise_floor(
                    pair.target,
                    ids,
                    width=args.num_draft_tokens + 1,
                    max_new_tokens=args.max_new_tokens,
                    temperature=args.temperature,
                    seed=args.seed,
                    on_text=progress.update,
                )
            except RuntimeError as error:  # a dtype that the device lacks
                print(f"{name} does not run here: {one_line(error)}", file=sys.stderr)
                continue
        floors.append(vars(floor))
    if not floors:
        raise RuntimeError("--dtypes: none of them runs here")
    if args.json:
        return print_json({"floors": floors})
    number = "{kl_per_token:.3g} ±{standard_error:.1g}"
    cells = [[own["dtype"], number.format(**own), str(own["rows"])] for own in floors]
    print_table(["dtype", "KL a token (nats)", "rows"], cells, (0,))
    print(f"the target's rows of passes over {args.num_draft_tokens + 1} tokens against passes "
          "over one, on this machine: a smaller budget is less than rounding")  # fmt: skip
    return 0
