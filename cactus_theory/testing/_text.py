"""How a counterexample reads: the message, the table, and a test to paste."""

import math
from typing import Any

from cactus_theory._terminal import aligned
from cactus_theory.testing._load import split
from cactus_theory.testing._report import Finding, Report

# entries of a row that fit on one line
SHOWN = 12
# a margin above this means that any number was allowed
UNBOUNDED = 1e300


def number(x: float) -> str:
    """Return a margin such as ``-0.0267`` or ``+1e-09``."""
    if abs(x) > UNBOUNDED:
        return "" if x > 0 else "-"
    return f"{x:+.3g}"


def row(values: list[float], shown: int | None = SHOWN) -> str:
    """Return ``[0.5, 0.5]``, long rows cut short."""
    parts = [repr(x) if float(f"{x:.6g}") == x or shown is None else f"{x:.6g}" for x in values]
    if shown is not None and len(parts) > shown:
        parts = [*parts[:shown], f"… {len(values) - shown} more"]
    return f"[{', '.join(parts)}]"


def message(rule: str, finding: Finding, late: bool = False) -> str:
    """Return the failure in words: property, rows, expected, found, margin, likely cause."""
    verb = "did not answer in time for" if late else "breaks"
    lines = [f"{rule} {verb} the property {finding.law}", f"  says      {finding.statement}"]
    if finding.target:
        lines.append(f"  target q  {row(finding.target)}")
        lines.append(f"  draft  p  {row(finding.draft)}")
    if finding.emitted:
        lines.append(f"  emitted   {row(finding.emitted)}")
    lines.append(f"  where     {finding.about}")
    lines.append(f"  expected  {finding.expected}")
    lines.append(f"  found     {finding.found}")
    if math.isfinite(finding.margin):
        lines.append(f"  margin    {number(finding.margin)}")
    if finding.hint:
        lines.append(f"  perhaps   {finding.hint}")
    return "\n".join(lines)


def summary(report: Report) -> str:
    """Return how many properties are broken or undecided, in words."""
    said = [
        f"{len(found)} {word} {'property' if len(found) == 1 else 'properties'}"
        for found, word in ((report.findings, "broken"), (report.undecided, "inconclusive"))
        if found
    ]
    return ", ".join(said) or "no property is broken"


def table(report: Report) -> str:
    """Return property × verdict × examples × worst margin."""
    head = ("property", "verdict", "examples", "worst margin")
    cells: list[tuple[str, str, str, str]] = [head]
    for v in report.laws:
        margin = "" if v.worst is None else number(v.worst)
        cells.append((v.law, v.verdict, str(v.examples or ""), margin))
    return "\n".join(line.rstrip() for line in aligned(cells, (0, 1)))


def pasted_test(source: str, finding: Finding) -> str:
    """Return a pytest test that fails as long as ``file.py:name`` breaks the property."""
    path, name, knobs = split(source)
    module = path.stem
    plain = module.isidentifier() and not knobs
    how = f"from {module} import {name}" if plain else f"{name} = load_rule({source!r})"
    changed = "".join(f", {knob}={value!r}" for knob, value in finding.knobs.items())
    rule = f"ct.policy({name}{changed})" if changed else name
    first = "import cactus_theory as ct\n" if changed else ""
    also = "assert_policy_laws" if plain else "assert_policy_laws, load_rule"
    return (
        f"{first}from cactus_theory.testing import {also}\n{how}\n\n\n"
        f"def test_{name}_{finding.law}():\n"
        f"    # {finding.about}: expected {finding.expected}, found {finding.found}\n"
        f"    q = {row(finding.target, None)}\n"
        f"    p = {row(finding.draft, None)}\n"
        f"    assert_policy_laws({rule}, laws=[{finding.law!r}], rows=(q, p))\n"
    )


def payload(report: Report, source: str) -> dict[str, Any]:
    """Return the report as plain values for JSON, with the tests to paste."""
    plain = report.as_dict()
    for verdict, found in zip(plain["laws"], report.laws, strict=True):
        if found.finding is not None:
            verdict["finding"]["test"] = pasted_test(source, found.finding)
    return plain
