r"""The tree of all paths that may be drafted: a target row and a draft row for every prefix.

With V tokens and K drafted tokens, :math:`1 + V + … + V^{K-1}` prefixes have a row, in
breadth-first order: the empty prefix is row 0, and the prefix of row u with token x appended is row
:math:`uV + x + 1`. Prefixes of all K tokens follow in the same order. They have no row here, as the
bonus token is always drawn from the target.

:func:`follow` computes the result of verifying against a row h (in place of q) at every node. With
P = 1 at the root, :math:`P(ux) = \min\{1, P(u) h(x)/p(x)\}` is the largest probability with which
any verifier of one path can accept the prefix ux if it is drafted (Sun et al. 2024, arXiv
2403.10444).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cactus_theory.base import tensors
from cactus_theory.base.rows import load_rows, pair_in
from cactus_theory.divergences import FDivergence

# most prefixes of a tree: each has a few variables, and solvers take a minute at this size
MOST_PREFIXES = 5_000


@dataclass(frozen=True)
class PathTree:
    """The rows (nodes, V) of a target and a draft for every prefix shorter than K tokens.

    The rows q and p are in breadth-first order, float64 and divided by their sums; the number of
    nodes is 1 + V + … + V^(K−1). Raises ValueError or TypeError unless both are rows of
    probabilities of one shape and dtype, and their number is that of a whole tree, at most 5,000.
    """

    target: np.ndarray
    draft: np.ndarray

    def __post_init__(self) -> None:
        rows = tensors.probability_rows(self.target, self.draft)
        target, draft = (row.cpu().numpy().copy() for row in rows)
        if target.ndim != 2 or not len(target):
            raise ValueError(
                f"target_probs: must be (nodes, V), a row a prefix; got {tensors.describe(rows[0])}"
            )
        if len(target) > MOST_PREFIXES:
            raise ValueError(f"target_probs: at most {MOST_PREFIXES} rows; got {len(target)}")
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "draft", draft)
        # ``levels`` end with the first whole tree that has at least as many rows
        size = self.levels[-1].stop
        if size != len(target):
            raise ValueError(
                f"target_probs: a whole tree of {self.vocabulary} tokens has "
                f"{self.levels[-1].start} rows or {size}; got {len(target)}"
            )

    @property
    def vocabulary(self) -> int:
        """Return V, the number of tokens."""
        return self.target.shape[1]

    @property
    def depth(self) -> int:
        """Return K, the number of drafted tokens."""
        return len(self.levels)

    @property
    def levels(self) -> list[slice]:
        """Return the rows of the prefixes of 0, 1, …, K − 1 tokens, one slice for each length."""
        levels = [slice(0, 1)]
        while levels[-1].stop < len(self.target):
            last = levels[-1]
            levels.append(slice(last.stop, last.stop + self.vocabulary * (last.stop - last.start)))
        return levels

    @property
    def drafted(self) -> np.ndarray:
        """Return the probability that each prefix is drafted, (nodes + V^K,)."""
        return self._products(self.draft)

    @property
    def possible(self) -> np.ndarray:
        """Return :attr:`drafted`, but 0 where the target excludes a token of the prefix."""
        return self._products(np.where(self.target > 0, self.draft, 0.0))

    def _products(self, rows: np.ndarray) -> np.ndarray:
        """Return the product of the entries of ``rows`` along each prefix, (nodes + V^K,)."""
        products = [np.ones(1)]
        for level in self.levels:
            products.append((products[-1][:, None] * rows[level]).ravel())
        return np.concatenate(products)

    @classmethod
    def load(cls, path: str | Path, *, logits: bool = False) -> "PathTree":
        """Load a tree from a .npz file with arrays ``target`` and ``draft`` (or with ``_probs``).

        Raises the errors of ``load_rows`` for the file, and of the class for the rows.
        """
        names = pair_in(str(path)) or (f"{path}::target", f"{path}::draft")
        return cls(*(load_rows(name, logits=logits) for name in names))


@dataclass(frozen=True)
class Followed:
    """The exact result of block verification against a row h at every node.

    ``alive`` (nodes + V^K,) is P, the probability that a prefix is accepted if it is drafted; 0 for
    prefixes that cannot be drafted.
    """

    alive: np.ndarray
    reached: np.ndarray  # (nodes + V^K,) t, which is P times the probability of drafting the prefix
    tokens: float  # per target call, the recovered or bonus token included
    divergence: float  # metered per call: Σ t D(h‖q) over the nodes, 0 for a bonus token

    @property
    def per_token(self) -> float:
        """Return the metered divergence per emitted token."""
        return self.divergence / self.tokens


def follow(tree: PathTree, target: np.ndarray, kind: FDivergence) -> Followed:
    """Compute the exact result of verifying blocks against the rows ``target`` (nodes, V)."""
    levels = [np.ones(1)]  # P of the prefixes of 0, 1, … tokens
    for level in tree.levels:
        mass, drafted = levels[-1][:, None] * target[level], tree.draft[level]
        ratio = np.divide(mass, drafted, out=np.zeros_like(mass), where=drafted > 0)
        levels.append(np.minimum(ratio, 1.0).ravel())
    alive = np.concatenate(levels)
    reached = alive * tree.drafted
    # D may be ∞ at a node that is never reached, where it costs nothing
    visited = reached[: len(target)] > 0
    h, q = torch.from_numpy(target[visited]), torch.from_numpy(tree.target[visited])
    spent = float(reached[: len(target)][visited] @ kind.value(h, q).numpy())
    # the root's 1 is the recovered or bonus token
    return Followed(alive, reached, tokens=float(reached.sum()), divergence=spent)


def state_tree(
    target: np.ndarray, draft: np.ndarray, depth: int, state: int
) -> tuple[PathTree, np.ndarray]:
    """Return the tree of two Markov models after the token ``state``, and each prefix's last token.

    ``target`` and ``draft`` (V, V) are the models' rows after each token. The last tokens
    (nodes + V^K,) are in the tree's order, with the prefixes of all ``depth`` tokens at the end.
    """
    count_prefixes(len(target), depth)
    last_tokens = [np.array([state])]
    for _ in range(depth):
        last_tokens.append(np.tile(np.arange(len(target)), len(last_tokens[-1])))
    inner = np.concatenate(last_tokens[:-1])
    return PathTree(target[inner], draft[inner]), np.concatenate([inner, last_tokens[-1]])


def count_prefixes(vocabulary: int, depth: int) -> int:
    """Return 1 + V + … + V^(K−1), the number of nodes; ValueError above 5,000."""
    # every level has a prefix at least, so more levels than the limit need not be added up
    total = sum(vocabulary**level for level in range(min(depth, MOST_PREFIXES + 1)))
    if total > MOST_PREFIXES:
        raise ValueError(
            f"depth: must leave at most {MOST_PREFIXES} prefixes, of {vocabulary} tokens; "
            f"got {depth}"
        )
    return total
