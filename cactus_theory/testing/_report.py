"""The result of a check: findings, verdicts, and a report of them all."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from cactus_theory.policies import Policy

Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class Finding:
    """One way in which a property is broken, on the simplest rows found.

    Attributes
    ----------
    target, draft : the rows; empty if the rule could not be called at all.
    about, expected, found : the number that is wrong, what it should be and what it is.
    margin : how far inside the property, hence negative; −∞ where there is no number.
    emitted : the emitted law on these rows, empty if the rule could not be called.
    knobs : the knob at which it is broken, if that is not the rule's own.
    hint : the likeliest cause, in words.

    Examples
    --------
    >>> rows = {"target": [0.5, 0.5], "draft": [0.0, 1.0]}
    >>> numbers = {"about": "kl of the emitted law", "expected": "at most 0.1", "found": "0.2"}
    >>> broken = Finding("budget_holds", "D ≤ budget", **rows, **numbers, margin=-0.1)
    >>> broken.about, broken.margin
    ('kl of the emitted law', -0.1)
    """

    law: str
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
class Verdict:
    """The verdict on one property.

    Attributes
    ----------
    verdict : ``holds``, ``fails``, ``inconclusive`` if the rule did not answer in time,
        ``not declared``, or ``not checked`` if it does not apply to any of the rows.
    examples : rows it was checked on. ``worst`` : the smallest margin met, None without rows.

    Examples
    --------
    >>> seen = assert_policy_laws("speculative", laws=["budget_holds", "answers"], examples=10)
    >>> [(one.law, one.verdict) for one in seen.laws]
    [('budget_holds', 'holds'), ('answers', 'holds')]
    """

    law: str
    statement: str
    verdict: str
    examples: int
    worst: float | None
    finding: Finding | None = None


@dataclass(frozen=True)
class Report:
    """Everything that a check found about a rule.

    Attributes
    ----------
    advice : what would make the next check easier, in words; empty if nothing.

    Examples
    --------
    >>> seen = assert_policy_laws("speculative", laws=["answers"], examples=10)
    >>> seen.outcome, len(seen.findings)
    ('passed', 0)
    """

    rule: str
    declares: str
    laws: list[Verdict]
    advice: str = ""

    @property
    def outcome(self) -> Outcome:
        """Return ``failed`` if a property is broken, ``inconclusive`` if one is undecided."""
        verdicts = {v.verdict for v in self.laws}
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
        return [v.finding for v in self.laws if v.finding is not None and v.verdict == "fails"]

    @property
    def undecided(self) -> list[Finding]:
        """Return the rows on which there was no answer in time."""
        late = (v.finding for v in self.laws if v.verdict == "inconclusive")
        return [finding for finding in late if finding is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"passed": self.passed, "outcome": self.outcome} | asdict(self)


def declared(rule: Policy) -> str:
    """Return what a rule declares, in words."""
    said = rule.declares
    parts = [
        f"{entry.name} {getattr(said, entry.name)}".replace("_", " ").removesuffix(" True")
        for entry in fields(said)
        if getattr(said, entry.name) != entry.default
    ]
    return "declares " + ("; ".join(parts) or "nothing") + f" (support {said.support})"
