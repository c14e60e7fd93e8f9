"""What a run found, in sentences, and as one web page of what the JSON holds."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from cactus_theory.base.tables import shown

from ..common.grid import PLAIN, at
from .goals import MET, MISSED, MOST_KL, UNMEASURED
from .sections import SECTIONS, Note, Row, Tables
from .verify import BAND, LOSSLESS

# figures of others: issue text and theory notes; measured by none of our runs
PUBLISHED = "published: c = .285–.316, a block pass 2.4–2.9 steps"
# checks and failures named in a sentence before it only counts them
NAMED = 3
COLOURS = {MET: "good", MISSED: "bad", UNMEASURED: "quiet"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4;
         vertical-align: bottom; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
.wide { overflow-x: auto; } img { max-width: 100%; } ul { padding-left: 1.2rem; }
.good { color: #2d6a4f; font-weight: 600; } .bad { color: #a4243b; font-weight: 600; }
.quiet { color: #6b6b6b; }
"""
REHEARSAL = (
    '<p class="bad">A rehearsal at tiny sizes: no number here says anything about speed.</p>\n'
)
PICTURE = (
    '<p><img alt="verify time against its floor, speed against emitted KL, the parts of a round, '
    'prediction against measurement" src="data:image/png;base64,{}"></p>\n'
)
# head of a table: column of its rows
GOALS = {"goal": "goal", "needed": "needed", "measured": "measured", "": "verdict"}
VERIFY = {
    "policy": "policy", "verifier": "verifier", "B": "batch", "K": "drafted",
    "kernel µs": "kernel_us", "torch µs": "torch_us", "floor µs": "floor_us",
    "of copy bandwidth": "share_of_bandwidth", "torch ÷ kernel": "torch_over_kernel",
    "÷ lossless": "over_lossless",
}  # fmt: skip
DECODE = {
    "method": "method", "K": "num_draft_tokens", "tokens/s": "tokens_per_second",
    "× plain": "speedup", "tokens a call": "tokens_per_call", "AL": "accepted_per_call",
    "nats a token": "emitted_kl_per_token", "× without prompts": "net_speedup",
    "predicted ×": "predicted_speedup",
    "of predicted": "share_of_predicted", "of roofline": "share_of_roofline", "score": "score",
}  # fmt: skip
COSTS = {
    "target + draft, batch": "setup", "K": "num_draft_tokens", "decode step, ms": "step_ms",
    "c": "c", "v": "v", "fixed, ms a round": "fixed_ms", "prefill, ms": "prefill_ms",
    "roofline, ms": "roofline_ms",
}  # fmt: skip
DEVICE = {"quantity": "quantity", "value": "value", "": "unit"}


def verdict(tables: Tables, notes: Sequence[Note]) -> list[str]:
    """Return what was found, in sentences of one line: is it right, how fast, what it gains."""
    sentences = [_right(tables.get("agreement", ())), *_fast(tables.get("verify", ()))]
    sentences += _gain(tables.get("decode", ()))
    broken = [note.what for note in notes if note.kind == "failed"]
    if broken:
        sentences.append(f"FAILED to run, {len(broken)} in number: {_few(broken)}.")
    return sentences


def method(row: Row) -> str:
    """Return the policy with its knobs, and the verifier unless it is the usual one."""
    return at(":".join(filter(None, [row["policy"], row["knob"]])), row["verifier"])


def _check_of(row: Row) -> str:
    about = [f"{key} {row[key]}" for key in ("policy", "vocabulary", "family") if row.get(key)]
    return ", ".join([str(row["check"]), *about])


def _right(rows: Sequence[Row]) -> str:
    decided = [row for row in rows if row["passed"] is not None]
    failures = [row for row in decided if not row["passed"]]
    absent = f"; {_few(row['check'] for row in rows if row['passed'] is None)}: not there"
    absent *= len(decided) < len(rows)
    if not decided:
        return f"Right or wrong: not checked{absent}."
    if failures:
        names = _few(map(_check_of, failures))
        return f"WRONG: {len(failures)} of {len(decided)} checks fail: {names}{absent}."
    return f"Right: all {len(decided)} checks pass{absent}."


