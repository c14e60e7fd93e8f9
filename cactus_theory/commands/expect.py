"""``cactus-theory expect``: the acceptance to expect at each position, and what an engine counted.

The comparison holds for an engine that decodes the same prompts to the same length, with the same
temperature and cuts, the same K and the same way of drafting; it cannot see whether it does.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.prompts import column_of
from cactus_theory.base.tables import print_json, print_table, save_table
from cactus_theory.base.terminal import Progress, one_line
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    add_policy,
    check_cuts,
    given_cuts,
    given_prompts,
    one_policy,
    rendered_ids,
)
from cactus_theory.commands.models import (
    add_models,
    add_threads,
    choose_threads,
    loaded,
    refuse_without_models,
)
from cactus_theory.decoding.drafters import MODES, Drafter, NGram, drafter_by, named_drafter
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.traces import Trace, compare_observed, expect
from cactus_theory.traces.diagnosis import Diagnosis, Observation, observed_rates, read_metrics
from cactus_theory.traces.faults import FAULTS, Fault, row_signatures, visible_faults
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.verify.contract import find_verifier, verifiers

DTYPES = ("float32", "bfloat16", "float16", "float64")  # that a floor may be of
# texts of a noise floor: enough for an error that is small beside it
FLOOR_TEXTS = 32
# seconds of decoding after which no text begins
SECONDS = 1800.0
# fewest texts that have standard errors
FEWEST_TEXTS = 2
# standard errors at a position above which faults are decoded: two thirds or more of
# healthy engines, and hardly one with a fault that could be named, stay below at every position
DOUBTFUL = 2.0
# rounds to decode: thrice those counted, so that what is expected has the smaller error, and so has
# a fault that only a decode with it shows; beyond, 2,000 counted rounds hardly name any more often
FEWEST_ROUNDS, MOST_ROUNDS = 1000, 6000
OF_MODELS = ("target", "draft", "prompts")
LEGEND = "99 % intervals that hold together; all coins are integrated out, errors are "
OF_PROMPTS = "those of these prompts' texts"
OF_ANY = "of prompts like these (of these, and smaller, from two texts a prompt on)"
ASSUMED = """\
This compares an engine that decodes the same prompts to as many tokens with the same temperature,
cuts, K and way of drafting: see to that, no counter shows it. Errors of counts are rough."""
Line = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    """Describe the command line; needs no optional package."""
    add = parser.add_argument
    add_policy(parser)
    add_models(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair")
    add("--prompts", metavar="FILE", help=PROMPTS)
    add_chat(parser)
    add("--verifier", default=defaults.VERIFIER,
        help=f"one of {', '.join(verifiers())} ({defaults.VERIFIER})")  # fmt: skip
    add("--draft-mode", choices=MODES, help="how the models' tokens are drafted (sampled)")
    add("--num-draft-tokens", type=int, metavar="K",
        help=f"default: {defaults.NUM_DRAFT_TOKENS}, or as logged")  # fmt: skip
    add("--temperature", type=float, help=f"of both models ({defaults.TEMPERATURE:g})")
    add_cuts(parser)
    add("--cycles", type=int,
        help="rounds to decode, at least (1000, or thrice those counted, up to 6000)")  # fmt: skip
    add("--texts", type=int, metavar="N", help="decode so many texts at most")
    add("--seconds", type=float, default=SECONDS, metavar="S",
        help=f"no text is begun, and no fault decoded, after so many ({SECONDS:g})")  # fmt: skip
    add("--max-new-tokens", type=int, default=defaults.MAX_NEW_TOKENS, metavar="N",
        help="of a text (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    add("--observed", metavar="RATES", help="what an engine counted: accepted at each position, "
        "over drafts, as 0.81,0.64,…, or its tokens per call, bonus included")  # fmt: skip
    add("--rounds", type=float, metavar="N", help="over how many rounds (drafts) they were counted")
    add("--drafted", type=float, metavar="N", help="and how many tokens were drafted in these, if "
        "known: rounds at the end of a text may draft fewer")  # fmt: skip
    add("--metrics", nargs="+", metavar="FILE",
        help="or its Prometheus text (vLLM, SGLang); two files, before and after, for what was "
        "counted in between")  # fmt: skip
    add("--floor", nargs="*", choices=DTYPES, metavar="DTYPE", help="instead: how far the target's "
        "rows of a pass over K + 1 tokens are from those of passes over one, in nats, in each of "
        f"these dtypes ({', '.join(DTYPES)}; --dtype)")  # fmt: skip
    add("--by", metavar="COLUMN", help="also a table per value of this column of the prompts")
    add("--csv", metavar="FILE.csv", help="also save one line per position")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: Namespace) -> int:
    """Print the tables, or JSON; return 0."""
    _check(args)
    if args.target is None:
        choose_threads(args)
    args.temperature = defaults.TEMPERATURE if args.temperature is None else args.temperature
    limit = DecodingLimit(args.texts, args.seconds)
    if args.floor is not None:
        return _floor(args, limit)
    args.policy = ct.policy(one_policy(args) or defaults.POLICY)
    setting = {name: getattr(args, name) for name in ("policy", "verifier", "num_draft_tokens")}
    trace = Trace.open(args.trace) if args.trace else None
    width = args.num_draft_tokens or (
        defaults.NUM_DRAFT_TOKENS if trace is None else trace.num_draft_tokens
    )
    observation, diagnosis, untried = _observed(args, width), None, []
    if trace is not None:
        check_cuts(args, trace.header)
        if observation is not None:
            _ask_for_cuts(args, trace)
    if args.cycles is None:
        thrice = 0 if observation is None else round(3 * float(np.max(observation.rounds)))
        args.cycles = min(max(thrice, FEWEST_ROUNDS), MOST_ROUNDS)
    with TemporaryDirectory(prefix="expect-") as folder:
        log = None
        if trace is None:
            log = _logger(args, Path(folder), limit)
            trace = log("healthy")
        with Progress("adding up rounds", len(trace)) as progress:
            expectation = expect(trace, **setting, on_cycles=progress.update)
        if observation is not None:
            visible = visible_faults(trace, find_verifier(args.verifier))
            with Progress("adding up what faults would count", len(visible)) as progress:
                signatures = row_signatures(trace, **setting, on_fault=progress.advance)
            diagnosis = compare_observed(expectation, observation, signatures)
            doubtful = any(abs(gap["errors"]) > DOUBTFUL for gap in diagnosis.gaps)
            untried = [fault for fault in visible if fault.name not in signatures]
            if log is not None and (diagnosis.alarm or doubtful):
                decoded, untried = _decoded(args, trace, log, limit)
                signatures |= decoded
                diagnosis = compare_observed(expectation, observation, signatures)
        groups = trace.groups(args.by) if args.by else {}
        tables = {"": _payload(trace, expectation)} | {
            value: _payload(trace, expect(trace.part(texts), **setting))
            for value, texts in groups.items()
        }
    whole = tables[""]
    if args.csv:
        lines = [{"group": value} | line for value in tables for line in tables[value]["positions"]]
        save_table(args.csv, lines, {k: v for k, v in whole.items() if k != "positions"})
    if args.json:
        comparison = {}
        if diagnosis is not None:
            comparison = {"compared": vars(diagnosis) | {
                "sentence": diagnosis.sentence, "not_tried": _kinds(untried)}}  # fmt: skip
        del tables[""]
        return print_json(whole | comparison | ({"groups": tables} if groups else {}))
    for value, content in tables.items():
        _show(content, f"\n{args.by} = {value}: " * bool(value))
    print(LEGEND + (OF_PROMPTS if whole["errors_of_these_prompts"] else OF_ANY))
    if diagnosis is not None:
        _show_compared(diagnosis, _kinds(untried))
    return 0


def _check(args: Namespace) -> None:
    """Raise ValueError for bad arguments before the models are loaded."""
    names = [name for name in OF_MODELS if getattr(args, name) is not None]
    refuse_without_models(args)
    floor = args.floor is not None
    if floor and (args.trace or names != ["target", "prompts"]):
        raise ValueError("--floor: must be given with --target and --prompts, no draft, no trace")
    if not floor and len(names) != (0 if args.trace else len(OF_MODELS)):
        got = ", ".join(f"--{name}" for name in (*["trace"] * bool(args.trace), *names)) or "none"
        raise ValueError(f"--trace, or --target, --draft and --prompts: must be given; got {got}")
    if args.observed is not None and args.metrics or len(args.metrics or ()) > 2:
        raise ValueError("--observed, --metrics: at most one may be given, with one or two files")
    for name in ("rounds", "drafted"):
        value = getattr(args, name)
        if value is not None and args.observed is None and (name == "drafted" or not args.metrics):
            raise ValueError(f"--{name}: must come with what was counted in them; got {value:g}")
    for name in ("texts", "cycles", "num_draft_tokens", "max_new_tokens"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            check.whole_number(flag, getattr(args, name), FEWEST_TEXTS if name == "texts" else 1)
    check.number("--seconds", args.seconds, 0)
    if args.csv and not args.csv.endswith(".csv"):
        raise ValueError(f"--csv: must end in .csv; got {args.csv!r}")
    for name in ("draft_mode", "temperature") if args.trace else ():
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: a trace has its own; got {getattr(args, name)}")
    find_verifier(args.verifier)


class DecodingLimit:
    """The most texts and seconds that decoding may take."""

    def __init__(self, texts: int | None, seconds: float) -> None:
        self.texts, self.end = texts, time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self.end

    def enough(self, texts: int) -> bool:
        """Return whether no further text is to begin."""
        return texts == self.texts or (texts >= FEWEST_TEXTS and self.spent)


def _observed(args: Namespace, width: int) -> Observation | None:
    """Return an engine's counts, None if nothing is compared; ask how it drafted."""
    if args.metrics is not None:
        *before, now = args.metrics
        seen = read_metrics(now, before[0] if before else None, args.rounds, width)
    elif args.observed is not None:
        seen = observed_rates(args.observed, args.rounds, width, args.drafted)
    else:
        return None
    ngram = args.draft is not None and isinstance(named_drafter(args.draft), NGram)
    if args.draft_mode is None and not args.trace and args.temperature != 0 and not ngram:
        raise ValueError(
            "--draft-mode: must say how the engine drafts where its counts are compared, greedy "
            "(vLLM's default, n-grams) or sampled (draft_sample_method probabilistic); got none"
        )
    return seen


