"""``cactus-theory expect``: the acceptance to expect at each position, and what an engine counted.

The expected acceptance is computed from logged rows (--trace), or from a decode of --prompts. An
engine's counts can be compared with it if the engine decodes the same prompts to the same length,
with the same temperature and cuts, number K of drafted tokens and way of drafting. Counts cannot
show whether this is so. Exit code 3: too few texts or rounds to compare.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.names import MODES
from cactus_theory.base.tables import print_json, print_table
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    add_models,
    add_policy,
    add_threads,
    flag,
    one_policy,
    refuse,
)
from cactus_theory.commands.inputs import check_cuts, given_cuts
from cactus_theory.commands.models import OF_MODELS, choose_threads, has_models, opened
from cactus_theory.decoding import Pair
from cactus_theory.decoding.drafters import NGram, drafter_by, named_drafter
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.traces import Trace, compare_observed
from cactus_theory.traces.counters import Observation, observed_rates, read_metrics
from cactus_theory.traces.expected_acceptance import Expectation, expect
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.records import read_records
from cactus_theory.verify.contract import find_verifier, verifiers

# bounds on the rounds to decode, which are otherwise three times the rounds that the engine
# counted, so that the expected rates have smaller errors than the observed rates
FEWEST_ROUNDS, MOST_ROUNDS = 1000, 6000
COUNTED = "metrics", "records", "observed"
OF_COUNTS = ("rounds", "drafted", "answers", "behind_ends")
# NO_LAW: entries of generation_config.json that do not change the law of tokens; NEUTRAL: values
# of other entries that do not
NO_LAW = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample",
          "max_length", "use_cache", "cache_implementation"}  # fmt: skip
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
# beginning of errors about flags for the engine's cuts
SAID = "must say what the engine cuts rows to (0 and 1: nothing), as"
LEGEND = "99 % intervals that hold together; all coins are integrated out, errors are "
OF_PROMPTS = "those of these prompts' texts"
OF_ANY = "of prompts like these (of these, and smaller, from two texts a prompt on)"
ASSUMED = """\
This compares an engine that decodes the same prompts to as many tokens with the same temperature,
cuts, K and way of drafting: see to that, no counter shows it. Errors of counts are rough. Counts
say neither why a position is off nor whether the tokens have the right law: `served` reads them."""
Line = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags; needs no optional package."""
    add = parser.add_argument
    add_policy(parser)
    add_models(parser)
    add("--trace", metavar="DIR", help="logged rows of the pair")
    add("--prompts", metavar="FILE", help=PROMPTS)
    add_chat(parser)
    text = f"one of {', '.join(verifiers())} ({defaults.VERIFIER})"
    add("--verifier", default=defaults.VERIFIER, help=text)
    add("--draft-mode", choices=MODES, help="how tokens of the draft's rows are drafted (sampled)")
    text = f"default: {defaults.NUM_DRAFT_TOKENS}, or as logged"
    add("--num-draft-tokens", type=int, metavar="K", help=text)
    add("--temperature", type=float, help=f"of both models ({defaults.TEMPERATURE:g})")
    add_cuts(parser)
    text = "entries of the target's generation_config.json that the engine does not follow"
    add("--ignored", nargs="+", default=[], metavar="NAME", help=text)
    text = "rounds to decode, at least (1000, or thrice those counted, up to 6000)"
    add("--cycles", type=int, help=text)
    add("--max-new-tokens", type=int, metavar="N", help=f"of a text ({defaults.MAX_NEW_TOKENS})")
    add("--seed", type=int, default=defaults.SEED, help="of the order of prompts, and of draws")
    add_threads(parser)
    text = "what an engine counted: accepted at each position, over drafts, as 0.81,0.64,…"
    add("--observed", metavar="RATES", help=text)
    add("--rounds", type=float, metavar="N", help="rounds (drafts) that RATES were counted over")
    text = "how many tokens these rounds drafted: at the end of a text, or at a high load"
    add("--drafted", type=float, metavar="N", help=f"{text}, a round drafts fewer")
    add("--answers", type=float, metavar="N", help="how many answers these rounds made (by default "
        "as many rounds a text as were logged; vLLM's counters say it)")  # fmt: skip
    text = "whether places behind an end-of-text token are in the engine's numbers"
    add("--behind-ends", choices=("in", "out"), help=f"{text} (vLLM's counters: in)")
    text = "in place of --observed vLLM's Prometheus text; two files, before and after"
    add("--metrics", nargs="+", metavar="FILE", help=f"{text}, for what was counted in between")
    add("--records", metavar="FILE", help="in place of both, answers of vLLM or SGLang with their "
        "acceptance, or AIPerf's profile_export.jsonl: errors are then by request")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object only")


