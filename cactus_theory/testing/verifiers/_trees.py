"""Draw small trees of rows, on which a verifier's law can be summed over all drafts exactly.

A tree of depth K over V tokens has a target row and a draft row after every text of fewer than K
tokens, and a target row after every text of K tokens. Drafts are the V^K paths from the root.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

# (V, K) of trees number 0, 1, …, repeated in a cycle
SHAPES = ((2, 1), (3, 2), (2, 3), (4, 1), (2, 2), (3, 3), (3, 1), (4, 2), (2, 3), (3, 2), (4, 3))
# most trees of one shape in a batch, which bounds the memory
TOGETHER = 100
# spacing of float64 numbers from 1 to 2
ULP = 2.0**-52
# relative distances between rows that are nearly equal
NEAR = (1e-6, 1e-10, 1e-15)
# rows of powers of 2, by V: dividing by them is exact
POWERS = {
    2: ((0.5, 0.5), (1.0, 0.0)),
    3: ((0.5, 0.25, 0.25), (0.5, 0.5, 0.0), (1.0, 0.0, 0.0)),
    4: ((0.25, 0.25, 0.25, 0.25), (0.5, 0.25, 0.125, 0.125), (0.5, 0.5, 0.0, 0.0)),
}
EIGHTHS = 8

Rows = Float[Tensor, "rows vocab"]
Pair = tuple[Rows, Rows]


@dataclass(frozen=True)
class Trees:
    """A batch of T trees of one shape.

    Attributes
    ----------
    q, p : target rows and draft rows (T, V^i, V) by depth i; the depth K has target rows only.
    kinds : for each tree, the kind of its rows, such as ``one-hot`` or ``mixed``.
    numbers : the trees' numbers; a number and the seed determine the rows of a tree.
    """

    q: tuple[Float[Tensor, "trees _ vocab"], ...]
    p: tuple[Float[Tensor, "trees _ vocab"], ...]
    kinds: tuple[str, ...]
    numbers: tuple[int, ...]

    @property
    def vocab(self) -> int:
        """Return the number of tokens V."""
        return self.q[0].shape[-1]

    @property
    def depth(self) -> int:
        """Return the depth K, the number of drafted tokens."""
        return len(self.p)

    @cached_property
    def paths(self) -> Int[Tensor, "paths K"]:
        """Return the tokens of every path, (V^K, K)."""
        places = self.vocab ** torch.arange(self.depth - 1, -1, -1)
        return torch.arange(self.vocab**self.depth)[:, None] // places % self.vocab

    def node(self, depth: int) -> Int[Tensor, "paths"]:
        """Return the number of the node that each path passes at this depth."""
        return torch.arange(len(self.paths)) // self.vocab ** (self.depth - depth)

    def along(self, rows: tuple[Tensor, ...]) -> Float[Tensor, "trees paths depths vocab"]:
        """Return the rows of the nodes along each path; ``rows`` are by depth and node."""
        return torch.stack([depth_rows[:, self.node(i)] for i, depth_rows in enumerate(rows)], 2)

    @cached_property
    def reached(self) -> tuple[Float[Tensor, "trees _"], ...]:
        """Return the probability p(x_1)…p(x_i) that each text is drafted, by depth: (T, V^i)."""
        chances = [torch.ones(len(self.kinds), 1, dtype=torch.float64)]
        for rows in self.p:
            chances.append((chances[-1][..., None] * rows.double()).flatten(1))
        return tuple(chances)


def _smooth(count: int, vocab: int, source: torch.Generator, spread: float = 2.0) -> Pair:
    """Return q and p, (count, V) each, as softmax rows of normal logits, without zeros."""
    logits = spread * torch.randn(2, count, vocab, generator=source, dtype=torch.float64)
    logits[1] += logits[0]
    return logits[0].softmax(-1), logits[1].softmax(-1)


def _zeros(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return rows q and p with zeros at tokens that are drawn for each row."""
    rows = torch.stack(_smooth(count, vocab, source))
    kept = torch.rand(rows.shape, generator=source) < 0.6
    kept_token = torch.randint(0, vocab, rows.shape[:-1], generator=source)
    rows = torch.where(kept.scatter(-1, kept_token[..., None], True), rows, 0.0)
    rows = rows / rows.sum(-1, keepdim=True)
    return rows[0], rows[1]


