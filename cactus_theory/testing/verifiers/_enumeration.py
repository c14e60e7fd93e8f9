"""The joint law of (drafted path, accepted tokens, next token), for every tree at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._path import Path
from cactus_theory.testing._property import Measure, Properties, Seen, always
from cactus_theory.testing.verifiers._trees import Trees
from cactus_theory.verify import Assignment, Draft, Verifier

# trees with at most so many rows are shown in full
SHOWN = 30
ByNode = tuple[Float[Tensor, "trees _"], ...]
RowsByNode = tuple[Float[Tensor, "trees _ vocab"], ...]
VERIFIER_PROPERTIES = Properties("verifier_property")


def verifier_property(
    applies: Callable[[Verifier], bool] = always, *, hint: str = ""
) -> Callable[[Measure], Measure]:
    """Register a function as a property of verifiers; its docstring is the statement.

    The function takes an ``Enumeration`` and yields :class:`Bounds`, the first axis of which
    counts the trees. ``assert_verifier_properties`` picks it up.

    Raises
    ------
    TypeError, ValueError
        Used without parentheses; a function without a docstring, or a name that is taken.

    Examples
    --------
    >>> @verifier_property(hint="a chance is left out")
    ... def chances_sum_to_one(seen):
    ...     "The chances of every number of accepted tokens sum to 1."
    ...     yield Bounds(seen.law.stop.sum(-1), 1, 1, "sum of the chances")
    >>> assert_verifier_properties("block", properties=["chances_sum_to_one"], examples=2)
    10
    """
    return VERIFIER_PROPERTIES.enter(applies, hint=hint)


@dataclass(frozen=True)
class PathLaw:
    """What a verifier states on every path of every tree: a ``VerdictLaw`` with one more axis."""

    stop: Float[Tensor, "trees paths K1"]
    last: Float[Tensor, "trees paths K1 vocab"]
    alive: Float[Tensor, "trees paths K1"]
    emitted: Float[Tensor, "trees paths K vocab"] | None
    turns: Float[Tensor, "trees paths K"] | None


class Enumeration(Seen):
    """A verifier with one policy on some trees; every answer is computed once and kept.

    Attributes
    ----------
    verifier, policy, trees : as given.
    seed : fixes which paths are looked at where not all of them are.
    """

    def __init__(self, verifier: Verifier, policy: Policy, trees: Trees, seed: int = 0) -> None:
        self.verifier, self.policy, self.trees, self.seed = verifier, policy, trees, seed

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        """Yield the number and kind of a tree, and the rows of a small one, each after its text."""
        trees = self.trees
        number, kind = trees.numbers[row], trees.kinds[row]
        yield "tree", f"number {number}: V={trees.vocab}, K={trees.depth}, {kind} rows"
        if sum(rows.shape[1] for rows in trees.q) > SHOWN:
            return
        for depth, rows in enumerate(trees.q):
            places = trees.vocab ** torch.arange(depth - 1, -1, -1)
            for node, q in enumerate(rows[row].tolist()):
                text = " ".join(map(str, (node // places % trees.vocab).tolist()))
                last = depth == trees.depth
                drafted = "" if last else f", p = {trees.p[depth][row, node].tolist()}"
                yield "node", f"after [{text}]: q = {q}{drafted}"

    def again(self, row: int, name: str) -> str:
        """Return the call that checks this tree, and those before it, again."""
        return (
            f"assert_verifier_properties(…, policies=[{self.policy.spec!r}], properties=[{name!r}]"
            f", examples={self.trees.numbers[row] + 1}, seed={self.seed})"
        )

    @property
    def assigned(self) -> Assignment:
        """Return the policy for every token."""
        return Assignment((self.policy,))

    @cached_property
    def q(self) -> Float[Tensor, "trees paths K1 vocab"]:
        """Return the target's rows along every path."""
        return self.trees.along(self.trees.q)

    @cached_property
    def p(self) -> Float[Tensor, "trees paths K vocab"]:
        """Return the draft's rows along every path."""
        return self.trees.along(self.trees.p)

    @property
    def weight(self) -> Float[Tensor, "trees paths"]:
        """Return the probability that each path is drafted."""
        return self.trees.reached[-1]

    @cached_property
    def law(self) -> PathLaw:
        """Return what the verifier states on the trees' own rows."""
        return self.law_of(self.q, self.p)

    def law_of(self, q: Tensor, p: Tensor, verifier: Verifier | None = None) -> PathLaw:
        """Return what a verifier, its own if none, states on rows (T, V^K, …) along every path."""
        count, paths = q.shape[:2]
        ids = self.trees.paths.repeat(count, 1)
        draft = Draft(ids, [self.trees.depth] * len(ids), p.flatten(0, 1))
        found = (verifier or self.verifier).law(self.assigned, q.flatten(0, 1), draft)
        shape = (count, paths)
        optional = (found.emitted, found.turns)
        return PathLaw(
            *(own.unflatten(0, shape).double() for own in (found.stop, found.last, found.alive)),
            *(None if own is None else own.unflatten(0, shape).double() for own in optional),
        )

    def by_node(self, values: Tensor, depth: int) -> Tensor:
        """Return sums (T, V^depth, …) of values of paths (T, V^K, …) over each node's paths."""
        return values.unflatten(1, (self.trees.vocab**depth, -1)).sum(2)

    def drafted(self, values: Tensor) -> Tensor:
        """Return values of paths times the probability of each, 0 where it is never drafted."""
        weight = self.weight.reshape(*self.weight.shape, *[1] * (values.ndim - 2))
        return torch.where(weight > 0, weight * values, 0.0)

    @cached_property
    def stopped(self) -> Float[Tensor, "trees paths K1"]:
        """Return the probability of each path and of accepting exactly i tokens of it."""
        return self.drafted(self.law.stop)

    @cached_property
    def passed(self) -> ByNode:
        """Return by depth the probability that a node's tokens are drafted and accepted."""
        tails = self.stopped.flip(-1).cumsum(-1).flip(-1)
        return tuple(self.by_node(tails[..., i], i) for i in range(self.trees.depth + 1))

    @cached_property
    def following(self) -> RowsByNode:
        """Return by depth the joint law of passing a node and of the token that follows it."""
        ended = self.drafted(self.law.stop[..., None] * self.law.last)
        found = []
        for depth in range(self.trees.depth + 1):
            own = self.by_node(ended[:, :, depth], depth)
            if depth < self.trees.depth:
                own = own + self.passed[depth + 1].unflatten(1, (-1, self.trees.vocab))
            found.append(own)
        return tuple(found)

    @cached_property
    def alive(self) -> ByNode:
        """Return by depth the alive ratio that the verifier states at each node."""
        found = []
        for depth in range(self.trees.depth + 1):
            nodes = self.trees.vocab**depth
            likeliest = self.weight.unflatten(1, (nodes, -1)).argmax(-1, keepdim=True)
            own = self.law.alive[..., depth].unflatten(1, (nodes, -1))
            own = own.gather(-1, likeliest)[..., 0]
            found.append(torch.where(self.trees.reached[depth] > 0, own, 0.0))
        return tuple(found)

    @cached_property
    def target(self) -> RowsByNode:
        """Return by depth the row h that the token after each node must follow."""
        return tuple(self._target(depth) for depth in range(self.trees.depth))

    def _target(self, depth: int) -> Tensor:
        q, p = self.trees.q[depth], self.trees.p[depth]
        path = Path(self.alive[depth].flatten(), self.left(depth))
        return aim(self.policy, q.flatten(0, 1), p.flatten(0, 1), path).reshape(q.shape)

    def left(self, depth: int) -> Tensor:
        """Return for every node at this depth how many drafted tokens follow the one there."""
        count = self.trees.p[depth].shape[0] * self.trees.p[depth].shape[1]
        return torch.full((count,), self.trees.depth - 1 - depth)

    @cached_property
    def aims(self) -> Float[Tensor, "trees paths K1 vocab"]:
        """Return along every path h, and the target's own row at its end."""
        return self.trees.along((*self.target, self.trees.q[-1]))


def row_by_row(verifier: Verifier) -> bool:
    """Return whether the token at a node must have the policy's law there."""
    return not verifier.looks_ahead


def aim(
    policy: Policy, q: Float[Tensor, "rows vocab"], p: Float[Tensor, "rows vocab"], path: Path
) -> Float[Tensor, "rows vocab"]:
    """Return the rows h that the token after each node must follow, float64."""
    row = policy.target_in_block(q, p, path)
    return (policy.emitted(q, p) if row is None else row).double()
