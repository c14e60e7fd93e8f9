"""Draft the continuations that a model finds likeliest, as one tree of certain tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding._text import check_model_vocabularies
from cactus_theory.decoding.drafters._base import (
    Drafter,
    Drafting,
    Setting,
    fed_parents,
    nothing,
    tree_of,
)
from cactus_theory.decoding.drafters.model import ModelDrafting
from cactus_theory.verify.draft import Draft

# the logarithm of the probability of each drafted text
Tree = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class LikeliestTree(Drafter):
    """Draft the ``n`` nodes of largest probability under ``model``, at most K deep, all certain.

    A node's probability is that of its text, at the target's temperature (at 0 at 1): no other
    certain tree of ``n`` nodes has a larger sum. One pass of the model for each depth.

    Raises
    ------
    ValueError
        n that is no whole number of at least 1.

    Examples
    --------
    >>> ids, options = torch.tensor([[1, 2, 3]]), {"verifier": "tree", "max_new_tokens": 8}
    >>> drafter = LikeliestTree(pair.draft, n=8)
    >>> generate(pair.target, drafter, ids, policy="band:price=1", **options).num_tokens
    8
    """

    model: Any
    n: int = 16

    def __post_init__(self) -> None:
        whole_number("n", self.n, 1)

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return LikeliestDrafting(setting, self.model, self.n)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a model of another vocabulary."""
        check_model_vocabularies(target_model, self.model)
        return {"draft_model": self.model}

    def nodes(self, depth: int) -> int:
        """Return n, whatever the depth."""
        return self.n


class LikeliestDrafting(ModelDrafting):
    """A draft model, fed a tree anew at every depth."""

    def __init__(self, setting: Setting, model: Any, n: int) -> None:
        self.n, self.slack = n, 1 + n
        super().__init__(setting, model, True)

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Deepen all trees at once: the parents of what is kept at the end were kept before."""
        trees, draft = [Tree() for _ in wanted], nothing(self.texts)
        for depth in range(max(wanted)):
            logs = self._logs(draft)
            for row, tree in enumerate(trees):
                for node, text in enumerate([(), *tree]):
                    if len(text) == depth < wanted[row]:
                        best = logs[row, node].topk(min(self.n, logs.shape[-1]))
                        children = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                        tree |= {(*text, n): tree.get(text, 0.0) + log for n, log in children}
                # the likeliest texts, each after those that it continues
                best = nlargest(self.n, tree.items(), key=lambda node: (node[1], -len(node[0])))
                trees[row] = dict(best)
            draft = self._draft(trees)
        return draft

    def _logs(self, draft: Draft) -> Float[Tensor, "batch nodes vocab"]:
        texts, lengths = self.texts, self.model.lengths
        settled = [length - cached for length, cached in zip(texts.lengths, lengths, strict=True)]
        counts = [length + drafted for length, drafted in zip(settled, draft.lengths, strict=True)]
        keep = [length + 1 for length in draft.lengths]
        parents = fed_parents(draft, counts)
        logits = self.model.feed(texts.take(lengths, counts), counts, keep, parents)
        self.calls = self.model.calls
        scores = self.warp.scores(logits, texts, 0, draft.lengths, draft)
        self.settle()
        return (scores.double() / (self.warp.temperature or 1.0)).log_softmax(-1)

    def _draft(self, trees: Sequence[Tree]) -> Draft:
        rows = []
        for tree in trees:
            place = {text: number for number, text in enumerate([(), *tree], -1)}
            rows.append([(text[-1], place[text[:-1]], False, True) for text in tree])
        draft = tree_of(rows, self.texts.device)
        self.texts.propose_all(draft.token_ids)
        return draft
