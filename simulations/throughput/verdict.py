"""What a throughput run says: its tables on a terminal, then in words which method to use."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.grid import HF_ASSISTED, HF_PLAIN, PLAIN, at
from ..common.terminal import fitted, shown, width_of_terminal

WIDEST = 100
# the last ones are left out where the terminal is narrower
HEADS = (
    "method", "K", "tokens/s", "90 %", "x plain", "KL/token", "AL", "tokens\n/call",
    "nats\n/token", "parses", "outside",
)  # fmt: skip
# nats per token that a reader may be ready to pay
LEVELS = (0.05, 0.1)
# emitted KL below this is rounding
LOSSLESS = 1e-9
Row = dict[str, Any]


def name(row: Row) -> str:
    """Return the method with its knobs and K."""
    drafted = f", K {row['num_draft_tokens']}" if row["num_draft_tokens"] else ""
    return method(row) + drafted


def method(row: Row) -> str:
    """Return the method with its knobs, and the verifier unless it is the usual one."""
    return at(spec(row), row["verifier"])


def spec(row: Row) -> str:
    """Return the method with its knobs."""
    return ":".join(filter(None, [row["method"], row["knob"]]))


def emitted_kl(row: Row) -> float | None:
    """Return nats per token, 0 for what is lossless by construction, None if unknown."""
    if row["method"] in (PLAIN, HF_PLAIN, HF_ASSISTED):
        return 0.0
    return row["emitted_kl_per_token"]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return the sentences, one list item a paragraph, for each batch size in turn."""
    found = []
    for batch in sorted({row["batch"] for row in rows}):
        own = [row for row in rows if row["batch"] == batch]
        found += [f"Batch {batch}.", *(f"  {sentence}" for sentence in _of_batch(own))]
    return found


def _of_batch(rows: Sequence[Row]) -> list[str]:
    plain = next((row for row in rows if row["method"] == PLAIN), None)
    said = [_lossless(rows, plain)]
    for level in LEVELS:
        best = _fastest(rows, level)
        if best is not None and (emitted_kl(best) or 0.0) > LOSSLESS:
            said.append(
                f"At most {level:g} nats per token: {name(best)}, {_figures(best)}"
                f"{_beside(best, plain)}; it emits {emitted_kl(best):.3g}."
            )
        else:
            rival = "plain decoding" if best is plain else "the fastest lossless method"
            said.append(f"At most {level:g} nats per token: nothing is faster than {rival}.")
    return said


def _lossless(rows: Sequence[Row], plain: Row | None) -> str:
    best = _fastest(rows, LOSSLESS)
    if best is None:
        return "No lossless method was run."
    if best is not plain:
        return f"Lossless: {name(best)} is fastest, {_figures(best)}{_beside(best, plain)}."
    said = f"Lossless: plain decoding is faster than drafting, {_figures(best)}"
    drafted = _fastest([row for row in rows if row["num_draft_tokens"]], LOSSLESS)
    if drafted is None:
        return f"{said}; no drafting was tried."
    return f"{said}; {name(drafted)} makes {_figures(drafted)}{_beside(drafted, plain)}."


def _fastest(rows: Sequence[Row], level: float) -> Row | None:
    known = [(emitted_kl(row), row) for row in rows]
    allowed = [row for spent, row in known if spent is not None and spent <= level]
    return max(allowed, key=lambda row: row["tokens_per_second"], default=None)


def _figures(row: Row) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s"


def _beside(row: Row, plain: Row | None) -> str:
    """Return how much faster than plain decoding, with its interval."""
    ratio = row["speedup_over_plain"]
    if plain is None or ratio is None:
        return ""
    low, high = row["speedup_over_plain_low"], row["speedup_over_plain_high"]
    said = f", {ratio:.2f} times plain decoding ({low:.2f} to {high:.2f})"
    if low == high:  # one repeat says nothing about the next
        return f", {ratio:.2f} times plain decoding"
    if high < 1:
        return f"{said}: plain decoding is faster"
    return said if low > 1 else f"{said}: no clear difference"


def compared(rows: Sequence[Row]) -> str:
    """Return one sentence about two families at equal emitted KL."""
    first, second = rows[0]["first"], rows[0]["second"]
    ratios = [row["ratio"] for row in rows]
    ahead, sure = sum(r > 1 for r in ratios), sum((row["ratio_low"] or 0) > 1 for row in rows)
    return (
        f"At equal emitted KL and the same K, {first} is faster than {second} at {ahead} of "
        f"{len(rows)} places ({sure} of them beyond their interval); the middle ratio is "
        f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}."
    )


LEGEND = """\
x plain: median over repeats of the ratio to plain decoding in that repeat
AL: drafted tokens that are accepted per target call"""


def show(tables: Mapping[str, Sequence[Row]]) -> str:
    """Return every method at its fastest K, what wins at equal KL, and the verdict."""
    width, rows = width_of_terminal(WIDEST), tables["throughput"]
    several = len({row["verifier"] for row in rows if row["verifier"]}) > 1
    heads = (HEADS[0], "verifier", *HEADS[1:]) if several else HEADS
    parts = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        title = f"\nbatch {batch}, each method at its fastest K (every K is in throughput.csv)"
        tuned = _tuned([row for row in rows if row["batch"] == batch])
        parts.append(fitted(heads, [_cells(row, several) for row in tuned], width, title))
    parts += [textwrap.fill(line, width, subsequent_indent="    ") for line in LEGEND.split("\n")]
    equal, said = tables.get("throughput_equal_kl", []), verdict(rows)
    if equal:
        heads = ("KL/token", "K", "batch", equal[0]["first"], equal[0]["second"], "ratio", "90 %")
        title = "\ntokens per second at equal emitted KL"
        parts.append(fitted(heads, [_equal_cells(row) for row in equal], width, title))
        said.append(compared(equal))
    filled = [textwrap.fill(sentence, width, subsequent_indent="    ") for sentence in said]
    return "\n".join([*parts, "", *filled])


def _tuned(rows: Sequence[Row]) -> list[Row]:
    """Return each method at its fastest K, fastest first."""
    rows = sorted(rows, key=lambda row: -row["tokens_per_second"])
    best = {method(row): row for row in reversed(rows)}
    return [row for row in rows if best[method(row)] is row]


def _cells(row: Row, several: bool) -> list[str]:
    spent = emitted_kl(row)
    return [
        *((spec(row), row["verifier"] or "–") if several else (method(row),)),
        str(row["num_draft_tokens"] or "–"),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second_low']:,.0f}–{row['tokens_per_second_high']:,.0f}",
        _fixed(row["speedup_over_plain"]),
        "lossless" if spent is not None and spent < LOSSLESS else _fixed(spent, 4),
        *(_fixed(row[name]) for name in ("accepted_per_call", "tokens_per_call")),
        *(_fixed(row[name]) for name in ("target_nats_per_token", "parses", "outside_forwards")),
    ]


def _equal_cells(row: Row) -> list[str]:
    return [
        shown(row["kl"]), str(row["num_draft_tokens"]), str(row["batch"]),
        f"{row['tokens_per_second_first']:,.0f}", f"{row['tokens_per_second_second']:,.0f}",
        _fixed(row["ratio"], 3), f"{_fixed(row['ratio_low'], 3)}–{_fixed(row['ratio_high'], 3)}",
    ]  # fmt: skip


def _fixed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
