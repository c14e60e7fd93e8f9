"""The tables and the verdict as a terminal shows them, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from ..common.terminal import fitted, shown, width_of_terminal
from .verdict import LOSSLESS, Row, compared, emitted_kl, method, spec, verdict

WIDEST = 100
# the last ones are left out where the terminal is narrower
HEADS = (
    "method", "K", "tokens/s", "90 %", "x plain", "KL/token", "AL", "tokens\n/call",
    "nats\n/token", "parses", "outside",
)  # fmt: skip


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
