"""The properties of verifiers, one function each; its docstring is its statement.

``VERIFIER_PROPERTIES`` maps names to properties in the order in which they are checked. One of
your own is a function under ``@verifier_property()``.
"""

from collections.abc import Iterable  # noqa: I001  the order of properties
from contextlib import suppress

from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing.definition import broken
from cactus_theory.testing.verifiers import exact, coins  # noqa: F401
from cactus_theory.testing.verifiers._enumeration import VERIFIER_PROPERTIES, Enumeration
from cactus_theory.testing.verifiers._enumeration import verifier_property as verifier_property
from cactus_theory.testing.verifiers._trees import trees
from cactus_theory.verify import Verifier, find_verifier


# one of each kind: lossless, the band by price and by budget, a per-proposal rule, a mixture
POLICIES = (
    "speculative",
    "band:price=0.8,tilt=0.4",
    "band:price=1",
    "band:delta=0.1",
    "cactus:delta=0.1",
    "mixture:alpha=0.3",
)


def assert_verifier_properties(
    verifier: Verifier | str,
    *,
    policies: Iterable[Policy | str] | None = None,
    properties: Iterable[str] | None = None,
    examples: int = 60,
    seed: int = 0,
) -> int:
    """Check a verifier on small trees; raise AssertionError if a property is broken.

    The joint law of (drafted path, accepted tokens, next token) is enumerated, on trees of 2 to
    4 tokens, 1 to 3 deep, with zeros, deterministic, equal and nearly equal rows among them. The
    message shows the first broken property of each policy on the smallest tree found. Returns
    how many trees were checked, over all policies.

    Parameters
    ----------
    verifier : a Verifier, or the name of a registered one, that takes chains and has a ``law``.
    policies : policies or specs to verify with; those of ``POLICIES`` that it can follow by
        default.
    properties : names out of ``VERIFIER_PROPERTIES``; all of them by default.
    examples : trees to draw; ``seed`` fixes which.

    Raises
    ------
    AssertionError
        A property is broken.
    ValueError
        An unknown property, a verifier that takes no chains, a policy it cannot follow.

    Examples
    --------
    >>> assert_verifier_properties("block", policies=["speculative"], examples=3)
    3
    """
    judge = find_verifier(verifier)
    if "chain" not in judge.drafts:
        raise ValueError(f"verifier: must take chains; {judge.name} takes {judge.drafts}")
    chosen = VERIFIER_PROPERTIES.chosen("properties", properties)
    applicable = [prop for prop in chosen if prop.applies(judge)]
    groups = trees(int(check.number("examples", examples, 1)), seed)
    followed = _followed(judge, policies)
    failures = [
        broken(
            f"{judge.name} with {policy.spec}",
            (Enumeration(judge, policy, group, seed) for group in groups),
            applicable,
        )
        for policy in followed
    ]
    if any(failures):
        raise AssertionError("\n\n".join(filter(None, failures)))
    return examples * len(followed)


def _followed(verifier: Verifier, policies: Iterable[Policy | str] | None) -> list[Policy]:
    if policies is not None:
        chosen = [read_policy(policy) for policy in policies]
        for policy in chosen:
            verifier.check(policy)
        return chosen
    followed = []
    for policy in map(read_policy, POLICIES):
        with suppress(ValueError):
            verifier.check(policy)
            followed.append(policy)
    return followed
