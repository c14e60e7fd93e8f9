"""The report as one web page: the verdict first, then goals, pictures and tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..common.terminal import shown
from . import goals, words
from .sections import SECTIONS, Row

# figures of others: issue text and theory notes; measured by none of our runs
PUBLISHED = "published: c = .285–.316, a block pass 2.4–2.9 steps"
COLOURS = {goals.MET: "good", goals.MISSED: "bad", goals.UNMEASURED: "quiet"}
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
    "target + draft, batch": "place", "K": "num_draft_tokens", "decode step, ms": "step_ms",
    "c": "c", "v": "v", "fixed, ms a round": "fixed_ms", "prefill, ms": "prefill_ms",
    "roofline, ms": "roofline_ms",
}  # fmt: skip
DEVICE = {"quantity": "quantity", "value": "value", "": "unit"}
Tables = Mapping[str, Sequence[Row]]


def page(report: Any) -> str:
    """Return the page as text; it loads no other files."""
    made = report.provenance
    lines = words.verdict(report.tables, report.notes)
    said = "".join(f"<li>{_marked(line)}</li>" for line in lines)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gpu-check: {escape(made["device"])}</title>
<style>{STYLE}</style>
<h1>{escape(made["device"])}</h1>
{_rehearsal(made)}<ul>{said}</ul>
{"".join(_parts(report))}</html>
"""


def _rehearsal(made: Mapping[str, str]) -> str:
    if made.get("tiny") != "yes":
        return ""
    return (
        '<p class="bad">A rehearsal at tiny sizes: no number here says anything about speed.</p>\n'
    )


def _parts(report: Any) -> Iterable[str]:
    tables: Tables = report.tables
    yield _section("Goals", _table(GOALS, tables.get("goals", ())))
    if report.picture is not None:
        code = base64.b64encode(report.picture).decode()
        about = "verify time against its floor, speed against emitted KL, the parts of a round, "
        about += "prediction against measurement"
        yield f'<p><img alt="{about}" src="data:image/png;base64,{code}"></p>\n'
    yield _section("Decoding, each method at its fastest K", "".join(_decodes(tables)))
    yield _section(f"What a round costs ({PUBLISHED})", _table(COSTS, _costs(tables)))
    yield _section("One verification", "".join(_steps(tables)))
    yield _section("Checks that fail", _table({"check": "check"}, _wrong(report)))
    yield _section("The machine", _table(DEVICE, tables.get("device", ())))
    for kind in ("failed", "skipped"):
        own = [vars(note) for note in report.notes if note.kind == kind]
        yield _section(kind.capitalize(), _table({"what": "what", "why": "why"}, own))
    yield _section("How this was made", _made(report))


def _made(report: Any) -> str:
    entries = [f"{escape(key)}: {escape(value)}" for key, value in report.provenance.items()]
    entries += [f"{SECTIONS[name].summary}: {s:.0f} s" for name, s in report.seconds.items()]
    return '<p class="quiet">' + "<br>".join(entries) + "</p>"


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}\n" if body else ""


def _table(heads: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the table without columns that hold nothing, '' for one without rows."""
    used = {head: key for head, key in heads.items() if any(_filled(row.get(key)) for row in rows)}
    if not used:
        return ""
    top = "".join(f"<th>{escape(head)}</th>" for head in used)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(key)) for key in used.values())}</tr>\n" for row in rows
    )
    return f'<div class="wide"><table>\n<tr>{top}</tr>\n{body}</table></div>'


def _filled(value: Any) -> bool:
    return value is not None and value != ""


def _cell(value: Any) -> str:
    colour = COLOURS.get(value, "") if isinstance(value, str) else ""
    text = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1e4 else shown(value)
    return f'<td class="{colour}">{escape(text)}</td>' if colour else f"<td>{escape(text)}</td>"


def _marked(line: str) -> str:
    bad = "WRONG" in line or "FAILED" in line
    return f'<span class="bad">{escape(line)}</span>' if bad else escape(line)


def _decodes(tables: Tables) -> Iterable[str]:
    for place, rows in _places(tables).items():
        best: dict[str, Row] = {}
        for row in rows:
            own = best.setdefault(words.method(row), row)
            if row["tokens_per_second"] > own["tokens_per_second"]:
                best[words.method(row)] = row
        yield f"<p>{escape(place)}</p>" + _table(
            DECODE, [row | {"method": name} for name, row in best.items()]
        )


def _places(tables: Tables) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in tables.get("decode", ()):
        place = "{target} + {draft}, batch {batch}".format(**row)
        found.setdefault(place, []).append(row)
    return found


def _costs(tables: Tables) -> list[Row]:
    """Return the costs of the lossless rows, one a place and K."""
    return [
        row | {"place": place}
        for place, rows in _places(tables).items()
        for row in rows
        if words.method(row) == words.LOSSLESS
    ]


def _steps(tables: Tables) -> Iterable[str]:
    rows = tables.get("verify", ())
    for vocab in sorted({row["vocabulary"] for row in rows}, reverse=True):
        own = [row for row in rows if row["vocabulary"] == vocab]
        yield f"<p>V = {vocab:,}</p>" + _table(VERIFY, own)


def _wrong(report: Any) -> list[Row]:
    return [{"check": words.failure(row)} for row in report.wrong]
