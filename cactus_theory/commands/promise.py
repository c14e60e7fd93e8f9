"""``cactus-theory promise``: bounds on the answers of a decode under a cap on KL."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from cactus_theory.answer_bounds import (
    ROUNDING,
    EventBounds,
    confidence_bound,
    share,
)
from cactus_theory.base import arguments as check
from cactus_theory.base.files import parsed_json
from cactus_theory.base.tables import print_json, text_table, width_of_terminal

WIDEST = 100
RATES = (0.5, 0.9, 0.99)
NATS = ("cap", "per_token", "tokens", "lossless")
SHOWN_ONE = (
    "who is shown one answer and says which of the two wrote it is right at most {} of the time "
    "(guessing: 50 %)"
)
TARGET = (
    "the target is its law after temperature and truncation, which drafts are verified against; "
    "only KL bounds this, no other divergence's meter does"
)
NO_ROWS = "for a temperature that is as far from the target, give rows: --trace DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--cap", type=float, metavar="NATS", help="most KL of a whole answer")
    text = "most KL a token, as generate --cap, Ledger and CACTUS_CAP take it; needs --tokens"
    amount.add_argument("--per-token", type=float, metavar="NATS", help=text)
    add("--tokens", type=int, metavar="N", help="most new tokens of an answer")
    text = "how probable an event is under the target (0.5 0.9 0.99)"
    add("--rate", type=float, nargs="+", default=list(RATES), metavar="R", help=text)
    text = "so many first tokens are the target's own (ByPosition)"
    add("--lossless", type=int, default=0, metavar="N", help=text)
    text = "what answers were charged under the cap: JSON lines, a reading or what generate --json"
    add("--readings", metavar="FILE", help=f"{text} prints in each")
    add("--trace", metavar="DIR", help="logged rows: also say which temperature is as far from q")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Print bounds on the answers of a decode under the cap; return 0.

    The bounds are on the probability of an event of the answer, and on how often somebody who is
    shown one answer can say whether the target or the decode wrote it.
    """
    nats = {name: getattr(args, name) for name in NATS}
    events = [EventBounds(rate, **nats) for rate in args.rate]
    first, record, averages, empty = events[0], None, [], 0  # events differ in their rate alone
    if args.readings is not None:
        charged, empty = read_readings(args.readings, first)
        record = confidence_bound(charged, first.nats)
        averages = [EventBounds(rate, cap=record.bound) for rate in args.rate]
    # without a limit on tokens the bound rises once, after the lossless tokens
    last = first.tokens or first.lossless + 1
    # numbers of first tokens: the powers of 2, those that are lossless, and all
    places = {2**power for power in range(last.bit_length())} | {first.lossless or last, last}
    by_position = []
    if first.per_token is not None or first.lossless:  # otherwise the bound is equal at all places
        by_position = [first.after(place) for place in sorted(places) if place <= last]
    right = share((1 + first.total_variation) / 2)
    lines = [SHOWN_ONE.format(right), _equal(args.trace, first), TARGET, first.unit]
    if args.json:
        content = {"nats": first.nats, "total_variation": first.total_variation, "sentences": lines}
        tables = {"events": events, "by_position": by_position, "averaged": averages}
        content |= {name: list(map(_line, rows)) for name, rows in tables.items()}
        bound = None if record is None else vars(record)
        return print_json(content | {"confidence_bound": bound, "answers_left_out": empty})
    print(_table(events, "whatever the prompt"))
    if by_position:
        print(f"\n{_table(by_position, 'decided by the first tokens')}")
    if record is not None:
        print(f"\n{_table(averages, 'averaged over prompts')}")
        lines.insert(0, record.sentence)
    if empty:
        left = "1 answer of 0 tokens, as an aborted one is, was"
        left = left if empty == 1 else f"{empty} answers of 0 tokens, as aborted ones are, were"
        lines.insert(1, f"{left} left out")
    print()
    for sentence in lines:
        print(textwrap.fill(sentence, width_of_terminal(WIDEST)))
    return 0