def run(args: Namespace) -> int:
    """Print the tables, or JSON, and return 0; raise CannotSay for too few texts or rounds."""
    check_asked(args)
    trace, cuts = Trace.open(args.trace) if args.trace else None, given_cuts(args)
    heat = defaults.TEMPERATURE if args.temperature is None else args.temperature
    width = args.num_draft_tokens or (Setting() if trace is None else trace).num_draft_tokens
    named = ct.policy(one_policy(args) or defaults.POLICY), width, find_verifier(args.verifier)
    setting = Setting(*named, heat, cuts or WHOLE)
    seen = observation(width, **{name: getattr(args, name) for name in (*COUNTED, *OF_COUNTS)})
    if trace is None:
        pair, _, ids = opened(args, drawn=True)
        if seen is not None and heat != 0:
            # None means that no flag gives the entry; any flag of a cut gives both of its entries
            given = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
            check_followed(pair.target, given | {"top_k": cuts, "top_p": cuts}, args.ignored)
        sizes = args.cycles, args.max_new_tokens, args.seed
        record = decoded_record(pair, ids, setting, seen, args.draft_mode, *sizes)
    else:
        choose_threads(args.threads)
        check_cuts(args, trace.header)
        if seen is not None and cuts is None and trace.header.cuts is None:
            raise ValueError(f"--top-k, --top-p: {SAID} the trace does not say; got none")
        record = record_of(trace, setting, seen)
    return print_json(record) if args.json else _show(record)


def check_asked(args: Namespace) -> None:
    """Raise ValueError, before any work, for flags that are wrong or contradict each other."""
    if args.trace:
        refuse(args, OF_MODELS, "must not be given with --trace")
        of_decode = "draft_mode", "temperature", "max_new_tokens", "cycles", "seed"
        refuse(args, of_decode, "a trace has its own", seed=defaults.SEED)
    if not has_models(args) and not args.trace:
        raise ValueError("--trace, or --target, --draft and --prompts: must be given; got none")
    counted = [name for name in COUNTED if getattr(args, name) is not None]
    if len(counted) > 1 or len(args.metrics or ()) > 2:
        raise ValueError(
            "--observed, --metrics, --records: at most one may be given, --metrics with one or two "
            "files"
        )
    if not counted:
        refuse(args, OF_COUNTS, "must come with what was counted")
    if args.metrics or args.records:
        refuse(args, ("rounds",), "must not be given with --metrics or --records, which count them")
    for name in ("cycles", "num_draft_tokens", "max_new_tokens"):
        if (value := getattr(args, name)) is not None:
            check.whole_number(flag(name), value, 1)
    looked_up = isinstance(named_drafter(args.draft or ""), NGram)
    if args.draft_mode == "sampled" and looked_up:
        raise ValueError(f"--draft-mode: {args.draft} looks its tokens up, greedy; got sampled")
    if counted and not (args.trace or args.temperature == 0):
        if args.draft_mode is None and not looked_up:
            raise ValueError(
                "--draft-mode: must say how the engine drafts where its counts are compared, "
                "greedy (vLLM's default, n-grams) or sampled (draft_sample_method probabilistic); "
                "got none"
            )
        sampled_and_cut = args.draft_mode == "sampled" and given_cuts(args) not in (None, WHOLE)
        if sampled_and_cut and args.draft_top_k is None and args.draft_top_p is None:
            raise ValueError(
                f"--draft-top-k, --draft-top-p: {SAID} engines differ in whether they cut "
                "the draft's, too (vLLM V1 does not); got none"
            )


def observation(
    width: int, metrics: Any, records: Any, observed: Any, rounds: float | None, **known: Any
) -> Observation | None:
    """Read an engine's counts from vLLM's metrics, answers' records or printed rates.

    Return None if the flags name none of the three. ``known`` has the values of ``--drafted``,
    ``--answers`` and ``--behind-ends``.
    """
    known["behind_ends"] = {"in": True, "out": False}.get(known["behind_ends"])
    if records is not None:
        return read_records(records, width=width, **known)
    if observed is not None:
        return observed_rates(observed, rounds, width, **known)
    if metrics is None:
        return None
    *before, now = metrics
    seen = read_metrics(now, *before, width=width, **known)
    if seen.restarted:
        note = f"{seen.restarted} of the engines restarted in between"
        print(f"expect: {note}: of these only what was counted since is compared", file=sys.stderr)
    return seen


