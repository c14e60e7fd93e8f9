"""Compute the joint law of (drafted path, accepted tokens, next token) on a batch of trees.

Properties of verifiers bound the numbers of :class:`Enumeration`. :class:`Paths` runs the verifier
on some paths with chosen coins (uniform random numbers).
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies.policy import PathState
from cactus_theory.testing.definition import Measure, Properties, Seen, always
from cactus_theory.testing.verifiers._trees import Trees
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier

# paths of a tree tried with coins, of each kind: likeliest, random, random with a token of h = 0
EACH = 2
# most rows of a tree whose rows a message prints
SHOWN = 30
ByNode = tuple[Float[Tensor, "trees _"], ...]
RowsByNode = tuple[Float[Tensor, "trees _ vocab"], ...]
VERIFIER_PROPERTIES = Properties("verifier_property")
"""Every property of verifiers, by name."""


def verifier_property(
    applies: Callable[[Verifier], bool] = always, *, hint: str = ""
) -> Callable[[Measure], Measure]:
    """Return a decorator that registers a function as a property of verifiers.

    The function takes an ``Enumeration`` and yields :class:`Bounds`, the first axis of which
    counts the trees. Messages print the first paragraph of the function's docstring.
    ``assert_verifier_properties`` then checks the property under the function's name.

    Parameters
    ----------
    applies : function of a verifier: whether the verifier must have the property.
    hint : the likeliest cause of a failure, in words.

    Raises
    ------
    TypeError, ValueError
        The decorator is used without parentheses, the function has no docstring, or a property of
        the same name is registered already.

    Examples
    --------
    >>> @verifier_property(hint="a chance is left out")
    ... def chances_sum_to_one(seen):
    ...     "The chances of every number of accepted tokens sum to 1."
    ...     yield Bounds(seen.law.stop.sum(-1), 1, 1, "sum of the chances")
    >>> assert_verifier_properties("block", properties=["chances_sum_to_one"], examples=2)
    12
    """
    return VERIFIER_PROPERTIES.register(applies, hint=hint)


class Enumeration(Seen):
    """The law of a verifier with one policy on a batch of trees; each number is computed once.

    Attributes
    ----------
    verifier, policy, trees : as given to the constructor.
    seed : seed of the paths and coins where a property tries some of them only.
    """

    def __init__(self, verifier: Verifier, policy: Policy, trees: Trees, seed: int = 0) -> None:
        self.verifier, self.policy, self.trees, self.seed = verifier, policy, trees, seed

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        """Yield lines about a tree: its number and kind, and the rows of a small tree."""
        trees = self.trees
        number, kind = trees.numbers[row], trees.kinds[row]
        yield "tree", f"number {number}: V={trees.vocab}, K={trees.depth}, {kind} rows"
        if sum(rows.shape[1] for rows in trees.q) > SHOWN:
            return
        for depth, rows in enumerate(trees.q):
            # the tokens before a node are the digits of the node's number, to the base V
            places = trees.vocab ** torch.arange(depth - 1, -1, -1)
            for node, q in enumerate(rows[row].tolist()):
                text = " ".join(map(str, (node // places % trees.vocab).tolist()))
                last = depth == trees.depth
                drafted = "" if last else f", p = {trees.p[depth][row, node].tolist()}"
                yield "node", f"after [{text}]: q = {q}{drafted}"

    def again(self, row: int, name: str) -> str:
        """Return a call that checks this tree, and the trees before it, again."""
        return (
            f"assert_verifier_properties(…, policies=[{self.policy.spec!r}], properties=[{name!r}]"
            f", examples={self.trees.numbers[row] + 1}, seed={self.seed})"
        )

    @property
    def assigned(self) -> Assignment:
        """Return the assignment of the policy to every token."""
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
    def law(self) -> Any:
        """Return the verifier's law on the rows of the trees."""
        return self.law_of(self.q, self.p)

    def law_of(self, q: Tensor, p: Tensor, verifier: Verifier | None = None) -> Any:
        """Return a verifier's law on rows (T, V^K, …) along every path; default: ``self.verifier``.

        The entries are those of ``VerdictLaw``, (T, V^K, …) float64.
        """
        ids = self.trees.paths.repeat(len(q), 1)
        draft = Draft(ids, [self.trees.depth] * len(ids), p.flatten(0, 1))
        law = (verifier or self.verifier).law(self.assigned, q.flatten(0, 1), draft)
        entries = {name: entry for name, entry in vars(law).items() if entry is not None}
        shaped = {name: x.unflatten(0, q.shape[:2]).double() for name, x in entries.items()}
        return SimpleNamespace(**vars(law) | shaped)

    def by_node(self, values: Tensor, depth: int) -> Tensor:
        """Sum values of paths (T, V^K, …) over all paths through each node: (T, V^depth, …)."""
        return values.unflatten(1, (self.trees.vocab**depth, -1)).sum(2)

    def drafted(self, values: Tensor) -> Tensor:
        """Return values of paths times the paths' probabilities, 0 for paths never drafted."""
        weight = self.weight.reshape(*self.weight.shape, *[1] * (values.ndim - 2))
        return torch.where(weight > 0, weight * values, 0.0)

    @cached_property
    def stopped(self) -> Float[Tensor, "trees paths K1"]:
        """Return the probability that each path is drafted and exactly i of its tokens accepted."""
        return self.drafted(self.law.stop)

    @cached_property
    def passed(self) -> ByNode:
        """Return by depth the probability that all tokens up to a node are drafted and accepted."""
        tails = self.stopped.flip(-1).cumsum(-1).flip(-1)
        return tuple(self.by_node(tails[..., i], i) for i in range(self.trees.depth + 1))

    @cached_property
    def following(self) -> RowsByNode:
        """Return by depth the joint law of passing a node and of the token that is emitted next."""
        ended = self.drafted(self.law.stop[..., None] * self.law.last)
        by_depth = []
        for depth in range(self.trees.depth + 1):
            joint = self.by_node(ended[:, :, depth], depth)
            if depth < self.trees.depth:
                joint = joint + self.passed[depth + 1].unflatten(1, (-1, self.trees.vocab))
            by_depth.append(joint)
        return tuple(by_depth)

    @cached_property
    def alive(self) -> ByNode:
        """Return by depth the alive ratio that the verifier states at each node."""
        by_depth = []
        for depth, reached in enumerate(self.trees.reached):
            of_node = (self.trees.vocab**depth, -1)
            likeliest = self.weight.unflatten(1, of_node).argmax(-1, keepdim=True)
            ratios = self.law.alive[..., depth].unflatten(1, of_node).gather(-1, likeliest)
            by_depth.append(torch.where(reached > 0, ratios[..., 0], 0.0))
        return tuple(by_depth)

    @cached_property
    def target(self) -> RowsByNode:
        """Return by depth the emitted distribution h of the token after each node."""
        by_depth = []
        for q, p, alive in zip(self.trees.q, self.trees.p, self.alive, strict=False):
            rows, path = (q.flatten(0, 1), p.flatten(0, 1)), PathState(alive.flatten())
            by_depth.append(aim(self.verifier, self.policy, *rows, path).reshape(q.shape))
        return tuple(by_depth)

    @cached_property
    def aims(self) -> Float[Tensor, "trees paths K1 vocab"]:
        """Return h along every path, and at its end the row that the bonus token is drawn from."""
        return self.trees.along((*self.target, self.policy.undrafted(self.trees.q[-1])))