def _ask_for_cuts(args: Namespace, trace: Trace | None, defaults: Any = None) -> None:
    """Raise ValueError where counts are compared and the truncation of the rows is unknown.

    ``defaults`` is the target's own generation configuration, which engines may follow.
    """
    flags, cuts, why = "--top-k, --top-p", given_cuts(args), ""
    own = {name: getattr(defaults, name, None) for name in ("top_k", "top_p")}
    if cuts is None and trace is not None and Cuts.of(trace.header.details) is None:
        why = "the trace does not say"
    elif cuts is None and any(own.values()):
        named = ", ".join(f"{name} {value}" for name, value in own.items())
        why = f"the target's generation_config.json has {named}, which vLLM follows by default"
    elif trace is None and args.draft_mode == "sampled" and cuts not in (None, WHOLE):
        if args.draft_top_k is args.draft_top_p is None:
            flags = "--draft-top-k, --draft-top-p"
            why = "engines differ in whether they cut the draft's, too (vLLM V1 does not)"
    if why:
        raise ValueError(
            f"{flags}: must say what the engine cuts rows to (0 and 1: nothing), as {why}; got none"
        )


def _kinds(faults: Sequence[Fault]) -> list[str]:
    """Return the names of faults, each once."""
    return list(dict.fromkeys(fault.kind for fault in faults))


