"""``cactus-theory expect``: the acceptance to expect at each position, and what an engine counted.

The comparison holds for an engine that decodes the same prompts to the same length, with the same
temperature and cuts, the same K and the same way of drafting; it cannot see whether it does.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.prompts import column_of, prompts_of
from cactus_theory.base.tables import print_json, print_table, save_table
from cactus_theory.base.terminal import Progress, one_line
from cactus_theory.commands.flags import add_policy, add_trust, chosen_policy
from cactus_theory.decoding import ModelDrafter, load_pair
from cactus_theory.traces import Trace, compare_observed, expect
from cactus_theory.traces.compared import Diagnosis, observed_rates, read_metrics
from cactus_theory.traces.faults import FAULTS, row_signatures, visible_faults
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.yardsticks import noise_floor
from cactus_theory.verify.contract import find_verifier, verifiers

MODES = ("sampled", "greedy")
DTYPES = ("float32", "bfloat16", "float16", "float64")
# texts are enough for a noise floor whose error is small beside it
FLOOR_TEXTS = 32
# standard errors at a position from which on it pays to decode with faults: two thirds or more of
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
    add_policy(parser, required=False)
    add_trust(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair")
    add("--target", metavar="DIR", help="or: target model")
    add("--draft", metavar="DIR", help="draft model")
    add("--prompts", metavar="FILE", help="JSON lines, or a prompt a line")
    add("--verifier", default="chain", help=f"one of {', '.join(verifiers())} (chain)")
    add("--draft-mode", choices=MODES, help="how the models' tokens are drafted (sampled)")
    add("--num-draft-tokens", type=int, metavar="K", help="default: 4, or as logged")
    add("--temperature", type=float, help="of both models (1)")
    add("--cycles", type=int,
        help="rounds to decode, at least (1000, or thrice those counted, up to 6000)")  # fmt: skip
    add("--max-new-tokens", type=int, default=64, metavar="N", help="of a text (64)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, help="of torch; 1 is best for small models")
    add("--observed", metavar="RATES", help="what an engine counted: accepted at each position, "
        "over drafts, as 0.81,0.64,…, or its tokens per call, bonus included")  # fmt: skip
    add("--rounds", type=float, metavar="N", help="over how many rounds (drafts) they were counted")
    add("--metrics", nargs="+", metavar="FILE",
        help="or its Prometheus text (vLLM, SGLang); two files, before and after, for what was "
        "counted in between")  # fmt: skip
    add("--floor", action="store_true", help="instead: how far the target's rows of a pass over "
        "K + 1 tokens are from those of passes over one, in nats")  # fmt: skip
    add("--dtype", nargs="+", choices=DTYPES, help="of the floor (float32)")
    add("--by", metavar="COLUMN", help="also a table per value of this column of the prompts")
    add("--csv", metavar="FILE.csv", help="also save one line per position")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: Namespace) -> int:
    """Print the tables, or JSON; return 0."""
    _check(args)
    if args.threads is not None:
        torch.set_num_threads(check.threads(args.threads))
    args.temperature = 1.0 if args.temperature is None else args.temperature
    if args.floor:
        return _floor(args)
    args.policy = chosen_policy(args) if args.policy else "speculative"
    setting = {name: getattr(args, name) for name in ("policy", "verifier", "num_draft_tokens")}
    observation, diagnosis = None, None
    if args.metrics is not None:
        *before, now = args.metrics
        observation = read_metrics(now, before[0] if before else None, args.rounds)
    elif args.observed is not None:
        observation = observed_rates(args.observed, args.rounds)
    if args.cycles is None:
        thrice = 0 if observation is None else round(3 * observation.rounds)
        args.cycles = min(max(thrice, FEWEST_ROUNDS), MOST_ROUNDS)
    with TemporaryDirectory(prefix="expect-") as folder:
        log = None if args.trace else _logger(args, Path(folder))
        trace = Trace.open(args.trace) if log is None else log("healthy")
        expectation = expect(trace, **setting)
        if observation is not None:
            signatures = row_signatures(trace, **setting)
            diagnosis = compare_observed(expectation, observation, signatures)
            doubtful = any(abs(gap["errors"]) > DOUBTFUL for gap in diagnosis.gaps)
            if log is not None and (diagnosis.alarm or doubtful):
                signatures |= _decoded(args, trace, log)
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
        comparison = {} if diagnosis is None else {"compared": vars(diagnosis)}
        del tables[""]
        return print_json(whole | comparison | ({"groups": tables} if groups else {}))
    for value, content in tables.items():
        _show(content, f"\n{args.by} = {value}: " * bool(value))
    print(LEGEND + (OF_PROMPTS if whole["errors_of_these_prompts"] else OF_ANY))
    if diagnosis is not None:
        _show_compared(diagnosis, log is None)
    return 0


def _check(args: Namespace) -> None:
    """Raise for what would fail after the long part."""
    names = [name for name in OF_MODELS if getattr(args, name) is not None]
    if args.floor and (args.trace or args.target is None or args.prompts is None):
        raise ValueError("--floor: must be given with --target and --prompts; it needs no trace")
    if args.dtype and not args.floor:
        raise ValueError(f"--dtype: must be given with --floor; got {' '.join(args.dtype)}")
    if not args.floor and len(names) != (0 if args.trace else len(OF_MODELS)):
        got = ", ".join(f"--{name}" for name in (*["trace"] * bool(args.trace), *names)) or "none"
        raise ValueError(f"--trace, or --target, --draft and --prompts: must be given; got {got}")
    if args.observed is not None and args.metrics or len(args.metrics or ()) > 2:
        raise ValueError("--observed, --metrics: at most one may be given, with one or two files")
    if args.rounds is not None and args.observed is None and args.metrics is None:
        raise ValueError(f"--rounds: must come with what was counted in them; got {args.rounds:g}")
    if args.csv and not args.csv.endswith(".csv"):
        raise ValueError(f"--csv: must end in .csv; got {args.csv!r}")
    for name in ("draft_mode", "temperature") if args.trace else ():
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: a trace has its own; got {getattr(args, name)}")
    find_verifier(args.verifier)


def _logger(args: Namespace, folder: Path) -> Callable[..., Any]:
    """Return what decodes with the models as asked, or with a fault, and returns the trace."""
    texts = prompts_of(args.prompts)
    groups = None if args.by is None else {args.by: column_of(args.prompts, args.by)}
    pair = load_pair(args.target, args.draft, device=args.device, trust_code=args.trust_code)

    def log(name: str, draft: Any = ModelDrafter, verifier: Any = None) -> Any:
        """Return a trace; None for a draft that cannot have the fault."""
        if (drafter := draft(pair.draft, args.draft_mode == "greedy")) is None:
            return None
        return log_shown(
            args,
            pair,
            [pair.tokenizer(text)["input_ids"] for text in texts],
            folder / name,
            label=f"decoding rounds, {name}",
            draft_model=drafter,
            num_draft_tokens=args.num_draft_tokens or 4,
            temperature=args.temperature,
            eos_token_ids=pair.target.generation_config.eos_token_id,
            policy=args.policy,
            verifier=verifier or args.verifier,
            groups=groups,
        )

    return log


def _decoded(args: Namespace, trace: Trace, log: Callable[..., Any]) -> dict[str, Any]:
    """Return what each fault that a decode can have counts in one."""
    verifier, expectations = find_verifier(args.verifier), {}
    for fault in visible_faults(trace, verifier):
        if fault.resamples:
            continue
        faulty = fault.verifier(verifier, trace.header.temperature)
        logged = log(fault.name, fault.draft or ModelDrafter, faulty)
        if logged is not None:
            expectation = expect(logged, args.policy, faulty or verifier)
            expectations[f"{fault.name} decoded"] = expectation
    return expectations


def _payload(trace: Trace, expectation: Any) -> Line:
    """Return what was decoded, the numbers that have no position, and a line for each position."""
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
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "greedy",
        "rounds": int(expectation.rounds),
        "texts": expectation.texts,
        "errors_of_these_prompts": bool(expectation.strata.any()),
        "accepted_per_call": expectation.replay.accepted_per_call.value,
    } | tokens
    if product is not None:
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
        "{temperature:g}: {rounds} rounds of {texts} texts".format(**content)
    )
    cells = [
        [str(line["position"]), _interval(line, "accepted"), _interval(line, "if_reached")]
        for line in content["positions"]
    ]
    print_table(["position", "reached and accepted", "accepted if reached"], cells, ())
    print(f"tokens a call {_interval(content, 'tokens_per_call')}, ", end="")
    print("{accepted_per_call:.4f} of them drafted".format(**content))
    if "product_of_means" in content:
        print(
            "product of mean acceptances {product_of_means:.4f}, off by {product_difference:+.4f} "
            "±{product_difference_se:.4f}".format(**content)
        )


def _interval(line: Line, name: str) -> str:
    return f"{line[name]:.4f} ({line[f'{name}_low']:.4f} to {line[f'{name}_high']:.4f})"


def _show_compared(diagnosis: Diagnosis, by_rows: bool) -> None:
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
    faults = [fault for name in diagnosis.named for fault in FAULTS if fault.name == name]
    if not diagnosis.alarm:
        print("as expected: nothing is off")
    else:
        print(
            "not as expected; it looks like" if faults else "not as expected, nor any known fault"
        )
        for fault in faults:
            print(f"  {fault.name}: {fault.says} ({fault.thread})")
        if by_rows:
            untried = ", ".join(fault.name for fault in FAULTS if fault.draft is not None)
            print(f"not tried, as they need both models: {untried}")
    if diagnosis.alike:
        print(f"would look healthy here: {', '.join(diagnosis.alike)}")
    print(ASSUMED)


def _floor(args: Namespace) -> int:
    """Measure and print the noise floor per dtype; one that does not run here is named."""
    texts, floors = prompts_of(args.prompts)[:FLOOR_TEXTS], []
    for name in args.dtype or DTYPES[:1]:
        options = {"device": args.device, "dtype": getattr(torch, name)}
        pair = load_pair(args.target, args.target, trust_code=args.trust_code, **options)
        with Progress(f"reading passes, {name}", len(texts)) as progress:
            try:
                floor = noise_floor(
                    pair.target,
                    [pair.tokenizer(text)["input_ids"] for text in texts],
                    width=(args.num_draft_tokens or 4) + 1,
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
        raise RuntimeError("--dtype: none of them runs here")
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
