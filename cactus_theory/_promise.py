"""``cactus-theory promise``: what a cap on KL says about an answer."""

import argparse
import textwrap
from typing import Any

from cactus_theory import _arguments as check
from cactus_theory._report import print_json
from cactus_theory._terminal import text_table, width_of_terminal
from cactus_theory.certificates import RISK, Certificate, certificate, check_kept, read_readings
from cactus_theory.promises import Promise, promise, share

WIDEST = 100
RATES = (0.5, 0.9, 0.99)
TARGET = (
    "the target is its law after temperature and truncation, which drafts are verified against; "
    "only KL promises this, no other divergence's meter does"
)
NO_ROWS = "for a temperature that is as far from the target, give rows: --trace DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--cap", type=float, metavar="NATS", help="most KL of a whole answer")
    amount.add_argument(
        "--per-token",
        type=float,
        metavar="NATS",
        help="the same by the token, as generate --cap, Ledger and CACTUS_CAP take it; needs "
        "--tokens",
    )
    add("--tokens", type=int, metavar="N", help="most new tokens of an answer")
    add("--burst", type=float, default=0.0, metavar="NATS", help="a ledger's burst (0)")
    add("--rate", type=float, nargs="+", default=list(RATES), metavar="R",
        help="how probable an event is under the target (.5 .9 .99)")  # fmt: skip
    add("--lossless", type=int, default=0, metavar="N",
        help="so many first tokens are the target's own (ByPosition)")  # fmt: skip
    add("--readings", metavar="FILE",
        help="what answers were charged under the cap: JSON lines of numbers, of readings or as "
        "generate --json prints them")  # fmt: skip
    add("--alpha", type=float, default=RISK, help=f"risk of what readings certify ({RISK:g})")
    add("--trace", metavar="DIR", help="logged rows: says which temperature is as far")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Print what the cap promises; return 0."""
    whole = [_promised(args, rate) for rate in args.rate]
    first, seen, averages = whole[0], None, []
    if args.readings is not None:
        readings = read_readings(args.readings)
        check_kept(readings, first)
        seen = certificate([spent for spent, _ in readings], first.cap, args.alpha)
        averages = [promise(cap=seen.bound, rate=rate, averaged=True) for rate in args.rate]
    warmth = _temperature(args, first)
    if args.json:
        return print_json(_payload(whole, seen, averages, warmth))
    print(_table(whole, f"{first.cap:.4g} nats of KL an answer, whatever the prompt"))
    _say(first.shown_one)
    if len(places := _places(first)) > 1:
        print(f"\n{_by_position([first.after(place) for place in places])}")
    if seen is not None:
        print()
        _say(*seen.sentences)
        print(_table(averages, f"{seen.bound:.4g} nats of KL, averaged over prompts"))
    print()
    _say(warmth["sentence"] if warmth else NO_ROWS, TARGET, first.unit)
    return 0


def _say(*sentences: str) -> None:
    for sentence in sentences:
        print(textwrap.fill(sentence, width_of_terminal(WIDEST)))


def _promised(args: argparse.Namespace, rate: float) -> Promise:
    return promise(
        rate=check.number("--rate", rate, 0, 1),
        cap=args.cap,
        per_token=args.per_token,
        tokens=args.tokens,
        burst=args.burst,
        lossless=args.lossless,
    )


def _table(every: list[Promise], title: str) -> str:
    heads = ("an event of the target's answers", "here at least", "at most")
    rows = [[share(own.rate), share(own.low), share(own.high)] for own in every]
    return text_table(heads, rows, title)


def _places(own: Promise) -> list[int]:
    """Return numbers of first tokens at which the promise differs, up to the whole answer."""
    if own.per_token is None and not own.lossless:
        return []
    last = own.tokens or own.lossless + 1
    doubled = {2**power for power in range(last.bit_length())} if own.per_token else set()
    return sorted(place for place in {*doubled, own.lossless, last} if 0 < place <= last)


def _by_position(every: list[Promise]) -> str:
    heads = ("decided by the first tokens", "nats", "here at least", "at most")
    rows = [[str(own.tokens), f"{own.cap:.4g}", share(own.low), share(own.high)] for own in every]
    return text_table(heads, rows, f"an event of {share(every[0].rate)}, by position")


def _temperature(args: argparse.Namespace, own: Promise) -> dict[str, Any] | None:
    """Return the temperature that is as far from the target a token, from logged rows."""
    if args.trace is None:
        return None
    nats = own.per_token if own.tokens is None else own.cap / own.tokens
    if nats is None:
        raise ValueError(
            "--tokens: must be given with --trace, as temperatures are compared by the token; "
            "got --cap alone"
        )
    from cactus_theory.traces import Trace
    from cactus_theory.traces.tempering import TEMPERATURES, equal_temperature

    trace = Trace.open(args.trace)
    hot, found = trace.header.temperature, equal_temperature(trace, nats)
    if found is None:
        said = f"further from the target, {nats:.4g} nats a token, than temperature "
        said += f"{TEMPERATURES[0] * hot:.3g} is"
        return {"temperature": None, "standard_error": None, "sentence": said}
    return {
        "temperature": found.value,
        "standard_error": found.standard_error,
        "sentence": f"{nats:.4g} nats a token are as far from the target as temperature "
        f"{found.value:.3f} ± {found.standard_error:.3f} is instead of {hot:g} ({len(trace)} "
        f"logged rounds of {trace.texts} texts)",
    }


def _payload(
    whole: list[Promise],
    seen: Certificate | None,
    averages: list[Promise],
    warmth: dict[str, Any] | None,
) -> dict[str, Any]:
    first = whole[0]
    return {
        "cap": first.cap,
        "per_token": first.per_token,
        "tokens": first.tokens,
        "lossless": first.lossless,
        "total_variation": first.total_variation,
        "events": [vars(own) for own in whole],
        "by_position": [vars(first.after(place)) for place in _places(first)],
        "certificate": None if seen is None else vars(seen) | {"sentences": seen.sentences},
        "averaged": [vars(own) for own in averages],
        "temperature": warmth,
        "sentences": [*(own.sentence for own in whole), first.shown_one, TARGET, first.unit],
    }
