"""Results of a check (findings, verdicts, a report of all), and their text in messages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from cactus_theory.base.tables import aligned
from cactus_theory.policies import Policy

# entries of a row shown on one line
SHOWN = 12
# a margin above this is that of a number which only had to be finite; no digits are printed
UNBOUNDED = 1e300


@dataclass(frozen=True)
class Finding:
    """A broken property, shown on the simplest rows found.

    Attributes
    ----------
    property, statement : name of the property, and the sentence that is not true.
    target, draft : the rows, V numbers each; empty for objects that are not policies.
    about, expected, found : in words: name of the wrong number, allowed numbers, number found.
    margin : distance from keeping the property, negative; −∞ where there is no number.
    emitted : the emitted distribution on these rows; empty if the policy raised an error.
    hint : the likeliest cause, in words.
    again : a Python call that fails as long as the property is broken.
    """

    property: str
    statement: str
    target: list[float]
    draft: list[float]
    about: str
    expected: str
    found: str
    margin: float
    emitted: list[float] = field(default_factory=list)
    hint: str = ""
    again: str = ""


@dataclass(frozen=True)
class PropertyVerdict:
    """The verdict on one property.

    Attributes
    ----------
    verdict : ``holds``, ``fails``, ``not declared``, or ``not checked`` if the property applies to
        none of the rows.
    examples : number of rows on which the property was checked.
    worst : the smallest margin on these rows (distance from breaking a bound), None without rows.
    """

    property: str
    statement: str
    verdict: str
    examples: int
    worst: float | None
    finding: Finding | None = None


@dataclass(frozen=True)
class Report:
    """The result of checking a policy against all properties."""

    policy: str
    declares: str
    properties: list[PropertyVerdict]

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Report":
        """Return the report that ``dataclasses.asdict`` turned into plain values."""
        verdicts = [
            PropertyVerdict(**items | {"finding": items["finding"] and Finding(**items["finding"])})
            for items in plain["properties"]
        ]
        return cls(plain["policy"], plain["declares"], verdicts)

    @property
    def passed(self) -> bool:
        """Return whether no property is broken."""
        return not self.findings

    @property
    def findings(self) -> list[Finding]:
        """Return the counterexamples."""
        return [v.finding for v in self.properties if v.finding is not None]


def declared(policy: Policy) -> str:
    """Return everything that a policy declares, in words."""
    claims = policy.declares
    parts = [
        f"{entry.name} {getattr(claims, entry.name)}".replace("_", " ").removesuffix(" True")
        for entry in fields(claims)
        if getattr(claims, entry.name) != entry.default
    ]
    return "declares " + ("; ".join(parts) or "nothing") + f" (support {claims.support})"


def number(x: float) -> str:
    """Return a margin as text such as ``-0.0267``; empty for a margin near ∞, ``-`` near −∞."""
    if abs(x) > UNBOUNDED:
        return "" if x > 0 else "-"
    return f"{x:+.3g}"


def row(values: list[float]) -> str:
    """Return a row as text such as ``[0.5, 0.5]``; of a long row the first entries only."""
    parts = [repr(x) if float(f"{x:.6g}") == x else f"{x:.6g}" for x in values]
    if len(parts) > SHOWN:
        parts = [*parts[:SHOWN], f"… {len(values) - SHOWN} more"]
    return f"[{', '.join(parts)}]"


def message(thing: str, finding: Finding, example: Iterable[tuple[str, str]] = ()) -> str:
    """Return a finding in words; ``example`` holds further lines (label, text) about the rows."""
    rows = (("target q", finding.target), ("draft  p", finding.draft), ("emitted", finding.emitted))
    margin = number(finding.margin) if math.isfinite(finding.margin) else ""
    lines = [
        ("says", finding.statement),
        *((label, row(values)) for label, values in rows if values),
        *example,
        ("where", finding.about),
        ("expected", finding.expected),
        ("found", finding.found),
        ("margin", margin),
        ("perhaps", finding.hint),
        ("again", finding.again),
    ]
    shown = (f"  {label:<8}  {text}" for label, text in lines if text)
    return "\n".join([f"{thing} breaks the property {finding.property}", *shown])


def told(report: Report) -> str:
    """Return the first finding in full, and the names of the remaining broken properties."""
    first, *others = report.findings
    text = message(report.policy, first)
    names = ", ".join(other.property for other in others)
    return f"{text}\nalso broken, often by the same fault: {names}" if others else text


def summary(report: Report) -> str:
    """Return the number of broken properties, in words."""
    count = len(report.findings)
    words = f"{count} broken {'property' if count == 1 else 'properties'}"
    return words if count else "no property is broken"


def table(report: Report) -> str:
    """Return a text table of all properties: verdict, number of examples, worst margin."""
    head = ("property", "verdict", "examples", "worst margin")
    cells: list[tuple[str, str, str, str]] = [head]
    for v in report.properties:
        margin = "" if v.worst is None else number(v.worst)
        cells.append((v.property, v.verdict, str(v.examples or ""), margin))
    return "\n".join(line.rstrip() for line in aligned(cells, (0, 1)))
