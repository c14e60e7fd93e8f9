"""``cactus-theory tune``: log, solve knobs, measure costs, say which setting is fastest."""

import hashlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.significance import FEWEST_TEXTS
from cactus_theory.base.tables import print_json
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    add_nats,
    add_policy,
    check_cuts,
    given_cuts,
    refuse,
    rendering,
)
from cactus_theory.commands.models import (
    OF_MODELS,
    add_models,
    add_threads,
    choose_threads,
    decoding,
    has_models,
    opened,
)
from cactus_theory.decoding import Pair
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.divergences import read_divergence
from cactus_theory.traces import Trace
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.tuned import below_floor
from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.families import USUAL, families
from cactus_theory.tuning.knobs import checked_level
from cactus_theory.tuning.measure import (
    REPEATS,
    Prompts,
    TimedSetting,
    measure_costs,
)
from cactus_theory.tuning.report import notes, payload, save_tuned, sentence, table
from cactus_theory.tuning.tune import TUNED_WIDTHS, Measure, Tuned, tune

# flags that logged rows depend on, beside models, prompts and the largest K
LOGGED = ("cycles", "max_new_tokens", "temperature", "seed", "dtype")
# rounds that are logged: fewer where rounds times vocabulary exceed LOGGED_ENTRIES. At V = 32,000
# and K = 12 solving knobs takes 1.2 s of one core for each round, in 50 passes over their rows
CYCLES, LEAST_CYCLES, LOGGED_ENTRIES = 1000, 100, 6_400_000
FLOOR_TEXTS, FLOOR_TOKENS = 8, 32  # on which rounding is measured, and at most of each


