"""Draft without a model: look up tokens that followed earlier occurrences of the last n tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding.drafters.interface import DraftContext, Drafter, Drafting, write
from cactus_theory.decoding.text import Texts
from cactus_theory.verify.draft import Draft

# n tokens → {token that followed them: position of the token}, the latest token last
Table = dict[tuple[int, ...], dict[int, int]]


@dataclass(frozen=True)
class NGram(Drafter):
    """Draft the tokens that followed the latest earlier occurrence of a text's last tokens.

    This is prompt lookup. Matches of ``longest`` tokens are tried first, then shorter matches down
    to ``shortest`` tokens; without a match nothing is drafted. Drafts are deterministic and cost no
    forward pass.

    Raises
    ------
    ValueError
        Lengths that are no whole numbers with 1 ≤ shortest ≤ longest.

    Examples
    --------
    >>> ids = torch.tensor([[5, 6, 7, 5, 6]])  # 5, 6 was followed by 7
    >>> result = ct.generate(pair.target, NGram(), ids, policy="speculative", max_new_tokens=4)
    >>> result.draft_calls, result.num_tokens
    (0, 4)
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        whole_number("shortest", self.shortest, 1)
        whole_number("longest", self.longest, self.shortest)

    def begin(self, setting: DraftContext) -> Drafting:
        return NGramDrafting(setting.texts, range(self.longest, self.shortest - 1, -1))


class NGramDrafting(Drafting):
    """State of n-gram drafting: for every row a table from n tokens to the tokens after them."""

    def __init__(self, texts: Texts, sizes: range) -> None:
        self.texts, self.sizes = texts, sizes
        self.tables: list[Table] = [{} for _ in range(texts.batch)]
        self.indexed = [0] * texts.batch

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft for each row b up to ``wanted[b]`` tokens, found by :meth:`look_up`."""
        return write(self.texts, [self.look_up(row, count) for row, count in enumerate(wanted)])

    def keep(self, rows: Sequence[int]) -> None:
        self.tables = [self.tables[row] for row in rows]
        self.indexed = [self.indexed[row] for row in rows]

    def look_up(self, row: int, count: int) -> list[int]:
        """Return up to ``count`` tokens that followed the longest match of a row's last tokens."""
        ids = self.texts.rows[row].ids
        self._index(row, ids)
        for size in self.sizes:
            followers = self.tables[row].get(tuple(ids[-size:])) if len(ids) > size else None
            if followers:
                latest = next(reversed(followers.values()))
                return ids[latest : latest + count]
        return []

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return for each path token other tokens that followed the same n tokens in the text.

        Tokens after larger n come first; for equal n, the latest come first.
        """
        return [self._others(row, path, most) for row, path in enumerate(paths)]

    def _others(self, row: int, path: Sequence[int], most: int) -> list[list[int]]:
        """Return for each path token up to ``most`` others that followed the same n tokens."""
        others, context = [], list(self.texts.rows[row].ids)
        for token in path:
            tokens = {token: None}  # an ordered set that begins with the path's token
            for size in self.sizes:
                followers = self.tables[row].get(tuple(context[-size:]), {})
                tokens |= dict.fromkeys(reversed(followers))
            others.append(list(tokens)[1 : 1 + most])
            context.append(token)
        return others

    def _index(self, row: int, ids: list[int]) -> None:
        """Add the tokens since the last call to the table of a row."""
        table = self.tables[row]
        for position in range(self.indexed[row] + 1, len(ids)):
            for size in self.sizes:
                if size <= position:
                    followers = table.setdefault(tuple(ids[position - size : position]), {})
                    followers.pop(ids[position], None)  # the latest comes last
                    followers[ids[position]] = position
        self.indexed[row] = max(self.indexed[row], len(ids) - 1)
