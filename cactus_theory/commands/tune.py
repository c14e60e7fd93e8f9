"""``cactus-theory tune``: log, solve knobs, measure costs, say which setting is fastest."""

import hashlib
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.arguments import whole_number
from cactus_theory.base.tables import print_json
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    check_cuts,
    flag,
    given_cuts,
    given_groups,
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
from cactus_theory.divergences import read_divergence
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
    add("--trace", metavar="DIR", help="logged rows of the pair; with models: use these, log none")
    add("--divergence-per-token", type=float, required=True, metavar="NATS",
        help="most that may be metered per emitted token, in the divergence's unit")  # fmt: skip
    add("--divergence", default=defaults.DIVERGENCE, help="what is metered (%(default)s)")
    add("--batch", type=int, nargs="+", default=[1], metavar="B",
        help="texts decoded together; tune for the first B, a line for each other B")  # fmt: skip
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="K to try; default 1 to 12")
    add("--policies", nargs="+", metavar="NAME",
        help=f"families ({', '.join((*USUAL, *OTHERS))}) or whole specs; lossless is among them "
        "anyway")  # fmt: skip
    add("--cost-ratio", type=float, metavar="C",
        help="without models: cost of drafting a token, in steps of plain decoding")  # fmt: skip
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
        help="answers of the two fastest settings and a lossless one where texts end before the "
        "limit (their mean is below 0.95 of it), to compare their lengths (400)")  # fmt: skip
    add("--temperature", type=float, default=defaults.TEMPERATURE)
    add_cuts(parser)
    add("--seed", type=int, default=defaults.SEED)
    add("--by", metavar="COLUMN", help="draw halves of the texts with as many of each value of "
        "this column of the prompts")  # fmt: skip
    add_threads(parser)
    add("--work", type=Path, metavar="DIR",
        help="folder of the trace, to resume from (build/tune/NAME by what is asked)")  # fmt: skip
    add("--out", metavar="FILE.json", help="file that generate --tuned reads")
    add("--json", action="store_true", help="print one JSON object only")


# message about the results that an interrupted command has kept
KEPT = "texts logged so far are kept in --work: the same command goes on from there"
WORK = Path("build/tune")


def run(args: Namespace) -> int:
    """Print the table and the sentence, or JSON; return 0."""
    cuts, level = given_cuts(args) or WHOLE, checked_level(args.divergence_per_token)
    families(read_divergence(args.divergence), args.policies)
    whole_number("answers", args.answers, 0)
    whole_number("timings", args.timings, 1)
    _check_batches(args.batch, args.cost_ratio is not None)
    models, named = has_models(args), [name for name in COSTS if getattr(args, name) is not None]
    if len(named) != 1:
        got = " and ".join(map(flag, named)) or "none"
        raise ValueError(f"{', '.join(map(flag, COSTS))}: exactly one must be given; got {got}")
    if args.trace is None and not models:
        raise ValueError("--trace: must be given without models; got none")
    sought = {"divergence": args.divergence, "widths": args.num_draft_tokens, "seed": args.seed}
    choose = partial(_chosen, level, policies=args.policies, by=args.by, **sought)
    if not models:
        choose_threads(args.threads)
    trace = None if args.trace is None else Trace.open(args.trace)
    if models:
        check.optional_module("transformers", "llm")
        check.optional_module("safetensors.torch", "llm")
        took, groups = Stopwatch(), given_groups(args) or {}
        pair, texts, ids = opened(args)
        # a file may be sorted, and no more of its prompts are logged than the rounds need
        order = random.Random(args.seed).sample(range(len(ids)), len(ids))
        ids = [ids[number] for number in order]
        took.lap("loading")
        law: dict[str, Any] = {"temperature": args.temperature, "cuts": cuts}
        if trace is None:
            told = [getattr(args, name) for name in ("target", "draft", *LOGGED)]
            width = max(args.num_draft_tokens or defaults.TUNED_WIDTHS)
            told += [cuts, rendering(args), width, *(text.source for text in texts)]
            groups = {name: [own[number] for number in order] for name, own in groups.items()}
            few = LOGGED_ENTRIES // pair.target.config.vocab_size
            cycles = args.cycles or min(CYCLES, max(few, LEAST_CYCLES))
            sizes = {"num_draft_tokens": width, "max_new_tokens": args.max_new_tokens}
            sizes |= {"texts": defaults.FEWEST_TEXTS, "seed": args.seed, "groups": groups}
            folder = (args.work or _work(told)) / "trace"
            trace = log_shown(pair, ids, folder, cycles, **sizes, **law)
        else:
            _check_trace(trace, str(args.trace), pair, args.temperature)
            check_cuts(args, trace.header)
            law["cuts"] = Cuts.of(trace.header.details) or cuts
        took.lap("logging")
        prompts = Prompts(ids, args.batch[0], args.max_new_tokens, seed=args.seed, **law)
        ranked = _ranked(pair, prompts, partial(choose, trace), args.batch, args.timings, took)
        ranked = [_by_answers(pair, prompts, args.answers, one) for one in ranked]
        took.lap("answers")
    else:
        assert trace is not None
        check_cuts(args, trace.header)
        if args.cost_ratio is not None:
            costs = [Costs.ratios(args.cost_ratio, batch=args.batch[0])]
        else:
            costs = [Costs.load(args.costs, batch) for batch in args.batch]
        tuned = choose(trace, costs[0])
        ranked = [tuned, *map(tuned.at_costs, costs[1:])]
    tuned, *others = ranked
    if args.out:
        save_tuned(tuned, args.out, others)
    if args.json:
        return print_json(payload(tuned, others))
    print("\n".join([table(tuned), "", sentence(tuned), *notes(tuned, others)]))
    if args.out:
        print(f"written to {args.out}; cactus-theory generate --tuned {args.out}")
    return 0


