"""The interface of drafters: begin a decode, propose tokens, learn which were accepted."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.sampling import Warp
from cactus_theory.decoding.text import Texts
from cactus_theory.verify.draft import Draft
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class DraftContext:
    """The settings of one decode that a drafter needs.

    ``width`` is the largest number of tokens of a path ever asked for at once; ``fast_forward``
    is how models run, see :func:`cactus_theory.generate`. ``beside`` is how many tokens will be
    asked for beside each token of a deterministic path (:meth:`Drafting.others`). ``features`` is
    the target with its cache, None where a drafter is tried while no target decodes:
    ``features.hidden`` has the states of the layers that the drafter asked for
    (:meth:`Drafter.reads`), of ``features.lengths`` tokens of each text. The pass that verified a
    round has written there, and states of tokens that were not accepted are gone: before the first
    round there are none, afterwards those of all tokens of a text but the last.
    """

    target_model: Any
    texts: Texts
    warp: Warp
    clock: Stopwatch
    width: int
    fast_forward: bool | None = None
    features: CachedModel | None = None
    beside: int = 0


class Drafting(ABC):
    """A drafter at work on one decode.

    Attributes
    ----------
    calls : forward passes of a draft model so far.
    """

    calls: int = 0

    @abstractmethod
    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft paths of up to ``wanted[b]`` tokens after the settled text of row b.

        Writes them into the texts' buffer. ``coins`` are uniform on [0, 1), one a sampled token,
        in their order. The draft is the loop's until the next call: nothing in it may be written
        to before.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order (no row moves to a later place)."""

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return up to ``most`` other tokens for each place of each row's deterministic path.

        The likeliest first, given the text and the path above alone, −1 for none; the token itself
        may stand among one more. By default none.
        """
        return [[[] for _ in path] for path in paths]

    def settle(self) -> None:  # noqa: B027  most drafters keep no state of their own
        """Update the drafter's state after tokens have become part of the texts."""


class SampledDrafting(Drafting):
    """Rows (B, K, V) of one round in memory that is taken once, and the tokens drawn from them.

    Where it is ``deterministic`` the likeliest token is taken and there are no rows. ``likeliest``
    holds by place the likeliest tokens (B, m), kept where others beside the path are asked for.
    """

    def __init__(self, setting: DraftContext, greedy: bool) -> None:
        self.texts, self.warp, self.clock = setting.texts, setting.warp, setting.clock
        self.deterministic = greedy or self.warp.greedy
        self.width = setting.width
        self.probs: Tensor | None = None
        self.beside, self.likeliest = setting.beside, dict[int, Tensor]()

    def draw(
        self,
        logits: Float[Tensor, "batch 1 vocab"],
        offset: int,
        draft_lengths: Sequence[int],
        coin: Tensor,
    ) -> Int[Tensor, "batch"]:
        """Write drafted token number ``offset`` of every row, and its law; return it.

        The logits are written over. Entries of rows that draft no more tokens are arbitrary.
        """
        if self.deterministic:
            scores = self.warp.scores(logits, self.texts, offset, draft_lengths)[:, 0]
            token = scores.argmax(-1)
            if self.beside:
                self.likeliest[offset] = best(scores, self.beside + 1, -torch.inf)
        else:
            token = pick(self.law(logits, offset, draft_lengths), coin)
            token.clamp_(min=0)  # a row without a law is found where it verifies
        self.texts.propose(offset, token)
        return token

    def law(
        self, logits: Float[Tensor, "batch 1 vocab"], offset: int, draft_lengths: Sequence[int]
    ) -> Float[Tensor, "batch vocab"]:
        """Write the law of what follows the first ``offset`` drafted tokens; return it."""
        out = self.memory(logits)[:, offset : offset + 1]
        return self.warp(logits, self.texts, offset, draft_lengths, out=out)[:, 0]

    def memory(self, logits: Tensor) -> Tensor:
        """Return room for the rows of one round, taken once."""
        if self.probs is None:
            half = logits.dtype in (torch.float16, torch.bfloat16)
            shape = (logits.shape[0], self.width, logits.shape[-1])
            self.probs = logits.new_zeros(shape, dtype=torch.float32 if half else logits.dtype)
        return self.probs

    def rows(self, drafted: int) -> Float[Tensor, "batch some vocab"] | None:
        """Return the rows of ``drafted`` tokens."""
        return None if self.probs is None else self.probs[:, :drafted]

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return the likeliest tokens of the rows that deterministic ones are of."""
        places = range(max(map(len, paths)))
        return torch.stack([self.likeliest[place] for place in places], 1).tolist()

    def keep(self, rows: Sequence[int]) -> None:
        if self.probs is not None:
            self.probs = self.probs[: len(rows)]


class Drafter(ABC):
    """A way to guess the next tokens. Subclasses hold options and no state of a decode.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters import as_drafter
    >>> isinstance(NGram(), Drafter), type(as_drafter(pair.draft)).__name__
    (True, 'ModelDrafter')
    """

    @abstractmethod
    def begin(self, setting: DraftContext) -> Drafting:
        """Return this drafter at work on one decode."""

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a target it cannot draft for; return models whose limits must be kept."""
        return {}

    def nodes(self, depth: int) -> int:
        """Return the most tokens of a draft whose paths have ``depth``; as many in a chain."""
        return depth

    def reads(self, target_model: Any) -> Sequence[int]:
        """Return the layers of the target whose hidden states it asks for; none by default.

        0 are the embeddings, i the states after layer i, and the number of layers those that the
        head reads, as in ``output_hidden_states`` of the library.
        """
        return ()


def nothing(texts: Texts) -> Draft:
    """Return a draft without tokens for every text."""
    ids = torch.empty(texts.batch, 0, dtype=torch.int64, device=texts.device)
    return Draft(ids, [0] * texts.batch, None)


def fed_parents(draft: Draft, counts: Sequence[int]) -> Int[Tensor, "batch new"] | None:
    """Return the parent of each fed token among the fed ones; None for chains.

    Of ``counts[b]`` fed tokens of row b the last ones are the draft's.
    """
    if draft.parents is None:
        return None
    fed = max(counts)
    parents = torch.arange(-1, fed - 1, device=draft.parents.device).repeat(len(counts), 1)
    for row, (count, drafted) in enumerate(zip(counts, draft.lengths, strict=True)):
        first = count - drafted  # the settled tokens that are fed along
        follows = draft.parents[row, :drafted]
        parents[row, first:count] = torch.where(follows >= 0, follows + first, first - 1)
    return parents


def write(texts: Texts, drafts: Sequence[Sequence[int]]) -> Draft:
    """Return a deterministic draft (no rows) of these tokens, written after the texts."""
    counts = [len(ids) for ids in drafts]
    width = max(counts)
    if not width:
        return nothing(texts)
    rows = [list(ids) + [0] * (width - len(ids)) for ids in drafts]
    token_ids = torch.tensor(rows, dtype=torch.int64, device=texts.device)
    texts.propose_all(token_ids)
    return Draft(token_ids, counts, None)


def best(rows: Float[Tensor, "*batch vocab"], m: int, least: float) -> Int[Tensor, "*batch m"]:
    """Return the ``m`` largest tokens of each row, −1 for those not above ``least``."""
    largest = rows.topk(min(m, rows.shape[-1]))
    return torch.where(largest.values > least, largest.indices, -1)
