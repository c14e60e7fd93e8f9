"""What a throughput table says, in words: which method to use, and what it gains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..common.grid import HF_ASSISTED, HF_PLAIN, PLAIN, at

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