def _logger(args: Namespace, folder: Path, limit: DecodingLimit) -> Callable[..., Any]:
    """Return a function that decodes as asked, or with a fault, and returns the trace."""
    texts = given_prompts(args)
    groups = None if args.by is None else {args.by: column_of(texts, args.by)}
    pair = loaded(args)
    ids = rendered_ids(args, pair.tokenizer, texts)
    if (args.observed or args.metrics) and args.temperature != 0:
        _ask_for_cuts(args, None, pair.target.generation_config)

    def log(name: str, draft: Any = None, verifier: Any = None, temperature: Any = None) -> Any:
        """Return a trace; None for a draft that cannot have the fault."""
        mode, given = args.draft_mode or MODES[0], pair.draft
        if draft is None:
            drafter: Any = drafter_by(mode, given)
        else:  # of models alone
            drafter = None if isinstance(given, Drafter) else draft(given, mode == "greedy")
        if drafter is None:
            return None
        return log_shown(
            args,
            pair,
            ids,
            folder / name,
            label=f"decoding rounds, {name}",
            enough=limit.enough,
            draft_model=drafter,
            num_draft_tokens=args.num_draft_tokens or defaults.NUM_DRAFT_TOKENS,
            temperature=args.temperature if temperature is None else temperature,
            cuts=given_cuts(args) or WHOLE,
            policy=args.policy,
            verifier=verifier or args.verifier,
            groups=groups,
        )

    return log


