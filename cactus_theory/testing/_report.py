"""The result of a check: findings, verdicts, a report of them all, and how they read."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from cactus_theory.base.specs import split
from cactus_theory.base.tables import aligned
from cactus_theory.policies import Policy

Outcome = Literal["passed", "failed", "inconclusive"]
# entries of a row shown on one line
SHOWN = 12
# margin above which any number was allowed
UNBOUNDED = 1e300


@dataclass(frozen=True)
class Finding:
    """A broken property on the simplest rows found.

    Attributes
    ----------
    target, draft : the rows; empty if the rule could not be called at all.
    about, expected, found : the number that is wrong, what it should be and what it is.
    margin : how far inside the property, hence negative; −∞ where there is no number.
    emitted : the emitted law on these rows, empty if the rule could not be called.
    knobs : the knob at which it is broken, if that is not the rule's own.
    hint : the likeliest cause, in words.
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
    knobs: dict[str, float] = field(default_factory=dict)
    hint: str = ""


@dataclass(frozen=True)
class PropertyVerdict:
    """The verdict on one property.

    Attributes
    ----------
    verdict : ``holds``, ``fails``, ``inconclusive`` if the rule did not answer in time,
        ``not declared``, or ``not checked`` if it does not apply to any of the rows.
    examples : rows it was checked on. ``worst`` : the smallest margin met, None without rows.
    """

    property: str
    statement: str
    verdict: str
    examples: int
    worst: float | None
    finding: Finding | None = None


@dataclass(frozen=True)
class Report:
    """The result of checking a policy against all properties.

    Attributes
    ----------
    advice : the values of the knob that were tried, in words; empty without a knob.
    """

    policy: str
    declares: str
    properties: list[PropertyVerdict]
    advice: str = ""

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Report":
        """Return the report whose plain values ``asdict`` gave."""
        verdicts = [
            PropertyVerdict(**own | {"finding": own["finding"] and Finding(**own["finding"])})
            for own in plain["properties"]
        ]
        return cls(plain["policy"], plain["declares"], verdicts, plain["advice"])

    @property
    def outcome(self) -> Outcome:
        """Return ``failed`` if a property is broken, ``inconclusive`` if one is undecided."""
        verdicts = {v.verdict for v in self.properties}
        if "fails" in verdicts:
            return "failed"
        return "inconclusive" if "inconclusive" in verdicts else "passed"

    @property
    def passed(self) -> bool:
        """Return whether every property was decided and none is broken."""
        return self.outcome == "passed"

    @property
    def findings(self) -> list[Finding]:
        """Return the counterexamples."""
        return [
            v.finding for v in self.properties if v.finding is not None and v.verdict == "fails"
        ]

    @property
    def undecided(self) -> list[Finding]:
        """Return the rows on which there was no answer in time."""
        late = (v.finding for v in self.properties if v.verdict == "inconclusive")
        return [finding for finding in late if finding is not None]


def declared(policy: Policy) -> str:
    """Return a policy's declaration, in words."""
    claims = policy.declares
    parts = [
        f"{entry.name} {getattr(claims, entry.name)}".replace("_", " ").removesuffix(" True")
        for entry in fields(claims)
        if getattr(claims, entry.name) != entry.default
    ]
    return "declares " + ("; ".join(parts) or "nothing") + f" (support {claims.support})"


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


def message(
    thing: str,
    finding: Finding,
    late: bool = False,
    example: Iterable[tuple[str, str]] = (),
    again: str = "",
) -> str:
    """Return the failure in words; ``example`` : lines (label, text) beside a finding's rows."""
    verb = "did not answer in time for" if late else "breaks"
    rows = (("target q", finding.target), ("draft  p", finding.draft), ("emitted", finding.emitted))
    margin = number(finding.margin) if math.isfinite(finding.margin) else ""
    lines = [
        ("says", finding.statement),
        *((label, row(values)) for label, values in rows if values),
        *example,
        ("where", finding.about),
        ("expected", finding.expected),
        ("found", finding.found),
        *((label, text) for label, text in (("margin", margin), ("perhaps", finding.hint)) if text),
        *((("again", again),) if again else ()),
    ]
    shown = (f"  {label:<8}  {text}" for label, text in lines)
    return "\n".join([f"{thing} {verb} the property {finding.property}", *shown])


def summary(report: Report) -> str:
    """Return how many properties are broken or undecided, in words."""
    counts = [
        f"{len(findings)} {word} {'property' if len(findings) == 1 else 'properties'}"
        for findings, word in ((report.findings, "broken"), (report.undecided, "inconclusive"))
        if findings
    ]
    return ", ".join(counts) or "no property is broken"


def table(report: Report) -> str:
    """Return property × verdict × examples × worst margin."""
    head = ("property", "verdict", "examples", "worst margin")
    cells: list[tuple[str, str, str, str]] = [head]
    for v in report.properties:
        margin = "" if v.worst is None else number(v.worst)
        cells.append((v.property, v.verdict, str(v.examples or ""), margin))
    return "\n".join(line.rstrip() for line in aligned(cells, (0, 1)))


def pasted_test(source: str, finding: Finding) -> str:
    """Return a pytest test that fails as long as ``file.py:name`` breaks the property."""
    path, name, knobs = split(source)
    module = path.stem
    plain = module.isidentifier() and not knobs
    how = f"from {module} import {name}" if plain else f"{name} = ct.policy({source!r})"
    changed = "".join(f", {knob}={value!r}" for knob, value in finding.knobs.items())
    rule = f"ct.policy({name}{changed})" if changed else name
    first = "import cactus_theory as ct\n" if changed or not plain else ""
    return (
        f"{first}from cactus_theory.testing import assert_policy_properties\n{how}\n\n\n"
        f"def test_{name}_{finding.property}():\n"
        f"    # {finding.about}: expected {finding.expected}, found {finding.found}\n"
        f"    q = {row(finding.target, None)}\n"
        f"    p = {row(finding.draft, None)}\n"
        f"    assert_policy_properties({rule}, properties=[{finding.property!r}], rows=(q, p))\n"
    )


def payload(report: Report, source: str) -> dict[str, Any]:
    """Return the report as plain values for JSON, with the tests to paste."""
    plain = {"passed": report.passed, "outcome": report.outcome} | asdict(report)
    for verdict, entry in zip(plain["properties"], report.properties, strict=True):
        if entry.finding is not None:
            verdict["finding"]["test"] = pasted_test(source, entry.finding)
    return plain
