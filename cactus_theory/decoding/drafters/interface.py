"""The interface of drafters: begin a decode, propose tokens, update after a verified round.

A :class:`Drafter` holds options; its :class:`Drafting` holds the state of one decode. The host loop
calls the methods of both classes; :class:`SampledDrafting` helps drafters that draw tokens from
logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.text import Texts
from cactus_theory.verify.draft import Draft
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class DraftContext:
    """The parts of one decode that a drafter may use.

    ``width`` is the most tokens of a path in one call of :meth:`Drafting.propose`. ``fast_forward``
    is as in :func:`cactus_theory.generate`. ``beside`` is the largest ``most`` with which
    :meth:`Drafting.others` is called. ``features`` is the target with its cache, or None if a
    drafter is tried without a target. ``features.hidden`` returns hidden states of the layers in
    :meth:`Drafter.reads`, for the first ``features.lengths`` tokens of each text. The target's
    verifying pass writes these states, and states of rejected tokens are dropped. So before the
    first round there are no states; afterwards there are states of all tokens of a text but the
    last.
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
    """The state of a drafter in one decode.

    Attributes
    ----------
    calls : number of forward passes of a draft model so far.
    """

    calls: int = 0

    @abstractmethod
    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft a path of up to ``wanted[b]`` tokens after the current text of batch row b.

        The drafted tokens are also written into the texts' buffer. ``coins`` are uniform random
        numbers of [0, 1), one for each sampled token, in the order of the tokens. The loop reads
        the draft until the next call, so the drafter must not change the draft's tensors before.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the state of these batch rows, in this order (no row moves to a later place)."""

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return up to ``most`` alternatives to each token of each row's deterministic path.

        Alternatives depend on the text and the path before the token only; the likeliest is first.
        −1 stands for none. If the path's token is in the list, the list may be longer by one.
        By default there are no alternatives.
        """
        return [[[] for _ in path] for path in paths]

    def settle(self) -> None:  # noqa: B027  most drafters keep no state of their own
        """Update the drafter's state after a round's tokens have been appended to the texts."""


class SampledDrafting(Drafting):
    """Base class for drafting from logits: draw tokens, and keep the draft rows (B, K, V).

    The rows' memory is allocated once. If ``deterministic``, the likeliest token is drafted and no
    rows are kept. ``likeliest`` then has for each place of the draft the ``beside + 1`` likeliest
    tokens of each row, if ``beside`` > 0.
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
        """Draw drafted token number ``offset`` of every text; store token and row p; return tokens.

        The logits are overwritten. Tokens of texts whose draft has ended are arbitrary.
        """
        if self.deterministic:
            scores = self.warp.scores(logits, self.texts, offset, draft_lengths)[:, 0]
            token = scores.argmax(-1)
            if self.beside:
                self.likeliest[offset] = best(scores, self.beside + 1, -torch.inf)
        else:
            token = pick(self.law(logits, offset, draft_lengths), coin)
            token.clamp_(min=0)  # −1 from a row that is no distribution: verification raises
        self.texts.propose(offset, token)
        return token

    def law(
        self, logits: Float[Tensor, "batch 1 vocab"], offset: int, draft_lengths: Sequence[int]
    ) -> Float[Tensor, "batch vocab"]:
        """Store and return the rows p from which drafted token number ``offset`` is drawn."""
        out = self.memory(logits)[:, offset : offset + 1]
        return self.warp(logits, self.texts, offset, draft_lengths, out=out)[:, 0]

    def memory(self, logits: Tensor) -> Tensor:
        """Return the memory for the rows of one round, allocated at the first call."""
        if self.probs is None:
            half = logits.dtype in (torch.float16, torch.bfloat16)
            shape = (logits.shape[0], self.width, logits.shape[-1])
            self.probs = logits.new_zeros(shape, dtype=torch.float32 if half else logits.dtype)
        return self.probs

    def rows(self, drafted: int) -> Float[Tensor, "batch some vocab"] | None:
        """Return the rows p of the first ``drafted`` tokens; None for deterministic drafts."""
        return None if self.probs is None else self.probs[:, :drafted]

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return for each token of a path the likeliest tokens, by the logits at its position."""
        places = range(max(map(len, paths)))
        return torch.stack([self.likeliest[place] for place in places], 1).tolist()

    def keep(self, rows: Sequence[int]) -> None:
        if self.probs is not None:
            self.probs = self.probs[: len(rows)]


class Drafter(ABC):
    """Base class of drafters, which guess the next tokens; subclasses hold options, no state.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters import as_drafter
    >>> isinstance(NGram(), Drafter), type(as_drafter(pair.draft)).__name__
    (True, 'ModelDrafter')
    """

    @abstractmethod
    def begin(self, setting: DraftContext) -> Drafting:
        """Return the drafter's state for one decode."""

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a target that the drafter cannot draft for; return further models to check.

        The models are returned by the name of their argument, such as ``draft_model``.
        """
        return {}

    def nodes(self, depth: int) -> int:
        """Return the most drafted tokens of a draft with paths of ``depth`` tokens."""
        return depth

    def reads(self, target_model: Any) -> Sequence[int]:
        """Return the layers of the target whose hidden states the drafter reads; none by default.

        Numbers are as in transformers' ``output_hidden_states``: 0 for the embeddings, i for the
        states after layer i, and the number of layers for the states that the LM head reads.
        """
        return ()


def nothing(texts: Texts) -> Draft:
    """Return a draft without tokens for every text."""
    ids = torch.empty(texts.batch, 0, dtype=torch.int64, device=texts.device)
    return Draft(ids, [0] * texts.batch, None)


def fed_parents(draft: Draft, counts: Sequence[int]) -> Int[Tensor, "batch new"] | None:
    """Return the index of each fed token's parent among the row's fed tokens; None for chains.

    Row b is fed ``counts[b]`` tokens, of which the last ones are the drafted tokens.
    """
    if draft.parents is None:
        return None
    fed = max(counts)
    parents = torch.arange(-1, fed - 1, device=draft.parents.device).repeat(len(counts), 1)
    for row, (count, drafted) in enumerate(zip(counts, draft.lengths, strict=True)):
        first = count - drafted  # number of settled tokens that are fed before the draft
        follows = draft.parents[row, :drafted]
        parents[row, first:count] = torch.where(follows >= 0, follows + first, first - 1)
    return parents


def write(texts: Texts, drafts: Sequence[Sequence[int]]) -> Draft:
    """Write tokens to the texts' buffer; return them as a deterministic draft, without rows."""
    counts = [len(ids) for ids in drafts]
    width = max(counts)
    if not width:
        return nothing(texts)
    rows = [list(ids) + [0] * (width - len(ids)) for ids in drafts]
    token_ids = torch.tensor(rows, dtype=torch.int64, device=texts.device)
    texts.propose_all(token_ids)
    return Draft(token_ids, counts, None)


def best(rows: Float[Tensor, "*batch vocab"], m: int, least: float) -> Int[Tensor, "*batch m"]:
    """Return the tokens of the ``m`` largest values of each row, −1 for values ≤ ``least``."""
    largest = rows.topk(min(m, rows.shape[-1]))
    return torch.where(largest.values > least, largest.indices, -1)
