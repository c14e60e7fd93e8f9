"""The entry for pytest: check a policy's properties inside a test suite."""

from collections.abc import Callable, Iterable
from typing import Any

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.testing._examples import examples as draw_examples
from cactus_theory.testing._report import Report
from cactus_theory.testing._runner import check_rule
from cactus_theory.testing._text import message
from cactus_theory.testing.laws import LAWS

# time limit for shrinking one counterexample
SHRINK_SECONDS = 10.0


def assert_policy_laws(
    rule: Policy | str,
    *,
    laws: Iterable[str] | None = None,
    examples: int = 200,
    seed: int = 0,
    rows: tuple[Any, Any] | None = None,
    verify: Callable[..., Any] | None = None,
) -> Report:
    """Check a policy against every property it must have; raise AssertionError if one is broken.

    The message shows, for each broken property, the simplest rows found, what was expected,
    what was found and the likeliest cause. The report of a policy without faults is returned.

    Parameters
    ----------
    rule : a policy, from ``ct.rule``, ``ct.policy`` or a class of your own, or a spec string.
    laws : names out of ``laws.LAWS``; all of them by default.
    examples : pairs of rows to draw; ``seed`` fixes which, and which other knobs are tried.
    rows : (target, draft) to check instead and to report as they are, (V,) or (R, V), at the
        policy's own knobs only.
    verify : the verification step to check with the rule; None for ``ct.verify_chain``, or
        ``ct.verify_block`` where only a verifier of blocks can follow the rule.

    Raises
    ------
    AssertionError
        A property is broken.
    ValueError, TypeError
        An unknown property, rows that are no distributions, a rule that is none.

    Examples
    --------
    >>> assert_policy_laws("band:delta=0.1", laws=["budget_holds"], examples=10).passed
    True
    """
    found = find_policy(rule)
    chosen = list(LAWS) if laws is None else list(laws)
    for name in chosen:
        check.one_of("laws", name, tuple(LAWS))
    if rows is None:
        groups = draw_examples(int(check.number("examples", examples, 1)), seed)
    else:
        q, p = check.probability_rows(*rows)
        groups = ((q.reshape(-1, q.shape[-1]), p.reshape(-1, p.shape[-1])),)
    seconds = SHRINK_SECONDS if rows is None else 0.0
    report = check_rule(
        found,
        groups,
        laws=chosen,
        verify=verify,
        shrink_seconds=seconds,
        elsewhere=rows is None,
        seed=seed,
    )
    if not report.passed:
        raise AssertionError("\n\n".join(message(report.rule, f) for f in report.findings))
    return report


def law_cases(rules: Iterable[Policy | str], laws: Iterable[str] | None = None) -> list[Any]:
    """Return pytest parameters (rule, property's name) for all properties a policy must have.

    ``@pytest.mark.parametrize(("rule", "law"), law_cases([my_rule]))`` gives every property a
    test of its own, named after both.

    Examples
    --------
    >>> [case.id for case in law_cases(["speculative"], laws=["answers", "certain_drafts"])]
    ['speculative-answers', 'speculative-certain_drafts']
    """
    import pytest

    found = [find_policy(rule) for rule in rules]
    chosen = [LAWS[check.one_of("laws", name, tuple(LAWS))] for name in laws or LAWS]
    return [
        pytest.param(rule, prop.name, id=f"{rule.spec}-{prop.name}")
        for rule in found
        for prop in chosen
        if prop.applies(rule)
    ]
