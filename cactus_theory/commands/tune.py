"""``cactus-theory tune``: log, solve knobs, measure costs, say which setting is fastest."""

import hashlib
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.arguments import whole_number
from cactus_theory.base.prompts import Prompt
from cactus_theory.base.tables import print_json
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    check_cuts,
    flag,
    given_cuts,
    rendering,
)
from cactus_theory.commands.models import (
    add_models,
    add_threads,
    choose_threads,
    has_models,
    opened,
)
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.traces import Trace
from cactus_theory.traces.log import check_weights, log_shown
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.tuned import below_floor
from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.families import OTHERS, USUAL, checked_level, families
from cactus_theory.tuning.measure import (
    REPEATS,
    Prompts,
    TimedSetting,
    measure_costs,
    measure_lengths,
)
from cactus_theory.tuning.report import notes, payload, save_tuned, sentence, table
from cactus_theory.tuning.tune import tune

# flags that logged rows depend on, beside models, prompts and the largest K
LOGGED = ("cycles", "max_new_tokens", "temperature", "seed", "dtype", "by")
# rounds that are logged: fewer where rounds times vocabulary exceed LOGGED_ENTRIES. At V = 32,000
# and K = 12 solving knobs takes 1.2 s of one core for each round, in 50 passes over their rows
CYCLES, LEAST_CYCLES, LOGGED_ENTRIES = 1000, 100, 6_400_000
COSTS = ("target", "cost_ratio", "costs")  # flags that give the costs of calls
# largest share of the limit that timed texts may have on average for lengths to be compared: above,
# they tell of the limit, and no policy can make them longer by more than the twentieth that is left
CUT_OFF = 0.95
FLOOR_TEXTS, FLOOR_TOKENS = 8, 32  # on which rounding is measured, and at most of each


def add_arguments(parser: ArgumentParser) -> None:
    """Describe the command line; needs no optional package."""
    add = parser.add_argument
    add_models(parser)
    add("--prompts", metavar="FILE", help=f"your traffic: {PROMPTS}")
    add_chat(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair; with models, use it, do not log")
    add("--divergence-per-token", type=float, required=True, metavar="NATS",
        help="most that may be metered per emitted token, in the divergence's unit")  # fmt: skip
    add("--divergence", default=defaults.DIVERGENCE, help="what is metered (%(default)s)")
    add("--batch", type=int, nargs="+", default=[1], metavar="B",
        help="texts decoded together; tuned for the first, a line for each other")  # fmt: skip
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="K to try; default 1 to 12")
    add("--policies", nargs="+", metavar="NAME",
        help=f"families ({', '.join((*USUAL, *OTHERS))}) or whole specs; lossless is among them "
        "anyway")  # fmt: skip
    add("--cost-ratio", type=float, metavar="C",
        help="without models: a drafted token, in steps of plain decoding")  # fmt: skip
    add(
        "--costs",
        metavar="FILE",
        help="without models: costs measured before, in a file that --out wrote",
    )
    add("--cycles", type=int,
        help="rounds to log, of 5 texts at least (1000; fewer where V > 6,400)")  # fmt: skip
    add("--max-new-tokens", type=int, default=defaults.MAX_NEW_TOKENS, metavar="N",
        help="of a text (%(default)s)")  # fmt: skip
    add("--timings", type=int, default=REPEATS, metavar="N",
        help="timed decodes of every setting, whose median counts (%(default)s)")  # fmt: skip
    add("--answers", type=int, default=400, metavar="N",
        help="decoded by the two fastest settings and a lossless one where texts end before the "
        "limit (their mean is below 0.95 of it), to compare their lengths (400)")  # fmt: skip
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add_cuts(parser)
    add("--seed", type=int, default=defaults.SEED)
    add("--by", metavar="COLUMN", help="draw halves of the texts with as many of each value of "
        "this column of the prompts")  # fmt: skip
    add_threads(parser)
    add("--work", type=Path, metavar="DIR",
        help="keep the trace there, and resume (build/tune/NAME, by what is asked)")  # fmt: skip
    add("--out", metavar="FILE.json", help="for generate --tuned")
    add("--json", action="store_true", help="print one JSON object only")


