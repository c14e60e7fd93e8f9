"""``cactus-theory tune``: log, solve knobs, measure costs, say which setting is fastest."""

import hashlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
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
    add_models,
    add_nats,
    add_policy,
    add_regret,
    add_threads,
    add_undrafted,
    refuse,
    rendering,
)
from cactus_theory.commands.inputs import check_cuts, given_cuts
from cactus_theory.commands.models import OF_MODELS, choose_threads, decoding, has_models, opened
from cactus_theory.decoding import Pair
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.divergences import read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.traces import Trace
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.tuned import below_floor
from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.families import USUAL, families
from cactus_theory.tuning.knobs import charged_in, checked_level
from cactus_theory.tuning.measure import REPEATS, Kind, Prompts, measure_costs
from cactus_theory.tuning.report import notes, payload, save_tuned, sentence, table
from cactus_theory.tuning.tune import TUNED_WIDTHS, Measure, Tuned, tune

# flags that the logged rows depend on, beside the prompts and the setting
LOGGED = ("target", "draft", "cycles", "max_new_tokens", "seed", "dtype")
# default rounds to log: CYCLES, but fewer (at least LEAST_CYCLES) if rounds times vocabulary would
# exceed LOGGED_ENTRIES. At V = 32,000 and K = 12, solving the knobs takes 1.2 s of one core for
# each round, in 50 passes over the rows
CYCLES, LEAST_CYCLES, LOGGED_ENTRIES = 1000, 100, 6_400_000
# texts, and most tokens of each, on which the rounding of the target's rows is measured
FLOOR_TEXTS, FLOOR_TOKENS = 8, 32


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags; needs no optional package."""
    add = parser.add_argument
    add_models(parser)
    add("--prompts", metavar="FILE", help=f"your traffic: {PROMPTS}")
    add_chat(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair, instead of models")
    add_nats(parser, "most that may be metered per emitted token, in the divergence's unit")
    add_regret(parser, "at temperature 0, instead: most nats of regret per emitted token")
    add("--divergence", default=defaults.DIVERGENCE, help="what is metered (%(default)s)")
    add("--surprise", type=float, metavar="NATS",
        help="also: most that emitted tokens may be less likely than the target's (0: no less); "
             "policies with a tilt get the least one that keeps it")  # fmt: skip
    add("--batch", type=int, default=1, metavar="B", help="texts decoded together (1)")
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="K to try; default 1 to 12")
    text = f"by default {', '.join(USUAL)}; a knob without a value is solved"
    add_policy(parser, f"{text}, and lossless sampling is among them anyway")
    add_undrafted(parser)
    text = "without models: cost of drafting a token, in steps of plain decoding"
    add("--cost-ratio", type=float, metavar="C", help=text)
    text = "rounds to log, of 5 texts at least (1000; fewer where V > 6,400)"
    add("--cycles", type=int, help=text)
    usual = defaults.MAX_NEW_TOKENS
    add("--max-new-tokens", type=int, default=usual, metavar="N", help="of a text (%(default)s)")
    text = "timed decodes of every setting, whose median counts (%(default)s)"
    add("--timings", type=int, default=REPEATS, metavar="N", help=text)
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add_cuts(parser)
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    text = "folder of the trace, to resume from (build/tune/NAME by what is asked)"
    add("--work", type=Path, metavar="DIR", help=text)
    add("--out", metavar="FILE.json", help="file that generate --tuned reads")
    add("--json", action="store_true", help="print one JSON object only")


WORK = Path("build/tune")  # default parent of trace folders, which are named by a digest of flags


def run(args: Namespace) -> int:
    """Print the result or JSON; return 1 if every lossy policy exceeds the budget, else 0."""
    check_asked(args)
    width, cuts = max(args.num_draft_tokens or TUNED_WIDTHS), given_cuts(args)
    sought = {"level": metered(args.nats, args.regret), "widths": args.num_draft_tokens}
    sought |= {
        name: getattr(args, name) for name in ("divergence", "undrafted", "surprise", "seed")
    }
    sought["policies"] = args.policy
    if args.trace is None:
        pair, texts, ids = opened(args, drawn=True)
        setting = Setting(num_draft_tokens=width, temperature=args.temperature, cuts=cuts or WHOLE)
        prompts = Prompts(ids, args.batch, args.max_new_tokens, args.seed)
        flags = (getattr(args, name) for name in LOGGED)
        name = digest(*flags, rendering(args), setting, *(text.source for text in texts))
        folder = args.work or WORK / name
        trace = logged(pair, prompts, setting, folder / "trace", args.cycles)
        tuned = tune_shown(trace, partial(timed, pair, prompts, args.timings), sought)
        about = {"dtype": pair.dtype} | _noise_floor(pair.target, prompts, setting, tuned)
    else:
        choose_threads(args.threads)
        trace, about = Trace.open(args.trace), {} if cuts is None else vars(cuts)
        charged_in(trace, args.divergence, "nats" if args.regret is None else "regret")
        check_cuts(args, trace.header)
        tuned = tune_shown(trace, Costs.ratios(args.cost_ratio, batch=args.batch), sought)
    tuned = replace(tuned, source=tuned.source | about)
    show(tuned, args.out, None if args.json else decoding(args))
    return int(bool(tuned.over) and all(choice.family.lossless for choice in tuned.choices))


def check_asked(args: Namespace) -> None:
    """Raise an error, before any work, for flags that are wrong or contradict each other."""
    metered(args.nats, args.regret)
    families(REGRET if args.nats is None else read_divergence(args.divergence), args.policy)
    if args.nats is None:
        rule, usual = "must not be given with --regret", defaults.DIVERGENCE
        refuse(args, ("divergence", "surprise"), rule, divergence=usual)
    if not args.trace and (args.temperature == 0) is (args.regret is None):
        rule = "at temperature 0 --regret must be given, above it --nats"
        raise ValueError(f"--temperature: {rule}; got {args.temperature:g}")
    for name in ("timings", "batch", "cycles"):
        if (count := getattr(args, name)) is not None:
            check.whole_number(name, count, 1)
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
    if models:
        check.optional_module("transformers", "llm")
        check.optional_module("safetensors.torch", "llm")


def metered(nats: float | None, regret: float | None) -> float:
    """Return the budget in nats per emitted token; ValueError unless exactly one flag is given."""
    name = check.the_only_one(**{"--nats": nats, "--regret": regret})
    return checked_level(nats if regret is None else regret, name)  # type: ignore[arg-type]


def digest(*told: Any) -> str:
    """Return twelve hexadecimal digits of a hash of the values that logged rows depend on."""
    return hashlib.sha256("\0".join(map(str, told)).encode()).hexdigest()[:12]


def logged(
    pair: Pair, prompts: Prompts, setting: Setting, folder: Path, cycles: int | None
) -> Trace:
    """Log or resume the trace of a setting; without ``cycles``, a larger V gives fewer rounds."""
    few = LOGGED_ENTRIES // pair.target.config.vocab_size
    return log_shown(
        pair, prompts.ids, folder, cycles or min(CYCLES, max(few, LEAST_CYCLES)), **vars(setting),
        max_new_tokens=prompts.max_new_tokens, texts=FEWEST_TEXTS, seed=prompts.seed,
    )  # fmt: skip


def tune_shown(trace: Trace, costs: Costs | Measure, sought: Mapping[str, Any]) -> Tuned:
    """Run :func:`cactus_theory.tuning.tune` on a trace and show its progress."""
    return tune(trace, costs, on_step=Progress("solving knobs", 1).step, **sought)


def show(tuned: Tuned, out: str | None, decoding: str | None) -> None:
    """Write the tuned setting to ``out``, if given, and print the result.

    ``decoding`` is the ``generate`` command to print with it; if None, JSON is printed instead.
    """
    if out:
        save_tuned(tuned, out)
    if decoding is None:
        print_json(payload(tuned))
        return
    print("\n".join([table(tuned), "", sentence(tuned), *notes(tuned)]))
    if out:
        print(f"written to {out}; {decoding} --prompt TEXT")


def timed(pair: Pair, prompts: Prompts, repeats: int, settings: Sequence[Kind]) -> Costs:
    """Measure the costs of settings by timed decodes, and show the progress."""
    progress, models = Progress("timing decodes", 1), (pair.target, pair.draft)
    return measure_costs(*models, prompts, settings, repeats=repeats, on_decode=progress.of)


def _noise_floor(target: Any, prompts: Prompts, setting: Setting, tuned: Tuned) -> dict[str, Any]:
    """Return the noise floor, for the result's file; print a warning if the budget is below it.

    The noise floor is the divergence that rounding alone causes between the rows of a target call
    over K + 1 tokens and of calls over single tokens.
    """
    if setting.cuts != WHOLE:  # where rounding moves a token across a cut, KL is infinite
        return {}
    progress = Progress("reading passes", FLOOR_TEXTS)
    most = min(FLOOR_TOKENS, prompts.max_new_tokens)
    floor = noise_floor(target, prompts.ids[:FLOOR_TEXTS], max_new_tokens=most,
                        temperature=setting.temperature, on_text=progress.update)  # fmt: skip
    in_one_unit = tuned.divergence == floor.divergence
    if in_one_unit and (warning := below_floor(tuned.level, floor.per_token)):
        print(f"tune: {warning}", file=sys.stderr)
    return {"noise_floor": vars(floor)}
