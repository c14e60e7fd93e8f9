"""Check a policy against its properties on drawn rows, for the command ``check`` and for tests."""

from collections.abc import Callable, Iterable
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing._checker import Checker, Pair
from cactus_theory.testing._examples import examples as draw_examples
from cactus_theory.testing.properties import PROPERTIES, Behaviour
from cactus_theory.testing.properties.behaviour import other_knobs
from cactus_theory.testing.report import PropertyVerdict, Report, declared, told

# number of rows on which a policy is checked at each further value of its knob
ROWS_AT_OTHER_KNOBS = 24
# most tokens of a row that is checked at further values of the knob; wider rows cost more time
NARROW = 8
# time limit in seconds for shrinking one counterexample
SHRINK_SECONDS = 10.0


def check_policy(
    policy: Policy,
    groups: Iterable[Pair],
    *,
    properties: Iterable[str] | None = None,
    shrink_seconds: float = SHRINK_SECONDS,
    elsewhere: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Measure properties of a policy (the named ones, or all) on ``groups``; return the report.

    ``groups`` are batches of rows (target, draft), each (R, V). Shrinking one counterexample takes
    at most ``shrink_seconds``; 0 keeps the rows as they are. With ``elsewhere`` some rows are also
    checked at values of the policy's knob that are drawn with ``seed``. ``progress`` is called with
    each property's name before the property is checked.
    """
    checker = Checker(policy, shrink_seconds)
    chosen = list(PROPERTIES) if properties is None else list(properties)
    first = PROPERTIES["answers"]
    verdicts = dict[str, PropertyVerdict]()
    progress(first.name)
    groups = list(groups)
    others = _at_other_knobs(checker, groups, seed) if elsewhere else []
    behaviours, crashed = checker.without_crashes(
        first, (Behaviour(policy, *group) for group in groups)
    )
    for name in chosen:
        prop = PROPERTIES[name]
        progress(name)
        if prop is first and crashed:
            finding = checker.crash(prop, *crashed[0])
            count = sum(len(seen.q) for seen in behaviours) + len(crashed)
            verdict = PropertyVerdict(name, prop.statement, "fails", count, finding.margin, finding)
        elif not prop.applies(policy):
            verdict = PropertyVerdict(name, prop.statement, "not declared", 0, None)
        else:
            verdict = checker.verdict_on(prop, behaviours + (others if prop.at_other_knobs else []))
        # rows without finite answers fail `answers` only, so that one mistake gives one finding
        if prop is first:
            behaviours = [b for b in map(checker.with_numbers, behaviours) if len(b.q)]
            answering = (b for b in others if checker.error_on(first, b) is None)
            others = [b for b in map(checker.with_numbers, answering) if len(b.q)]
        verdicts[name] = verdict
    return Report(policy.spec, declared(policy), [*verdicts.values()])


def _at_other_knobs(checker: Checker, groups: list[Pair], seed: int) -> list[Behaviour]:
    """Return the policy's behaviour at drawn values of its knob, on some rows of few tokens."""
    narrow = [group for group in groups if 3 <= group[0].shape[-1] <= NARROW]
    if not narrow or checker.policy.knob is None:
        return []
    q, p = max(narrow, key=lambda group: len(group[0]))
    rows = q[:ROWS_AT_OTHER_KNOBS], p[:ROWS_AT_OTHER_KNOBS]
    return [
        Behaviour(policy, *rows, {checker.policy.knob: value})
        for value, policy in other_knobs(checker.policy, seed)
    ]


def assert_policy_properties(
    policy: Policy | str,
    *,
    properties: Iterable[str] | None = None,
    examples: int = 200,
    seed: int = 0,
    rows: tuple[Any, Any] | None = None,
) -> Report:
    """Check a policy against every property it must have; raise AssertionError if one is broken.

    The error message describes the first broken property (the simplest rows found, the numbers
    expected and found, the likeliest cause) and names all further ones. The report of a policy
    without faults is returned. The function may be called under Hypothesis's ``@given``, too.

    Parameters
    ----------
    policy : a policy (by ``ct.rule``, ``ct.policy`` or a class of your own), or a spec string.
    properties : names out of ``PROPERTIES``; all of them by default.
    examples : number of pairs of rows to draw.
    seed : seed of these rows, and of the further values of the knob that are checked.
    rows : rows (target, draft), each (V,) or (R, V), to check in place of drawn rows. They are
        reported as they are, not shrunk, and checked at the policy's present knobs only.

    Raises
    ------
    AssertionError
        A property is broken.
    ValueError, TypeError
        Unknown property names, rows that are not distributions, a policy that cannot be read.

    Examples
    --------
    >>> assert_policy_properties("band:delta=0.1", properties=["budget_holds"], examples=10).passed
    True
    """
    policy = read_policy(policy)
    chosen = [prop.name for prop in PROPERTIES.chosen("properties", properties)]
    if rows is None:
        groups = draw_examples(int(check.number("examples", examples, 1)), seed)
    else:
        q, p = tensors.probability_rows(*rows)
        groups = ((q.reshape(-1, q.shape[-1]), p.reshape(-1, p.shape[-1])),)
    options = {"shrink_seconds": SHRINK_SECONDS if rows is None else 0.0, "elsewhere": rows is None}
    report = check_policy(policy, groups, properties=chosen, seed=seed, **options)
    if not report.passed:
        raise AssertionError(told(report))
    return report
