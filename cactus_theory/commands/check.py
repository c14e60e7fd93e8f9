"""``cactus-theory check file.py:rule``: progress, report, tests to paste, exit code, a web page."""

import sys
from argparse import ArgumentParser, Namespace
from html import escape
from pathlib import Path

from cactus_theory.base import arguments as check
from cactus_theory.base.files import write_whole
from cactus_theory.base.tables import print_json
from cactus_theory.testing._report import (
    Finding,
    Report,
    Verdict,
    message,
    number,
    pasted_test,
    payload,
    row,
    summary,
    table,
)

# pairs of rows that catch every planted fault, most of them within 50
DEFAULT_EXAMPLES = 2000
# seconds for one property on a few rows, far more than rules usually need
DEFAULT_TIMEOUT = 30.0
# the longest time that alarms of the system are good for, in seconds
LONGEST = 1e6
# exit codes; 2 is for a request or a file that cannot be read
STATUS = {"passed": 0, "failed": 1, "inconclusive": 3}


def add_arguments(parser: ArgumentParser) -> None:
    """Describe the command line; needs no optional package."""
    parser.add_argument(
        "rule",
        metavar="FILE.py:NAME",
        help="a function under @ct.rule, a Policy or Schedule; :knob=value",
    )
    parser.add_argument("--examples", type=int, default=DEFAULT_EXAMPLES, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other rows")
    parser.add_argument("--laws", "--properties", metavar="A,B", help="check these properties only")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help="seconds for one question about a few rows, more for more rows and for slow rules; "
        f"{DEFAULT_TIMEOUT:g} by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--html", metavar="FILE.html", help="also write a page with pictures")


def run(args: Namespace) -> int:
    """Return 0 if every property holds, 1 if one is broken, 3 if one could not be decided."""
    check.optional_module("hypothesis", "testing")
    from cactus_theory.testing._check import check_file

    check.number("--timeout", args.timeout, 0, LONGEST, open_low=True)
    check.number("--seed", args.seed, 0)
    if args.html is not None:
        _check_writable(Path(args.html))
    laws = None if args.laws is None else [name.strip() for name in args.laws.split(",")]

    def progress(law: str, number: int, total: int) -> None:
        if not args.json:
            print(f"{number:>3}/{total} {law}", file=sys.stderr, flush=True)

    report = check_file(
        args.rule,
        examples=int(check.number("--examples", args.examples, 1)),
        seed=args.seed,
        laws=laws,
        timeout=args.timeout,
        progress=progress,
    )
    if args.json:
        print_json(payload(report, args.rule))
    else:
        _print(report, args.rule)
    if args.html is not None:
        sys.stdout.flush()
        write_whole(args.html, page(report, args.rule).encode())
    return STATUS[report.outcome]


def _print(report: Report, source: str) -> None:
    """Print the table, every finding with a test to paste, and the summary."""
    print(f"{report.rule}\n{report.declares}\n\n{table(report)}")
    for finding in report.findings + report.undecided:
        print(f"\n{message(report.rule, finding, finding in report.undecided)}")
        if finding.target:
            print(f"\n# paste into a test file beside the rule\n{pasted_test(source, finding)}")
    print("".join(f"\n{line}" for line in (report.advice, summary(report)) if line))


def _check_writable(path: Path) -> None:
    """Raise OSError for a file that could not be written after the run."""
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise OSError(f"--html: must be a writable file; got {path} ({error.strerror})") from None
    if new:
        path.unlink()


# size and margins of a picture, in pixels
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 44, 34, 14
# more bars than this are too thin to see
MOST_TOKENS = 24
SERIES = (("target q", "#1b4965"), ("draft p", "#e07a5f"), ("emitted", "#3d8b5f"))

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
         border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.fails { color: #a4243b; font-weight: 600; } .holds { color: #2d6a4f; } .quiet { color: #777; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .1rem .8rem; margin: .5rem 0; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: #f5f5f2; padding: .8rem; overflow-x: auto; font-size: .85rem; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""


def page(report: Report, source: str) -> str:
    """Return the page as text; it loads no other files."""
    verdict = summary(report)
    colour = {"passed": "holds", "failed": "fails", "inconclusive": "quiet"}[report.outcome]
    laws = "\n".join(_line(v) for v in report.laws)
    findings = "\n".join(_section(report, f, source) for f in report.findings + report.undecided)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.rule)}: {verdict}</title>
