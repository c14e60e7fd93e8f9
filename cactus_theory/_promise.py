"""``cactus-theory promise``: what a cap on KL says about an answer."""

import argparse
import textwrap
from typing import Any

from cactus_theory._report import print_json
from cactus_theory._terminal import text_table, width_of_terminal
from cactus_theory.certificates import RISK, certificate, read_readings
from cactus_theory.promises import Promise, share

WIDEST = 100
RATES = (0.5, 0.9, 0.99)
NATS = ("cap", "per_token", "tokens", "burst", "lossless")
SHOWN_ONE = (
    "who is shown one answer and says which of the two wrote it is right at most {} of the time "
    "(guessing: 50 %)"
)
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
    nats = {name: getattr(args, name) for name in NATS}
    every = [Promise(rate, **nats) for rate in args.rate]
    first, seen, averages = every[0], None, []
    if args.readings is not None:
        seen = certificate(read_readings(args.readings, first), first.nats, args.alpha)
        averages = [Promise(rate, cap=seen.bound, averaged=True) for rate in args.rate]
    last = first.tokens or first.lossless + 1
    places = {2**power for power in range(last.bit_length())} | {first.lossless or last, last}
    along = [first.after(place) for place in sorted(places) if place <= last]
    by_position = along if first.per_token is not None or first.lossless else []
    said = [SHOWN_ONE.format(share((1 + first.total_variation) / 2)), _equal(args, first), TARGET,
            first.unit]  # fmt: skip
    if args.json:
        made = {"nats": first.nats, "total_variation": first.total_variation, "sentences": said}
        tables = {"events": every, "by_position": by_position, "averaged": averages}
        made |= {name: list(map(_line, own)) for name, own in tables.items()}
        bound = None if seen is None else vars(seen) | {"bound": seen.bound}
        return print_json(made | {"certificate": bound})
    print(_table(every, "whatever the prompt"))
    if by_position:
        print(f"\n{_table(by_position, 'decided by the first tokens')}")
    if seen is not None:
        print(f"\n{_table(averages, 'averaged over prompts')}")
        said.insert(0, seen.sentence)
    print()
    for sentence in said:
        print(textwrap.fill(sentence, width_of_terminal(WIDEST)))
    return 0


def _line(own: Promise) -> dict[str, Any]:
    return vars(own) | {"nats": own.nats, "low": own.low, "high": own.high}


def _table(every: list[Promise], title: str) -> str:
    heads = ("tokens", "nats of KL", "under the target", "here at least", "at most")
    rows = [
        [str(own.tokens or "any"), f"{own.nats:.4g}", *map(share, (own.rate, own.low, own.high))]
        for own in every
    ]
    return text_table(heads, rows, f"probability of an event, {title}")


def _equal(args: argparse.Namespace, own: Promise) -> str:
    """Return which temperature is as far from the target a token, if there are rows."""
    if args.trace is None:
        return NO_ROWS
    if own.tokens is None:
        raise ValueError(
            "--tokens: must be given with --trace, as temperatures are compared by the token"
        )
    from cactus_theory.traces import Trace
    from cactus_theory.traces.tempering import TEMPERATURES, equal_temperature

    trace, nats = Trace.open(args.trace), own.nats / own.tokens
    hot, found = trace.header.temperature, equal_temperature(trace, nats)
    if found is None:
        return f"{nats:.4g} nats a token are further from the target than temperature " + (
            f"{TEMPERATURES[0] * hot:.3g} is"
        )
    return (
        f"{nats:.4g} nats a token are as far from the target as temperature {found.value:.3f} ± "
        f"{found.standard_error:.3f} is instead of {hot:g} ({trace.texts} logged texts)"
    )
