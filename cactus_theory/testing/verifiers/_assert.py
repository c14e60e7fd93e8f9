"""The entry for pytest: check a verifier's properties inside a test suite."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.testing.laws._law import Bounds
from cactus_theory.testing.verifiers._enumeration import Enumeration
from cactus_theory.testing.verifiers._property import VERIFIER_PROPERTIES, VerifierProperty
from cactus_theory.testing.verifiers._trees import Trees, trees
from cactus_theory.verify import Verifier, find_verifier

# one of each kind: lossless, the band by price and by budget, a per-proposal rule, a mixture
POLICIES = (
    "speculative",
    "band:price=1",
    "band:delta=0.1",
    "cactus:delta=0.1",
    "mixture:alpha=0.3",
)
# trees with at most so many rows are shown in full
SHOWN = 30


@dataclass(frozen=True)
class Broken:
    """A property that does not hold: where, by how much, and what to look for."""

    prop: VerifierProperty
    seen: Enumeration
    bounds: Bounds
    index: tuple[int, ...]

    def message(self) -> str:
        """Return what a failing test says."""
        about, expected, found = self.bounds.describe(self.index)
        rows = self.bounds.rows
        tree = self.index[0] if rows is None else int(rows[self.index[0]])
        trees, policy = self.seen.trees, self.seen.policy.spec
        number, kind = trees.numbers[tree], trees.kinds[tree]
        lines = [
            f"{self.seen.verifier.name} with {policy} breaks the property {self.prop.name}:",
            f"  {self.prop.statement}",
            f"  tree      number {number}: V={trees.vocab}, K={trees.depth}, {kind} rows",
            *_shown(trees, tree),
            f"  about     {about}",
            f"  expected  {expected}",
            f"  found     {found}",
        ]
        if self.prop.hint:
            lines.append(f"  perhaps   {self.prop.hint}")
        again = f"policies=[{policy!r}], properties=[{self.prop.name!r}]"
        again += f", examples={number + 1}, seed={self.seen.seed}"
        return "\n".join([*lines, f"  again     assert_verifier_properties(…, {again})"])


def _shown(trees: Trees, tree: int) -> Iterator[str]:
    """Yield the rows of a small tree, each after its text."""
    if sum(rows.shape[1] for rows in trees.q) > SHOWN:
        return
    for depth, rows in enumerate(trees.q):
        for node in range(rows.shape[1]):
            places = trees.vocab ** torch.arange(depth - 1, -1, -1)
            text = " ".join(map(str, (node // places % trees.vocab).tolist()))
            drafted = f", p = {trees.p[depth][tree, node].tolist()}" if depth < trees.depth else ""
            yield f"  after [{text}]: q = {rows[tree, node].tolist()}{drafted}"


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
    4 tokens, 1 to 3 deep, with zeros, certain, equal and nearly equal rows among them. The
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
    chosen = [
        VERIFIER_PROPERTIES[check.one_of("properties", name, tuple(VERIFIER_PROPERTIES))]
        for name in (VERIFIER_PROPERTIES if properties is None else properties)
    ]
    groups = trees(int(check.number("examples", examples, 1)), seed)
    found, checked = [], 0
    for policy in _followed(judge, policies):
        broken = _first_broken(judge, policy, groups, chosen, seed)
        found += [] if broken is None else [broken.message()]
        checked += examples
    if found:
        raise AssertionError("\n\n".join(found))
    return checked


def _followed(verifier: Verifier, policies: Iterable[Policy | str] | None) -> list[Policy]:
    """Return the policies, of the default ones those that the verifier can follow."""
    if policies is not None:
        given = [find_policy(policy) for policy in policies]
        for policy in given:
            verifier.check(policy)
        return given
    found = []
    for policy in map(find_policy, POLICIES):
        try:
            verifier.check(policy)
        except ValueError:
            continue
        found.append(policy)
    return found


def _first_broken(
    verifier: Verifier,
    policy: Policy,
    groups: Iterable[Trees],
    properties: Iterable[VerifierProperty],
    seed: int,
) -> Broken | None:
    """Return the first property that is broken, on the smallest tree."""
    chosen = [prop for prop in properties if prop.applies(verifier)]
    for group in groups:
        seen = Enumeration(verifier, policy, group, seed)
        for prop in chosen:
            for bounds in prop.measure(seen):
                broken = _broken(prop, seen, bounds)
                if broken is not None:
                    return broken
    return None


def _broken(prop: VerifierProperty, seen: Enumeration, bounds: Bounds) -> Broken | None:
    margins = bounds.margins()
    if not margins.numel() or float(margins.amin()) >= 0:
        return None
    place = torch.unravel_index(margins.argmin(), margins.shape)
    return Broken(prop, seen, bounds, tuple(int(i) for i in place))
