"""What a run found, in three sentences: right or wrong, how fast, what it gains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..common.grid import PLAIN, at
from .goals import MOST_KL
from .sections import Note, Row
from .verify import BAND, LOSSLESS

# checks and failures named in a sentence before it only counts them
NAMED = 3
Tables = Mapping[str, Sequence[Row]]


def verdict(tables: Tables, notes: Sequence[Note]) -> list[str]:
    """Return the sentences, each of one line."""
    said = [_right(tables.get("agreement", ())), *_fast(tables.get("verify", ()))]
    said += _gain(tables.get("decode", ()))
    broken = [note.what for note in notes if note.kind == "failed"]
    if broken:
        said.append(f"FAILED to run, {len(broken)} in number: {_few(broken)}.")
    return said


def method(row: Row) -> str:
    """Return the policy with its knobs, and the verifier unless it is the usual one."""
    return at(":".join(filter(None, [row["policy"], row["knob"]])), row["verifier"])


def failure(row: Row) -> str:
    """Return which check a row is about."""
    about = [f"{key} {row[key]}" for key in ("policy", "vocabulary", "family") if row.get(key)]
    return ", ".join([str(row["check"]), *about])


def _right(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if row["passed"] is not None]
    wrong = [row for row in ran if not row["passed"]]
    absent = f"; {_few(row['check'] for row in rows if row['passed'] is None)}: not there"
    absent *= len(ran) < len(rows)
    if not ran:
        return f"Right or wrong: not checked{absent}."
    if wrong:
        return (
            f"WRONG: {len(wrong)} of {len(ran)} checks fail: {_few(map(failure, wrong))}{absent}."
        )
    return f"Right: all {len(ran)} checks pass{absent}."


def _fast(rows: Sequence[Row]) -> list[str]:
    said = []
    for spec in (LOSSLESS, BAND):
        own = [row for row in rows if (row["policy"], row["verifier"]) == (spec, "chain")]
        if own:
            said.append(_step(max(own, key=lambda row: (row["vocabulary"], row["batch"]))))
    return said or ["How fast a verification is: not measured."]


def _step(row: Row) -> str:
    where = "B = {batch}, K = {drafted}, V = {vocabulary:,}".format(**row)
    start = f"Verification by {row['policy']} at {where}"
    if row["kernel_us"] is None:
        floor = f"no kernel (floor {row['floor_us']:,.0f})"
        return f"{start}: {row['torch_us']:,.0f} µs by torch, {floor}."
    return (
        f"{start}: {row['kernel_us']:,.0f} µs, {row['share_of_bandwidth']:.0%} of copy bandwidth, "
        f"{row['torch_over_kernel']:.1f} times as fast as torch."
    )


def _gain(rows: Sequence[Row]) -> list[str]:
    said = []
    for place in dict.fromkeys((row["target"], row["draft"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["target"], row["draft"], row["batch"]) == place]
        start = "{} + {}, batch {}".format(*place)
        for name, most in (("lossless", 1e-9), (f"at most {MOST_KL:g} nats a token", MOST_KL)):
            best = _fastest(own, most)
            if best is not None:
                said.append(f"{start}, {name}: {_speed(best)}.")
    return said or ["What drafting gains: not measured."]


def _fastest(rows: Sequence[Row], most: float) -> Row | None:
    drafted = [row for row in rows if row["num_draft_tokens"]]
    own = [row for row in drafted if _spent(row) is not None and _spent(row) <= most]
    return max(own, key=lambda row: row["tokens_per_second"], default=None)


def _spent(row: Row) -> Any:
    """Return nats a token, 0 for what is lossless by its construction, None if unknown."""
    return 0.0 if row["policy"] == LOSSLESS else row["emitted_kl_per_token"]


def _speed(row: Row) -> str:
    return (
        f"{method(row)} at K = {row['num_draft_tokens']} makes {row['tokens_per_second']:,.0f} "
        f"tokens/s, {row['speedup']:.2f} times {PLAIN} decoding"
    )


def _few(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = [f"and {len(every) - NAMED} more"] * (len(every) > NAMED)
    return ", ".join([*every[:NAMED], *more])