# message about the results that an interrupted command has kept
KEPT = "texts logged so far are kept in --work: the same command goes on from there"
WORK = Path("build/tune")


def run(args: Namespace) -> int:
    """Print the table and the sentence, or JSON; return 0."""
    _check(args)
    if args.target is None:
        choose_threads(args)
    with TemporaryDirectory(prefix="tune-") as folder:
        if args.target is None or args.trace is not None:  # nothing is logged
            args.work = args.work or Path(folder)
        tuned, *others = _tuned(args)
        if args.out:
            save_tuned(tuned, args.out, others)
    if args.json:
        return print_json(payload(tuned, others))
    print("\n".join([table(tuned), "", sentence(tuned), *notes(tuned, others)]))
    if args.out:
        print(f"written to {args.out}; cactus-theory generate --tuned {args.out}")
    return 0


def _check(args: Namespace) -> None:
    """Raise ValueError for bad arguments before the models are loaded."""
    args.cuts = given_cuts(args) or WHOLE
    checked_level(args.divergence_per_token)
    families(find_divergence(args.divergence), args.policies)
    whole_number("answers", args.answers, 0)
    whole_number("timings", args.timings, 1)
    if min(args.batch) < 1 or len(set(args.batch)) < len(args.batch):
        got = " ".join(map(str, args.batch))
        raise ValueError(f"--batch: must be at least 1, each size once; got {got}")
    if args.cost_ratio is not None and len(args.batch) > 1:
        raise ValueError("--batch: must be one with --cost-ratio, which is that of one batch size")
    models = has_models(args)
    costs = [name for name in COSTS if getattr(args, name) is not None]
    if len(costs) != 1:
        got = " and ".join(map(flag, costs)) or "none"
        raise ValueError(f"{', '.join(map(flag, COSTS))}: exactly one must be given; got {got}")
    if args.trace is None and not models:
        raise ValueError("--trace: must be given without models; got none")


def _tuned(args: Namespace) -> list[Any]:
    if args.cost_ratio is not None:
        costs = Costs.ratios(args.cost_ratio, batch=args.batch[0])
        return [_chosen(args, _source(args), costs)]
    if args.costs is not None:
        first, *others = (Costs.load(args.costs, batch) for batch in args.batch)
        tuned = _chosen(args, _source(args), first)
        return [tuned, *map(tuned.at_costs, others)]
    check.optional_module("transformers", "llm")
    check.optional_module("safetensors.torch", "llm")
    took = Stopwatch()
    pair, texts, ids = opened(args)
    # a file may be sorted, and no more of its prompts are logged than the rounds need
    order = random.Random(args.seed).sample(range(len(ids)), len(ids))
    ids, groups = [ids[number] for number in order], args.groups or {}
    args.groups = {name: [own[number] for number in order] for name, own in groups.items()}
    args.work = args.work or _work(args, texts)
    if args.cycles is None:
        few = LOGGED_ENTRIES // pair.target.config.vocab_size
        args.cycles = min(CYCLES, max(few, LEAST_CYCLES))
    took.lap("loading")
    source = _logged(args, pair, ids) if args.trace is None else _source(args, pair)
    usual = Prompts(ids, args.batch[0], args.max_new_tokens, args.temperature, None, args.seed,
                    args.cuts)  # fmt: skip
    took.lap("logging")
    timed: list[Any] = []  # settings whose costs are measured, the same for every batch size

    def measure(settings: Sequence[Any], batch: int = args.batch[0]) -> Costs:
        took.lap("solving knobs")
        timed[:] = settings
        prompts = replace(usual, batch=batch)
        with Progress(f"timing decodes, batch {batch}", 1) as progress:
            costs = measure_costs(pair.target, pair.draft, prompts, settings,
                                  repeats=args.timings, on_decode=progress.of)  # fmt: skip
        took.lap("timing decodes")
        return costs

    tuned = _chosen(args, source, measure)
    took.lap("a cap on answers")
    floor = _noise_floor(args, pair.target, ids)
    took.lap("rounding")
    about = {"dtype": args.run_in, "seconds": took.parts} | floor
    tuned = replace(tuned, source=tuned.source | about)
    others = (tuned.at_costs(measure(list(timed), batch)) for batch in args.batch[1:])
    ranked = [_by_answers(args, pair, usual, one) for one in (tuned, *others)]
    took.lap("answers")
    return ranked