def _fast(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for spec in (LOSSLESS, BAND):
        steps = [row for row in rows if (row["policy"], row["verifier"]) == (spec, "chain")]
        if steps:
            sentences.append(_step(max(steps, key=lambda row: (row["vocabulary"], row["batch"]))))
    return sentences or ["How fast a verification is: not measured."]


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
    sentences = []
    for setup, setup_rows in _setups(rows).items():
        for name, limit in (("lossless", 1e-9), (f"at most {MOST_KL:g} nats a token", MOST_KL)):
            best = _fastest(setup_rows, limit)
            if best is not None:
                sentences.append(f"{setup}, {name}: {_speed(best)}.")
    return sentences or ["What drafting gains: not measured."]


def _setups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    setups: dict[str, list[Row]] = {}
    for row in rows:
        setups.setdefault("{target} + {draft}, batch {batch}".format(**row), []).append(row)
    return setups


def _fastest(rows: Sequence[Row], limit: float) -> Row | None:
    drafted = [row for row in rows if row["num_draft_tokens"]]
    affordable = [row for row in drafted if (spent := _spent(row)) is not None and spent <= limit]
    return max(affordable, key=lambda row: row["tokens_per_second"], default=None)


def _spent(row: Row) -> float | None:
    """Return nats a token, 0 for what is lossless by its construction, None if unknown."""
    return 0.0 if row["policy"] == LOSSLESS else row["emitted_kl_per_token"]


def _speed(row: Row) -> str:
    return (
        f"{method(row)} at K = {row['num_draft_tokens']} makes {row['tokens_per_second']:,.0f} "
        f"tokens/s, {row['speedup']:.2f} times {PLAIN} decoding"
    )


def _few(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    rest = [f"and {len(unique) - NAMED} more"] * (len(unique) > NAMED)
    return ", ".join([*unique[:NAMED], *rest])


def page(content: Mapping[str, Any], picture: bytes | None) -> str:
    """Return the page of a report as text; it loads no other files."""
    origin = content["provenance"]
    device = escape(origin["device"])
    items = "".join(f"<li>{_marked(line)}</li>" for line in content["verdict"])
    body = "".join(f"<h2>{escape(title)}</h2>\n{html}\n" if title else html
                   for title, html in _parts(content, picture) if html)  # fmt: skip
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gpu-check: {device}</title>
<style>{STYLE}</style>
<h1>{device}</h1>
{REHEARSAL * (origin.get("tiny") == "yes")}<ul>{items}</ul>
{body}</html>
"""


def _parts(content: Mapping[str, Any], picture: bytes | None) -> Iterator[tuple[str, str]]:
    """Yield titles and what is under them; nothing is shown where that is empty."""
    tables: Tables = defaultdict(list, content["tables"])
    yield "Goals", _table(GOALS, tables["goals"])
    if picture is not None:
        yield "", PICTURE.format(base64.b64encode(picture).decode())
    setups = _setups(tables["decode"])
    best = (
        f"<p>{escape(setup)}</p>{_table(DECODE, _fastest_of_each(rows))}"
        for setup, rows in setups.items()
    )
    yield "Decoding, each method at its fastest K", "".join(best)
    lossless = [row | {"setup": setup} for setup, rows in setups.items() for row in rows
                if method(row) == LOSSLESS]  # fmt: skip
    yield f"What a round costs ({PUBLISHED})", _table(COSTS, lossless)
    yield "One verification", "".join(_steps(tables["verify"]))
    failures = [{"check": _check_of(row)} for row in tables["agreement"] if row["passed"] is False]
    yield "Checks that fail", _table({"check": "check"}, failures)
    yield "The machine", _table(DEVICE, tables["device"])
    for kind in ("failed", "skipped"):
        notes = [note for note in content["notes"] if note["kind"] == kind]
        yield kind.capitalize(), _table({"what": "what", "why": "why"}, notes)
    lines = [f"{escape(key)}: {escape(value)}" for key, value in content["provenance"].items()]
    lines += [f"{SECTIONS[name].summary}: {s:.0f} s" for name, s in content["seconds"].items()]
    yield "How this was made", '<p class="quiet">' + "<br>".join(lines) + "</p>"


def _fastest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the row of each method at its fastest K."""
    fastest: dict[str, Row] = {}
    for row in rows:
        name = method(row)
        best = fastest.setdefault(name, row | {"method": name})
        if row["tokens_per_second"] > best["tokens_per_second"]:
            fastest[name] = row | {"method": name}
    return list(fastest.values())


def _steps(rows: Sequence[Row]) -> Iterator[str]:
    for vocab in sorted({row["vocabulary"] for row in rows}, reverse=True):
        steps = [row for row in rows if row["vocabulary"] == vocab]
        yield f"<p>V = {vocab:,}</p>" + _table(VERIFY, steps)


def _table(heads: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the table without columns that hold nothing, '' for one without rows."""
    used = {head: key for head, key in heads.items()
            if any(row.get(key) not in (None, "") for row in rows)}  # fmt: skip
    if not used:
        return ""
    top = "".join(f"<th>{escape(head)}</th>" for head in used)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(key)) for key in used.values())}</tr>\n" for row in rows
    )
    return f'<div class="wide"><table>\n<tr>{top}</tr>\n{body}</table></div>'


def _cell(value: Any) -> str:
    colour = COLOURS.get(value, "") if isinstance(value, str) else ""
    text = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1e4 else shown(value)
    return f'<td class="{colour}">{escape(text)}</td>' if colour else f"<td>{escape(text)}</td>"


def _marked(line: str) -> str:
    bad = "WRONG" in line or "FAILED" in line
    return f'<span class="bad">{escape(line)}</span>' if bad else escape(line)