def check_followed(target: Any, given: Line, ignored: Sequence[str]) -> None:
    """Raise ValueError if generation_config.json changes the law of tokens and no flag says so.

    Engines such as vLLM follow this file by default, so their law would differ from ours. ``given``
    has the value of each entry that a flag can give, None if it is not given.
    """
    for name, value in target.generation_config.to_diff_dict().items():
        if name in NO_LAW | {*ignored} or name.startswith(("_", "output_", "return_")):
            continue
        if value is False or value in (None, NEUTRAL.get(name)) or given.get(name) is not None:
            continue
        told = f"{flag(name)}: must be given" if name in given else f"{name}: is not decoded here"
        raise ValueError(
            f"{told}, as the target's generation_config.json has {name} {value}, which vLLM "
            f"follows by default; if the engine does not: --ignored {name}"
        )


def decoded_record(
    pair: Pair,
    ids: Sequence[Sequence[int]],
    setting: Setting,
    seen: Observation | None,
    mode: str | None,
    cycles: int | None,
    max_new_tokens: int | None,
    seed: int,
) -> Line:
    """Decode with the models, then return :func:`record_of` of the rounds.

    By default three times as many rounds are decoded as the engine counted, within bounds.
    """
    thrice = 0 if seen is None else round(3 * seen.rounds)
    cycles = cycles or min(max(thrice, FEWEST_ROUNDS), MOST_ROUNDS)
    with TemporaryDirectory(prefix="expect-") as folder:
        trace = log_shown(
            pair, ids, Path(folder) / "trace", cycles, **vars(setting), seed=seed,
            draft_model=drafter_by(mode or MODES[0], pair.draft),
            max_new_tokens=max_new_tokens or defaults.MAX_NEW_TOKENS,
        )  # fmt: skip
        return record_of(trace, setting, seen)


def record_of(trace: Trace, setting: Setting, seen: Observation | None) -> Line:
    """Compute all numbers that are printed, in one pass over the rows."""
    progress, width = Progress("adding up rounds", len(trace)), setting.num_draft_tokens
    rule, verifier = setting.policy, setting.verifier
    expected = expect(trace, rule, verifier, num_draft_tokens=width, on_cycles=progress.update)
    record = _numbers(trace, setting, expected)
    if seen is not None:
        compared = compare_observed(expected, seen)
        record["compared"] = vars(compared) | {"sentence": compared.sentence}
    return record


def _numbers(trace: Trace, setting: Setting, expected: Expectation) -> Line:
    """Return the setting, the numbers over all positions, and a line for each position."""
    width = len(expected.accepted)
    # all in one list, as their intervals hold together
    names = ["tokens_per_call", *["accepted"] * width, *["if_reached"] * width]
    means = [expected.tokens_per_call, *expected.accepted, *expected.if_reached]
    tokens_per_call, *by_position = (
        {name: mean.value, f"{name}_low": low, f"{name}_high": high}
        for name, mean, (low, high) in zip(names, means, expected.intervals(means), strict=True)
    )
    accepted, if_reached = by_position[:width], by_position[width:]
    return {
        "policy": setting.policy.at_ends(trace.ends).spec,
        "verifier": setting.verifier.spec,
        "num_draft_tokens": width,
        "temperature": trace.header.temperature,
        "cuts": str(trace.header.cuts or "cuts unknown"),
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "greedy",
        "rounds": int(expected.rounds),
        "texts": expected.texts,
        "errors_of_these_prompts": bool(expected.strata.any()),
        **tokens_per_call,
        "positions": [
            {"position": place + 1} | accepted[place] | if_reached[place] for place in range(width)
        ],
    }


def _show(record: Line) -> int:
    print(
        "{policy}, {verifier}, K = {num_draft_tokens}, {drafts} drafts, temperature "
        "{temperature:g}, {cuts}: {rounds} rounds of {texts} texts".format(**record)
    )
    cells = [
        [str(line["position"]), _interval(line, "accepted"), _interval(line, "if_reached")]
        for line in record["positions"]
    ]
    print_table(["position", "reached and accepted", "accepted if reached"], cells)
    print(f"tokens a call {_interval(record, 'tokens_per_call')}")
    print(LEGEND + (OF_PROMPTS if record["errors_of_these_prompts"] else OF_ANY))
    if "compared" in record:
        _show_compared(record["compared"])
    return 0


def _interval(line: Line, name: str) -> str:
    return f"{line[name]:.4f} ({line[f'{name}_low']:.4f} to {line[f'{name}_high']:.4f})"


def _show_compared(compared: Line) -> None:
    heads = ["position", "expected if reached", "observed", "off by", "in errors", ""]
    cells = [
        [
            str(gap["position"]),
            "{expected:.4f} ±{expected_error:.4f}".format(**gap),
            "{observed:.4f} ±{observed_error:.4f}".format(**gap),
            f"{gap['observed'] - gap['expected']:+.4f}",
            f"{gap['errors']:+.1f}",
            "OFF" if gap["off"] else "",
        ]
        for gap in compared["gaps"]
    ]
    print()
    print_table(heads, cells)
    print(compared["sentence"])
    print(ASSUMED)