def _decoded(
    args: Namespace, trace: Trace, log: Callable[..., Any], limit: DecodingLimit
) -> tuple[dict[str, Any], list[Fault]]:
    """Return the counts of a decode with each fault, and the faults that no time was left for."""
    verifier, expectations, late = find_verifier(args.verifier), {}, []
    for fault in visible_faults(trace, verifier):
        if not fault.decodes:
            continue
        if limit.spent:
            late.append(fault)
            continue
        faulty = fault.decoding_verifier(verifier, trace.header.temperature)
        logged = log(fault.name, fault.draft, faulty, fault.temperature)
        if logged is not None:
            expectations[f"{fault.name} decoded"] = expect(logged, args.policy, faulty)
    return expectations, late


def _payload(trace: Trace, expectation: Any) -> Line:
    """Return the decode, the numbers without a position, and a line for each position."""
    product, width = expectation.product_of_means, len(expectation.accepted)
    names = ["tokens_per_call", *["accepted"] * width, *["if_reached"] * width]
    means = [expectation.tokens_per_call, *expectation.accepted, *expectation.if_reached]
    tokens, *spans = (
        {name: mean.value, f"{name}_low": low, f"{name}_high": high}
        for name, mean, (low, high) in zip(names, means, expectation.intervals(means), strict=True)
    )
    content = {
        "policy": expectation.replay.policy,
        "verifier": expectation.replay.verifier,
        "num_draft_tokens": width,
        "temperature": trace.header.temperature,
        "cuts": str(Cuts.of(trace.header.details) or "cuts unknown"),
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "greedy",
        "rounds": int(expectation.rounds),
        "texts": expectation.texts,
        "errors_of_these_prompts": bool(expectation.strata.any()),
        "accepted_per_call": expectation.replay.accepted_per_call.value,
    } | tokens
    difference = product - expectation.tokens_per_call
    content |= {"product_of_means": product.value, "product_difference": difference.value}
    content["product_difference_se"] = expectation.error(difference)
    columns = zip(range(1, width + 1), spans[:width], spans[width:], strict=True)
    content["positions"] = [{"position": place} | share | other for place, share, other in columns]
    return content