def _by_answers(args: Namespace, pair: Any, usual: Prompts, tuned: Any) -> Any:
    """Return settings ranked by the answer, where answers end before the limit."""
    lengths = tuned.costs.new_tokens
    if not args.answers or lengths is None or lengths > CUT_OFF * args.max_new_tokens:
        return tuned
    prompts = replace(usual, batch=tuned.costs.batch)

    def measure(choice: Any) -> Any:
        key = choice.family.key
        setting = TimedSetting(key, choice.policy, choice.verifier, choice.num_draft_tokens)
        with Progress(f"decoding answers, {key}", 1) as progress:
            return measure_lengths(
                pair.target, pair.draft, prompts, setting, args.answers, progress.of
            )

    return tuned.with_lengths(measure)


def _work(args: Namespace, texts: Sequence[Prompt]) -> Path:
    """Return a folder for what is logged, named by all that the rows depend on."""
    told = [str(getattr(args, name)) for name in ("target", "draft", *LOGGED)]
    told += [str(args.cuts), str(rendering(args))]
    told += [
        str(max(args.num_draft_tokens or defaults.TUNED_WIDTHS)),
        *(text.source for text in texts),
    ]
    return WORK / hashlib.sha256("\0".join(told).encode()).hexdigest()[:12]


def _noise_floor(args: Namespace, target: Any, ids: list[list[int]]) -> dict[str, Any]:
    """Return the noise floor for the file; print a warning where the budget is below it."""
    if args.temperature == 0 or args.cuts != WHOLE:  # a changed token has no finite KL
        return {}
    with Progress("reading passes", FLOOR_TEXTS) as progress:
        most = min(FLOOR_TOKENS, args.max_new_tokens)
        floor = noise_floor(target, ids[:FLOOR_TEXTS], max_new_tokens=most,
                            temperature=args.temperature, on_text=progress.update)  # fmt: skip
    level = args.divergence_per_token
    if args.divergence == "kl" and (warning := below_floor(level, floor.kl_per_token)):
        print(f"tune: {warning}", file=sys.stderr)
    return {"noise_floor": vars(floor)}


def _chosen(args: Namespace, source: Any, costs: Any) -> Any:
    with Progress("solving knobs", 1) as progress:
        return tune(
            source,
            costs,
            args.divergence_per_token,
            divergence=args.divergence,
            widths=args.num_draft_tokens,
            policies=args.policies,
            capped=True,
            seed=args.seed,
            by=args.by,
            on_step=progress.step,
        )


def _source(args: Namespace, pair: Any = None) -> Trace:
    """Return a trace that was logged before, if it is of the models where there are any."""
    trace = Trace.open(args.trace)
    if pair is not None:
        check_weights(f"--trace {args.trace}", trace.header.details, pair.target, pair.draft)
        if trace.header.temperature != args.temperature:
            raise ValueError(
                f"--trace: must be of the temperature {args.temperature:g}; "
                f"got {trace.header.temperature:g}"
            )
    check_cuts(args, trace.header)
    args.cuts = Cuts.of(trace.header.details) or args.cuts
    return trace


def _logged(args: Namespace, pair: Any, ids: list[list[int]]) -> Any:
    width = max(args.num_draft_tokens or defaults.TUNED_WIDTHS)
    options = {"temperature": args.temperature, "cuts": args.cuts, "texts": defaults.FEWEST_TEXTS}
    return log_shown(args, pair, ids, args.work / "trace", num_draft_tokens=width, **options)