<style>{STYLE}</style>
<h1>{escape(report.rule)}: <span class="{colour}">{verdict}</span></h1>
<p class="quiet">{escape(report.declares)}</p>
<table>
<tr><th>property</th><th>verdict</th><th>examples</th><th>worst margin</th></tr>
{laws}
</table>
{findings}
</html>
"""


def _line(verdict: Verdict) -> str:
    kind = verdict.verdict if verdict.verdict in ("holds", "fails") else "quiet"
    name = escape(verdict.law)
    label = f'<a href="#{name}">{name}</a>' if verdict.finding is not None else name
    margin = "" if verdict.worst is None else number(verdict.worst)
    return (
        f'<tr><td>{label}<br><span class="quiet">{escape(verdict.statement)}</span></td>'
        f'<td class="{kind}">{verdict.verdict}</td><td class="number">{verdict.examples or ""}</td>'
        f'<td class="number">{margin}</td></tr>'
    )


def _section(report: Report, finding: Finding, source: str) -> str:
    entries = [("where", finding.about), ("expected", finding.expected), ("found", finding.found)]
    if finding.margin > -float("inf"):
        entries.append(("margin", number(finding.margin)))
    if finding.hint:
        entries.append(("perhaps", finding.hint))
    rows = zip(
        (s for s, _ in SERIES), (finding.target, finding.draft, finding.emitted), strict=True
    )
    entries += [(name, row(values)) for name, values in rows if values]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    picture = bars(finding) if finding.target else ""
    test = pasted_test(source, finding) if finding.target else ""
    paste = f"<p>A test to paste next to the rule:</p><pre>{escape(test)}</pre>" if test else ""
    return (
        f'<h2 id="{escape(finding.law)}">{escape(finding.law)}</h2>\n'
        f"<p>{escape(finding.statement)}</p>\n{picture}\n<dl>{listed}</dl>\n{paste}"
    )


def bars(finding: Finding) -> str:
    """Return an SVG of the rows, one group of bars a token."""
    rows = [finding.target, finding.draft, *([finding.emitted] if finding.emitted else [])]
    tokens = min(len(finding.target), MOST_TOKENS)
    peak = max(1.0, *(x for values in rows for x in values[:tokens] if x == x and x < 1e6))
    inner, tall = WIDTH - LEFT - 10, HEIGHT - BOTTOM - TOP - 20
    group = inner / tokens
    width = min(40.0, group * 0.8 / len(rows))
    base = TOP + 20 + tall
    parts = []
    for level in (0.0, 0.5, 1.0):
        y = base - tall * level / peak
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>'
        )
    for token in range(tokens):
        start = LEFT + group * token + (group - width * len(rows)) / 2
        for k, values in enumerate(rows):
            value = min(max(values[token], 0.0), peak) if values[token] == values[token] else 0.0
            tall_bar = tall * value / peak
            name, colour = SERIES[k]
            parts.append(
                f'<rect x="{start + k * width:.1f}" y="{base - tall_bar:.1f}" '
                f'width="{width - 1:.1f}" height="{tall_bar:.1f}" fill="{colour}">'
                f"<title>{name}, token {token}: {values[token]!r}</title></rect>"
            )
        middle = LEFT + group * (token + 0.5)
        label = f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{token}</text>'
        parts.append(label)
    for k in range(len(rows)):
        name, colour = SERIES[k]
        x = LEFT + 110 * k
        parts.append(
            f'<rect x="{x}" y="{TOP - 8}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="{TOP + 3}">{name}</text>'
        )
    more = len(finding.target) - tokens
    note = "token" if not more else f"token ({more} more not shown)"
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle">{note}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="rows of the counterexample">{"".join(parts)}</svg>'
    )