def add_arguments(parser: ArgumentParser) -> None:
    """Describe the command line; needs no optional package."""
    add = parser.add_argument
    add_models(parser)
    add("--prompts", metavar="FILE", help=f"your traffic: {PROMPTS}")
    add_chat(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair, instead of models")
    add_nats(parser, "most that may be metered per emitted token, in the divergence's unit",
             required=True)  # fmt: skip
    add("--divergence", default=defaults.DIVERGENCE, help="what is metered (%(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="texts decoded together (1)")
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="K to try; default 1 to 12")
    add_policy(parser, f"by default {', '.join(USUAL)}; a knob without a value is solved, and "
               "lossless sampling is among them anyway")  # fmt: skip
    add("--cost-ratio", type=float, metavar="C",
        help="without models: cost of drafting a token, in steps of plain decoding")  # fmt: skip
    add("--cycles", type=int,
        help="rounds to log, of 5 texts at least (1000; fewer where V > 6,400)")  # fmt: skip
    add("--max-new-tokens", type=int, default=defaults.MAX_NEW_TOKENS, metavar="N",
        help="of a text (%(default)s)")  # fmt: skip
    add("--timings", type=int, default=REPEATS, metavar="N",
        help="timed decodes of every setting, whose median counts (%(default)s)")  # fmt: skip
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add_cuts(parser)
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    add("--work", type=Path, metavar="DIR",
        help="folder of the trace, to resume from (build/tune/NAME by what is asked)")  # fmt: skip
    add("--out", metavar="FILE.json", help="file that generate --tuned reads")
    add("--json", action="store_true", help="print one JSON object only")


WORK = Path("build/tune")  # of folders of logged rows, named by all that these depend on


def run(args: Namespace) -> int:
    """Print the table and the sentence, or JSON; return 0, 1 if every lossy policy is over."""
    cuts, level = given_cuts(args) or WHOLE, checked_level(args.nats)
    families(read_divergence(args.divergence), args.policy)
    check.whole_number("timings", args.timings, 1)
    check.whole_number("batch", args.batch, 1)
    if args.cycles is not None:
        check.whole_number("cycles", args.cycles, 1)
    if args.trace:
        refuse(args, OF_MODELS, "must not be given with --trace")
        usual = {"temperature": defaults.TEMPERATURE, "max_new_tokens": defaults.MAX_NEW_TOKENS}
        refuse(args, ("cycles", *usual), "a trace has its own", **usual)
        refuse(args, ("timings",), "must be given with --target", timings=REPEATS)
    models = has_models(args)
    if models == (args.cost_ratio is not None):
        got = "both" if models else "none"
        raise ValueError(f"--target, --cost-ratio: exactly one must be given; got {got}")
    if not models and args.trace is None:
        raise ValueError("--trace: must be given without models; got none")
    sought: dict[str, Any] = {"divergence": args.divergence, "widths": args.num_draft_tokens}
    sought |= {"policies": args.policy, "seed": args.seed}
    if args.trace is None:
        check.optional_module("transformers", "llm")
        check.optional_module("safetensors.torch", "llm")
        pair, texts, ids = opened(args, drawn=True)
        law: dict[str, Any] = {"temperature": args.temperature, "cuts": cuts}
        told = [getattr(args, name) for name in ("target", "draft", *LOGGED)]
        width = max(args.num_draft_tokens or TUNED_WIDTHS)
        told += [cuts, rendering(args), width, *(text.source for text in texts)]
        few = LOGGED_ENTRIES // pair.target.config.vocab_size
        cycles = args.cycles or min(CYCLES, max(few, LEAST_CYCLES))
        sizes = {"num_draft_tokens": width, "max_new_tokens": args.max_new_tokens}
        sizes |= {"texts": FEWEST_TEXTS, "seed": args.seed}
        named = hashlib.sha256("\0".join(map(str, told)).encode()).hexdigest()[:12]
        folder = (args.work or WORK / named) / "trace"
        trace = log_shown(pair, ids, folder, cycles, **sizes, **law)
        prompts = Prompts(ids, args.batch, args.max_new_tokens, seed=args.seed, **law)
        costs: Costs | Measure = partial(timed, pair, prompts, args.timings)
    else:
        pair = prompts = None
        choose_threads(args.threads)
        trace = Trace.open(args.trace)
        check_cuts(args, trace.header)
        costs = Costs.ratios(args.cost_ratio, batch=args.batch)
    progress = Progress("solving knobs", 1)
    tuned = tune(trace, costs, level, on_step=progress.step, **sought)
    about = {} if given_cuts(args) is None else vars(cuts)  # which the trace may not say
    if pair is not None and prompts is not None:
        about = {"dtype": pair.dtype} | _noise_floor(pair.target, prompts, tuned)
    tuned = replace(tuned, source=tuned.source | about)
    status = int(bool(tuned.over) and all(own.family.lossless for own in tuned.choices))
    if args.out:
        save_tuned(tuned, args.out)
    if args.json:
        print_json(payload(tuned))
        return status
    print("\n".join([table(tuned), "", sentence(tuned), *notes(tuned)]))
    if args.out:
        print(f"written to {args.out}; {decoding(args)} --prompt TEXT")
    return status


def timed(pair: Pair, prompts: Prompts, repeats: int, settings: Sequence[TimedSetting]) -> Costs:
    """Return the measured costs of settings, and show how far the timing is."""
    own = pair.target, pair.draft, prompts, settings
    progress = Progress("timing decodes", 1)
    return measure_costs(*own, repeats=repeats, on_decode=progress.of)


def _noise_floor(target: Any, prompts: Prompts, tuned: Tuned) -> dict[str, Any]:
    """Return the noise floor for the file; print a warning where the budget is below it."""
    if prompts.temperature == 0 or prompts.cuts != WHOLE:  # a changed token has no finite KL
        return {}
    progress = Progress("reading passes", FLOOR_TEXTS)
    most = min(FLOOR_TOKENS, prompts.max_new_tokens)
    floor = noise_floor(target, prompts.ids[:FLOOR_TEXTS], max_new_tokens=most,
                        temperature=prompts.temperature, on_text=progress.update)  # fmt: skip
    if tuned.divergence == "kl" and (warning := below_floor(tuned.level, floor.kl_per_token)):
        print(f"tune: {warning}", file=sys.stderr)
    return {"noise_floor": vars(floor)}