def _check_batches(batches: Sequence[int], by_ratio: bool) -> None:
    if min(batches) < 1 or len(set(batches)) < len(batches):
        got = " ".join(map(str, batches))
        raise ValueError(f"--batch: must be at least 1, each size once; got {got}")
    if by_ratio and len(batches) > 1:
        raise ValueError("--batch: must be one with --cost-ratio, which is that of one batch size")


def _check_trace(trace: Trace, place: str, pair: Any, temperature: float) -> None:
    """Raise ValueError for a trace of other models or of another temperature."""
    check_weights(f"--trace {place}", trace.header.details, pair.target, pair.draft)
    if trace.header.temperature != temperature:
        raise ValueError(
            f"--trace: must be of the temperature {temperature:g}; got {trace.header.temperature:g}"
        )


def _work(told: Sequence[Any]) -> Path:
    """Return a folder for what is logged, named by all that the rows depend on."""
    return WORK / hashlib.sha256("\0".join(map(str, told)).encode()).hexdigest()[:12]


def _chosen(level: float, source: Any, costs: Any, **options: Any) -> Any:
    with Progress("solving knobs", 1) as progress:
        return tune(source, costs, level, capped=True, on_step=progress.step, **options)


def _ranked(
    pair: Any,
    prompts: Prompts,
    choose: Callable[[Any], Any],
    batches: Sequence[int],
    repeats: int,
    took: Stopwatch,
) -> list[Any]:
    """Return the tuned settings of each batch size, whose costs are measured."""
    timed: list[Any] = []  # settings whose costs are measured, the same for every batch size

    def measure(settings: Sequence[Any], batch: int = batches[0]) -> Costs:
        took.lap("solving knobs")
        timed[:] = settings
        own = replace(prompts, batch=batch)
        with Progress(f"timing decodes, batch {batch}", 1) as progress:
            costs = measure_costs(pair.target, pair.draft, own, settings,
                                  repeats=repeats, on_decode=progress.of)  # fmt: skip
        took.lap("timing decodes")
        return costs

    tuned = choose(measure)
    took.lap("a cap on answers")
    floor = _noise_floor(pair.target, prompts, tuned)
    took.lap("rounding")
    about = {"dtype": pair.dtype, "seconds": took.parts} | floor
    tuned = replace(tuned, source=tuned.source | about)
    return [tuned, *(tuned.at_costs(measure(list(timed), batch)) for batch in batches[1:])]


def _by_answers(pair: Any, prompts: Prompts, answers: int, tuned: Any) -> Any:
    """Return settings ranked by the answer, where answers end before the limit."""
    lengths = tuned.costs.new_tokens
    if not answers or lengths is None or lengths > CUT_OFF * prompts.max_new_tokens:
        return tuned
    prompts = replace(prompts, batch=tuned.costs.batch)

    def measure(choice: Any) -> Any:
        key = choice.family.key
        setting = TimedSetting(key, choice.policy, choice.verifier, choice.num_draft_tokens)
        with Progress(f"decoding answers, {key}", 1) as progress:
            return measure_lengths(pair.target, pair.draft, prompts, setting, answers, progress.of)

    return tuned.with_lengths(measure)


def _noise_floor(target: Any, prompts: Prompts, tuned: Any) -> dict[str, Any]:
    """Return the noise floor for the file; print a warning where the budget is below it."""
    if prompts.temperature == 0 or prompts.cuts != WHOLE:  # a changed token has no finite KL
        return {}
    with Progress("reading passes", FLOOR_TEXTS) as progress:
        most = min(FLOOR_TOKENS, prompts.max_new_tokens)
        floor = noise_floor(target, prompts.ids[:FLOOR_TEXTS], max_new_tokens=most,
                            temperature=prompts.temperature, on_text=progress.update)  # fmt: skip
    if tuned.divergence == "kl" and (warning := below_floor(tuned.level, floor.kl_per_token)):
        print(f"tune: {warning}", file=sys.stderr)
    return {"noise_floor": vars(floor)}
