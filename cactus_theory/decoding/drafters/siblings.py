"""Draft a path, and beside each of its tokens the likeliest others: one may replace a rejection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding.drafters.interface import DraftContext, Drafter, Drafting, best
from cactus_theory.verify.draft import Draft


@dataclass(frozen=True)
class Siblings(Drafter):
    """Draft with ``drafter``, and at each place of its path ``m`` tokens beside it.

    Those are the likeliest of the row that the path's token is drawn from (of NGram: what else
    followed earlier), so that they are fixed before it is drawn. A drawn token that is among them
    is one node. Where the verifier ``tree`` replaces a rejected token by one of them, the round
    goes on for one more token (THEORY.md, Theorem 22). K is the length of the path; a pass of the
    target has up to K (m + 1) + 1 tokens.

    With ``deterministic`` the verifier is told of the m tokens, and the policy's row h is the best
    for accepting one token (Theorem 21). But after a token that replaces a refused one at most one
    more comes in this round, while after an accepted token the whole path goes on. So the row h for
    the path alone, the default, gives more tokens a call at the same KL.

    Raises
    ------
    ValueError
        m that is no whole number of at least 0; a drafter of trees.
    TypeError
        What is no drafter.

    Examples
    --------
    >>> ids, drafter = torch.tensor([[1, 2, 3]]), Siblings(ModelDrafter(pair.draft), m=2)
    >>> options = {"policy": "band:price=1", "verifier": "tree", "max_new_tokens": 8}
    >>> ct.generate(pair.target, drafter, ids, **options).num_tokens
    8
    """

    drafter: Drafter
    m: int = 2
    deterministic: bool = False

    def __post_init__(self) -> None:
        whole_number("m", self.m, 0)
        name = type(self.drafter).__name__
        if not isinstance(self.drafter, Drafter):
            raise TypeError(f"drafter: must be a Drafter, as ModelDrafter(model); got {name}")
        if self.drafter.nodes(1) > 1:
            raise ValueError(f"drafter: must draft one path; got {name}")

    def begin(self, setting: DraftContext) -> Drafting:
        return SiblingsDrafting(setting, self.drafter, self.m, self.deterministic)

    def check(self, target_model: Any) -> dict[str, Any]:
        return self.drafter.check(target_model)

    def nodes(self, depth: int) -> int:
        return self.drafter.nodes(depth) * (self.m + 1)

    def reads(self, target_model: Any) -> Sequence[int]:
        return self.drafter.reads(target_model)


class SiblingsDrafting(Drafting):
    """Drafts a path and adds, at each of its places, up to ``m`` other tokens."""

    def __init__(
        self, setting: DraftContext, drafter: Drafter, m: int, deterministic: bool
    ) -> None:
        self.texts, self.m, self.deterministic = setting.texts, m, deterministic
        self.inner = drafter.begin(replace(setting, beside=m))
        self.paths: list[list[int]] = []
        self.before: list[int] = []

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Return a draft whose first tokens are the path, the others after them."""
        trunk = self.inner.propose(wanted, coins)
        self.calls = self.inner.calls
        paths = zip(trunk.token_ids.tolist(), trunk.lengths, strict=True)
        self.paths, self.before = [ids[:count] for ids, count in paths], self.texts.lengths
        if not (self.m and any(trunk.lengths)):
            return trunk
        if trunk.probs is None:
            fixed = self.inner.others(self.paths, self.m)
        else:
            fixed = best(trunk.probs, self.m, 0.0).tolist()
        draft = with_siblings(trunk, fixed, self.m, self.deterministic)
        self.texts.propose_all(draft.token_ids)
        return draft

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)

    def settle(self) -> None:
        """Let the drafter of the path see each text up to the first token it did not draft.

        It takes what is settled for its path and one token more, and reads the rest later.
        """
        shown = zip(self.texts.rows, self.paths, self.before, strict=False)
        for text, path, start in shown:
            new = text.ids[start:]
            same = (token == drafted for token, drafted in zip(new, path, strict=False))
            agreed = next((place for place, equal in enumerate(same) if not equal), len(path))
            text.length = min(text.length, start + agreed + 1)
        self.inner.settle()
        for text in self.texts.rows:
            text.length = len(text.ids)
        self.paths, self.before = [], []  # a round may draft nothing


def with_siblings(
    trunk: Draft, fixed: Sequence[Sequence[Sequence[int]]], m: int, deterministic: bool = True
) -> Draft:
    """Return paths with up to ``m`` of the fixed tokens of each place, of ids that are no −1.

    The first tokens of a row are its path, whose nodes have the rows of ``trunk``; a token of it
    may be fixed, too, and is one node. ``deterministic`` declares what is fixed.
    """
    rows, drawn = [], trunk.probs is not None
    for ids, count, beside in zip(trunk.token_ids.tolist(), trunk.lengths, fixed, strict=True):
        path = list(enumerate(ids[:count]))
        nodes = [  # token, parent, sampled, deterministic
            (token, place - 1, drawn, not drawn or (deterministic and token in beside[place]))
            for place, token in path
        ]
        for place, token in path:
            others = [other for other in beside[place] if other not in (token, -1)]
            nodes += [(other, place - 1, False, deterministic) for other in others[:m]]
        rows.append(nodes)
    counts = list(map(len, rows))
    padded = [[*own, *[(0, -1, False, False)] * (max(counts) - len(own))] for own in rows]
    table = torch.tensor(padded, device=trunk.token_ids.device)
    ids, parents, sampled, declared = table.unbind(-1)
    return Draft(ids, counts, trunk.probs, parents, sampled.bool(), declared.bool())