def _show(content: Line, title: str) -> None:
    """Print the table of all texts or of a group."""
    print(
        title
        + "{policy}, {verifier}, K = {num_draft_tokens}, {drafts} drafts, temperature "
        "{temperature:g}, {cuts}: {rounds} rounds of {texts} texts".format(**content)
    )
    cells = [
        [str(line["position"]), _interval(line, "accepted"), _interval(line, "if_reached")]
        for line in content["positions"]
    ]
    print_table(["position", "reached and accepted", "accepted if reached"], cells, ())
    print(f"tokens a call {_interval(content, 'tokens_per_call')}, ", end="")
    print("{accepted_per_call:.4f} of them drafted".format(**content))
    print(
        "product of mean acceptances {product_of_means:.4f}, off by {product_difference:+.4f} "
        "±{product_difference_se:.4f}".format(**content)
    )


def _interval(line: Line, name: str) -> str:
    return f"{line[name]:.4f} ({line[f'{name}_low']:.4f} to {line[f'{name}_high']:.4f})"


def _show_compared(diagnosis: Diagnosis, untried: Sequence[str]) -> None:
    """Print every gap and the verdict."""
    heads = ["position", "expected if reached", "observed", "off by", "in errors", ""]
    cells = [
        [
            str(gap["position"] or "tokens a call"),
            "{expected:.4f} ±{expected_error:.4f}".format(**gap),
            "{observed:.4f} ±{observed_error:.4f}".format(**gap),
            f"{gap['observed'] - gap['expected']:+.4f}",
            f"{gap['errors']:+.1f}",
            "OFF" * gap["off"],
        ]
        for gap in diagnosis.gaps
    ]
    print()
    print_table(heads, cells, ())
    print(diagnosis.sentence)
    for name in diagnosis.not_excluded:
        faults = [fault for fault in FAULTS if fault.kind == name]
        first = "".join(f"; try {fault.check_first}" for fault in faults[:1] if fault.check_first)
        print(f"  {name}: {faults[0].says} ({faults[0].thread}){first}")
    if diagnosis.alarm and untried:
        print(f"not tried, for want of both models or of time: {', '.join(untried)}")
    if diagnosis.alike:
        print(f"cannot be told from healthy here: {', '.join(diagnosis.alike)}")
    print(ASSUMED)


def _floor(args: Namespace, limit: DecodingLimit) -> int:
    """Measure and print the noise floor per dtype; one that does not run here is named."""
    texts, floors, ids = given_prompts(args)[: args.texts or FLOOR_TEXTS], [], []
    for name in args.floor or [args.dtype]:
        args.dtype = name
        pair = loaded(args)
        ids = ids or rendered_ids(args, pair.tokenizer, texts)  # said once
        with Progress(f"reading passes, {name}", len(texts)) as progress:

            def on_text(done: int, progress: Progress = progress) -> bool:
                progress.update(done)
                return limit.enough(done)

            try:
                floor = noise_floor(
                    pair.target,
                    ids,
                    width=(args.num_draft_tokens or defaults.NUM_DRAFT_TOKENS) + 1,
                    max_new_tokens=args.max_new_tokens,
                    temperature=args.temperature,
                    seed=args.seed,
                    on_text=on_text,
                )
            except RuntimeError as error:  # a dtype that the device lacks
                print(f"{name} does not run here: {one_line(error)}", file=sys.stderr)
                continue
            floors.append(vars(floor))
    if not floors:
        raise RuntimeError("--floor: none of them runs here")
    if args.csv:
        save_table(args.csv, floors, {"target": Path(args.target).name})
    if args.json:
        return print_json({"floors": floors})
    cells = [
        [
            floor["dtype"],
            "{kl_per_token:.3g} ±{standard_error:.1g}".format(**floor),
            str(floor["rows"]),
        ]
        for floor in floors
    ]
    print_table(["dtype", "KL a token (nats)", "rows"], cells, (0,))
    print(
        f"the target's rows of passes over {floors[0]['width']} tokens against passes over one, on "
        "this machine: a smaller budget is less than rounding"
    )
    return 0
