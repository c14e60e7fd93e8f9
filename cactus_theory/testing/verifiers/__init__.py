"""All properties of verifiers. Each is a function whose docstring states what must be true.

``VERIFIER_PROPERTIES`` maps names to properties in the order in which they are checked. To add a
property, put ``@verifier_property()`` on a function.
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


# one policy of each kind: lossless, band with a tilt, band by price, band by budget, per-proposal
# rule, mixture
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
    """Check a verifier on small trees of rows; raise AssertionError if a property is broken.

    On each tree the joint law of (drafted path, number of accepted tokens, next token) is computed
    exactly, by enumeration. The trees have 2 to 4 tokens and depth 1 to 3; among their rows are
    rows with zeros, one-hot rows, and equal or nearly equal q and p. For each policy the error
    message shows the first broken property, on the smallest tree that breaks it. Returns how many
    trees were checked, summed over policies.

    Parameters
    ----------
    verifier : a Verifier that verifies chains and has a ``law``, or the name of a registered one.
    policies : policies or specs to verify with; by default one of each kind that the verifier
        supports.
    properties : names out of ``VERIFIER_PROPERTIES``; all of them by default.
    examples : number of trees to draw.
    seed : seed of the trees' rows and of the paths and coins that are tried.

    Raises
    ------
    AssertionError
        A property is broken.
    ValueError
        Unknown property names, a verifier that cannot verify chains, a policy that the verifier
        does not support.

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
    """Return the policies to verify with; ValueError if one of ``policies`` is not supported."""
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