def _one_hot(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return rows q and p; of each pair the target row, the draft row or both are one-hot."""
    rows = list(_smooth(count, vocab, source))
    which = torch.randint(0, 3, (count, 1), generator=source)
    for number, uncertain in enumerate((1, 0)):
        token = torch.randint(0, vocab, (count,), generator=source)
        hot = torch.nn.functional.one_hot(token, vocab).double()
        rows[number] = torch.where(which != uncertain, hot, rows[number])
    return rows[0], rows[1]


def _equal(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return equal rows q = p with zeros."""
    q, _ = _zeros(count, vocab, source)
    return q, q.clone()


def _nearly_equal(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return rows q and p that differ by about 1e-6, 1e-10 or 1e-15 of each entry."""
    q, _ = _smooth(count, vocab, source)
    size = torch.tensor(NEAR).double()[torch.randint(0, len(NEAR), (count, 1), generator=source)]
    p = q * (1 + size * torch.randn(count, vocab, generator=source, dtype=torch.float64))
    return q, p / p.sum(-1, keepdim=True)


def _swapped(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return sorted rows q, and p as the reversed q, so that p is large where q is small."""
    q = _smooth(count, vocab, source)[0].sort(-1).values
    return q, q.flip(-1)


def _fractions(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return rows of short binary fractions, so that quotients q/p are exact."""
    table = torch.tensor(POWERS[vocab], dtype=torch.float64)
    p = table[torch.randint(0, len(table), (count,), generator=source)]
    p = p.gather(-1, torch.rand(count, vocab, generator=source).argsort(-1))
    tokens = torch.randint(0, vocab, (count, EIGHTHS), generator=source)
    q = torch.nn.functional.one_hot(tokens, vocab).sum(1).double() / EIGHTHS
    return q, p


def _heavy(count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return rows that sum to 1 + 2^−52, as rows may do after rounding."""
    whole = (torch.stack(_one_hot(count, vocab, source)) / ULP).round()  # integers add up exactly
    missing = 1 / ULP + 1 - whole.sum(-1, keepdim=True)
    rows = whole.scatter_add(-1, whole.argmax(-1, keepdim=True), missing) * ULP
    return rows[0], rows[1]


KINDS: dict[str, Callable[[int, int, torch.Generator], Pair]] = {
    "smooth": _smooth,
    "fractions": _fractions,
    "zeros": _zeros,
    "one-hot": _one_hot,
    "equal": _equal,
    "nearly equal": _nearly_equal,
    "swapped": _swapped,
    "heavy": _heavy,
    "tiny": partial(_smooth, spread=8.0),
}
# kinds of trees number 0, 1, …, in a cycle; in a mixed tree each node's rows are of a drawn kind
TURNS = (*KINDS, "mixed", "mixed", "mixed")


def _rows(kind: str, count: int, vocab: int, source: torch.Generator) -> Pair:
    """Return q and p, (count, V) each, of one kind or of drawn kinds ("mixed")."""
    if kind != "mixed":
        return KINDS[kind](count, vocab, source)
    pairs = [make(count, vocab, source) for make in KINDS.values()]
    chosen = torch.randint(0, len(pairs), (count,), generator=source)
    q, p = (torch.stack(rows)[chosen, torch.arange(count)] for rows in zip(*pairs, strict=True))
    return q, p


@lru_cache(maxsize=4)
def trees(count: int, seed: int = 0) -> tuple[Trees, ...]:
    """Return ``count`` trees in batches of one shape, the smallest shape first.

    A tree's rows depend on its number and the seed, not on ``count``.
    """
    numbers: dict[tuple[int, int], list[int]] = {}
    for number in range(count):
        numbers.setdefault(SHAPES[number % len(SHAPES)], []).append(number)
    return tuple(
        _group(shape, numbers[shape][first : first + TOGETHER], seed)
        for shape in sorted(numbers, key=lambda shape: shape[0] ** shape[1])
        for first in range(0, len(numbers[shape]), TOGETHER)
    )


def _group(shape: tuple[int, int], numbers: list[int], seed: int) -> Trees:
    """Return the trees with these numbers, which share one shape (V, K), as a batch."""
    vocab, depth = shape
    kinds = tuple(TURNS[number % len(TURNS)] for number in numbers)
    # each tree has its own random numbers, so that its rows do not depend on the other trees
    sources = [torch.Generator().manual_seed(2**32 * seed + number) for number in numbers]
    drawn = list(zip(kinds, sources, strict=True))
    levels = [  # by depth: the target rows of all trees, and their draft rows
        zip(*(_rows(kind, vocab**i, vocab, source) for kind, source in drawn), strict=True)
        for i in range(depth + 1)
    ]
    q, p = (tuple(map(torch.stack, rows)) for rows in zip(*levels, strict=True))
    return Trees(q, p[:-1], kinds, tuple(numbers))