def aim(
    verifier: Verifier,
    policy: Policy,
    q: Float[Tensor, "rows vocab"],
    p: Float[Tensor, "rows vocab"],
    path: PathState,
) -> Float[Tensor, "rows vocab"]:
    """Return the emitted distributions h of the token after each node, float64.

    The rows h depend on the path if the verifier judges paths as a whole, as ``block`` does.
    """
    row = policy.target(q, p, path if verifier.by_path else None)
    return (policy.emitted(q, p) if row is None else row).double()


class Paths:
    """N paths with their rows and law; :meth:`verify` runs the verifier with chosen coins.

    ``tree`` and ``path``, (N,), are the numbers of tree and path; ``stop``, ``last`` and ``alive``
    are the paths' parts of the law; ``aims`` (N, K + 1, V) is h, with the bonus row at the end.
    """

    def __init__(self, seen: Enumeration, tree: Tensor, path: Tensor) -> None:
        self.seen, self.tree, self.path = seen, tree, path
        self.ids, self.weight = seen.trees.paths[path], seen.weight[tree, path]
        self.q, self.p = seen.q[tree, path], seen.p[tree, path]
        self.stop, self.last = (part[tree, path] for part in (seen.law.stop, seen.law.last))
        self.alive, self.aims = seen.law.alive[tree, path], seen.aims[tree, path]
        self.length = self.ids.shape[1]
        self.coins = seen.verifier.coins(self.length)  # number of acceptance coins of a path

    def part(self, chosen: Tensor) -> "Paths":
        """Return the chosen paths only."""
        return Paths(self.seen, self.tree[chosen], self.path[chosen])

    def verify(
        self,
        accept: Float[Tensor, "N trials coins"],
        draw: Float[Tensor, "N trials"] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Verdict:
        """Return the verdict on N × trials rows, path after path; ``draw`` is 0.5 by default."""
        draw = accept.new_full(accept.shape[:2], 0.5) if draw is None else draw
        each = torch.arange(len(self.ids)).repeat_interleave(accept.shape[1])
        ids = self.ids[each]
        draft = Draft(ids, [self.length] * len(ids), self.p[each].to(dtype))
        return self.seen.verifier.verify(
            self.seen.assigned, self.q[each].to(dtype), draft, accept.flatten(0, 1), draw.flatten()
        )

    @cached_property
    def thresholds(self) -> Float[Tensor, "N K two"]:
        """Return the values of coin i at which the verdict may change, by the verifier's ``law``.

        τ is the number of accepted tokens. If the first coin that does not pass decides τ, the
        value is Pr(τ ≥ i)/Pr(τ ≥ i − 1); if the last coin that passes decides τ, the value is
        Pr(τ = i)/Pr(τ ≤ i).
        """
        tail = self.stop.flip(-1).cumsum(-1).flip(-1)
        head = self.stop.cumsum(-1)
        pairs = torch.stack([tail[:, 1:] / tail[:, :-1], self.stop[:, 1:] / head[:, 1:]], -1)
        return pairs.nan_to_num(nan=0.0).clamp(0.0, 1.0)

    def about(self, describe: Callable[[tuple[int, ...]], str]) -> Callable[..., str]:
        """Return a function from an index to text: the drafted tokens, then ``describe(index)``."""

        def text(index: tuple[int, ...]) -> str:
            drafted = " ".join(map(str, self.ids[index[0]].tolist()))
            return f"draft {drafted or '(none)'}: {describe(index)}"

        return text


def some_paths(seen: Enumeration) -> Paths:
    """Return a few paths of every tree: likeliest, random, and random with a token of h = 0."""
    source = torch.Generator().manual_seed(seen.seed)
    weight = seen.weight
    drafted = seen.trees.paths[..., None].expand(*seen.p.shape[:3], 1)
    impossible = (seen.aims[:, :, :-1].gather(-1, drafted) == 0).any(2)[..., 0]
    lots = torch.rand(weight.shape, generator=source, dtype=torch.float64)
    chosen = torch.zeros(weight.shape, dtype=torch.bool)
    for rank in (weight, lots, lots * impossible):
        best = torch.where(weight > 0, rank, 0.0).topk(min(EACH, weight.shape[1]), -1)
        chosen |= torch.zeros_like(chosen).scatter(-1, best.indices, best.values > 0)
    tree, path = chosen.nonzero(as_tuple=True)
    return Paths(seen, tree, path)
