"""Draft a path, and at each place other likely tokens, which may replace a rejected token."""

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
    """Draft a path with ``drafter``, and at each place of the path ``m`` sibling tokens.

    Siblings are the likeliest tokens of the row that the path's token is drawn from (of NGram:
    further tokens that followed earlier). Siblings are fixed before the path's token is drawn. If
    the path's token is also a sibling, the token has only one node. If the verifier ``tree`` puts a
    sibling in place of a rejected token, the round goes on for one more token (THEORY.md, Theorem
    22). K is the length of the path; a target call has up to K (m + 1) + 1 tokens.

    With ``deterministic`` the siblings are declared to the verifier, and the policy's row h is the
    best for accepting one token of each place (Theorem 21). By default h is the row for the path
    alone. The default gives more tokens per target call at the same KL, because the whole path can
    go on after an accepted path token, but at most one token follows a sibling.

    Raises
    ------
    ValueError
        An m that is no whole number of at least 0; a drafter of trees.
    TypeError
        A ``drafter`` that is no Drafter.

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
    """State of a drafter with siblings: drafts a path, then adds up to ``m`` tokens per place."""

    def __init__(
        self, setting: DraftContext, drafter: Drafter, m: int, deterministic: bool
    ) -> None:
        self.texts, self.m, self.deterministic = setting.texts, m, deterministic
        self.inner = drafter.begin(replace(setting, beside=m))
        self.paths: list[list[int]] = []
        self.before: list[int] = []

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft the path and its siblings; in each draft the path's tokens come first."""
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
        """Update the path's drafter as if each text ended after its first token not on the path.

        The path's drafter has cached its path only, and is written for rounds that append a part of
        the path and one more token. The drafter reads the remaining tokens in the next round.
        """
        drafted = zip(self.texts.rows, self.paths, self.before, strict=False)
        for text, path, start in drafted:
            pairs = enumerate(zip(text.ids[start:], path, strict=False))
            agreed = next((place for place, (new, token) in pairs if new != token), len(path))
            text.length = min(text.length, start + agreed + 1)
        self.inner.settle()
        for text in self.texts.rows:
            text.length = len(text.ids)
        self.paths, self.before = [], []  # the next round may draft nothing


def with_siblings(
    trunk: Draft, fixed: Sequence[Sequence[Sequence[int]]], m: int, deterministic: bool = True
) -> Draft:
    """Return ``trunk``, a draft of single paths, with up to ``m`` siblings added at each place.

    ``fixed`` has the candidates for siblings, by text and place. In the result the path's tokens
    come first in each text, and their nodes keep the distributions of ``trunk``. A path's token
    that is also in ``fixed`` is one node; ids of −1 are skipped. With ``deterministic`` the fixed
    tokens are declared to the verifier; else siblings are marked neither sampled nor deterministic.
    """
    rows, drawn = [], trunk.probs is not None
    for ids, count, fixed_ids in zip(trunk.token_ids.tolist(), trunk.lengths, fixed, strict=True):
        # token i of the path is number i, so that i − 1 is the parent of all tokens at its place
        path = list(enumerate(ids[:count]))
        nodes = [  # token, parent, sampled, deterministic
            (token, place - 1, drawn, not drawn or (deterministic and token in fixed_ids[place]))
            for place, token in path
        ]
        for place, token in path:
            others = [other for other in fixed_ids[place] if other not in (token, -1)]
            nodes += [(other, place - 1, False, deterministic) for other in others[:m]]
        rows.append(nodes)
    counts = list(map(len, rows))
    padding = (0, -1, False, False)
    padded = [[*nodes, *[padding] * (max(counts) - len(nodes))] for nodes in rows]
    table = torch.tensor(padded, device=trunk.token_ids.device)
    ids, parents, sampled, declared = table.unbind(-1)
    return Draft(ids, counts, trunk.probs, parents, sampled.bool(), declared.bool())