def _line(bounds: EventBounds) -> dict[str, Any]:
    return vars(bounds) | {"nats": bounds.nats, "low": bounds.low, "high": bounds.high}


def _table(events: list[EventBounds], title: str) -> str:
    heads = ("tokens", "nats of KL", "under the target", "here at least", "at most")
    rows = [
        [str(one.tokens or "any"), f"{one.nats:.4g}", *map(share, (one.rate, one.low, one.high))]
        for one in events
    ]
    return text_table(heads, rows, f"probability of an event, {title}")


def _equal(place: str | None, bounds: EventBounds) -> str:
    """Return a sentence on the temperature that is as far from q, in nats a token, as the cap.

    ``place`` is the folder of a trace, on whose rows the temperature is computed; None without one.
    """
    if place is None:
        return NO_ROWS
    if bounds.tokens is None:
        raise ValueError(
            "--tokens: must be given with --trace, as temperatures are compared by the token"
        )
    from cactus_theory.traces import Trace
    from cactus_theory.traces.noise_floor import TEMPERATURES, equal_temperature

    trace, nats = Trace.open(place), bounds.nats / bounds.tokens
    if not trace.manifest.total("cycles"):
        raise ValueError(f"--trace: must hold rounds; {place} has none")
    if not trace.header.temperature:
        raise ValueError(f"--trace: must be of a temperature above 0; {place} is greedy")
    hot, equal = trace.header.temperature, equal_temperature(trace, nats)
    if equal is None:
        return f"{nats:.4g} nats a token are further from the target than temperature " + (
            f"{TEMPERATURES[0] * hot:.3g} is"
        )
    return (
        f"{nats:.4g} nats a token are as far from the target as temperature {equal.value:.3f} ± "
        f"{equal.standard_error:.3f} is instead of {hot:g} ({trace.texts} logged texts)"
    )


def read_readings(path: str | Path, bounds: EventBounds) -> tuple[list[float], int]:
    """Read the nats of each answer from a file of readings, and check them against the cap.

    The file has JSON lines with readings (``Reading.as_dict()``), such as ``generate --json``
    prints. Returns the nats, and how many answers of 0 tokens, such as aborted ones, were left out.
    Raises ValueError for another kind of file, or for an answer over the cap.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--readings: must be a readable file of JSON lines; {error}") from None
    charged, empty = list[float](), 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        reading = parsed_json(f"--readings: line {number} of {path} must be JSON", line)
        if not isinstance(reading, dict):
            raise ValueError(
                f"--readings: must hold JSON objects, a reading each; got {reading!r:.60}"
            )
        spent, tokens = reading.get("emitted_kl"), reading.get("num_tokens")
        if type(spent) not in (int, float) or type(tokens) is not int:
            raise ValueError(
                "--readings: must hold emitted_kl and num_tokens (the meter of another divergence, "
                f"or of regret, bounds no event); got {str(reading):.60}"
            )
        nats = check.number("--readings", spent, 0)
        if not check.whole_number("--readings: num_tokens", tokens, 0):
            empty += 1
            continue
        charged.append(nats)
        if bounds.tokens is not None and tokens > bounds.tokens:
            got = f"{bounds.tokens}, and line {number} of --readings has {tokens}"
            raise ValueError(f"--tokens: must be the most of any answer; got {got}")
        cap = bounds.cap
        allowed = bounds.after(tokens).nats if cap is None else bounds.nats
        if nats > allowed * (1 + ROUNDING):
            per_token = cap is not None and nats <= cap * tokens
            hint = ", which is within the cap a token: was --per-token meant?" if per_token else ""
            raise ValueError(
                f"--readings: line {number} must be within {allowed:.4g} nats, as a ledger keeps "
                f"it; got {nats:.4g}{hint}"
            )
    return charged, empty
