"""What each new token cost, and how likely it was: one entry a token of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of the probabilities of the new tokens, (B, N) float64, NaN as padding.

    Attributes
    ----------
    target : ln q, q the target's row for the token, after processors and temperature. Their sum
        is the log-likelihood of the answer under the target: this one scores a text (perplexity,
        reranking, the reference of a policy gradient).
    emitted : ln h, h the law that the token was drawn from, given the text before it and that
        the round got that far: the emitted law of the token's policy (``chain``), the row h at
        the node (``block``), and q for a bonus token or one that was not drafted. Accepted and
        recovered tokens have the same h: which of the two a token was is not asked.

    Where the policy is lossless the two are equal. On average over h, ``emitted − target`` of a
    token is the divergence that the meter charges for it (KL), so that the sums of an answer
    average to the meter's, no less than the KL of whole texts. The product of q ÷ h over an
    answer, ``exp`` of the sum of ``target − emitted``, weighs answers back to the target's law
    wherever h excludes no token that q allows. ``emitted`` is not the law of the token given the
    text alone, which is a mixture over where rounds may have begun: it does not score a text.

    Examples
    --------
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> lossless = generate(
    ...     pair.target, pair.draft, ids, policy="speculative", max_new_tokens=8, log_probs=True
    ... )
    >>> torch.allclose(lossless.log_probs.target, lossless.log_probs.emitted)
    True
    """

    target: Float[Tensor, "batch new"]
    emitted: Float[Tensor, "batch new"]


class TokenLog:
    """Entries of up to ``room`` new tokens of each of B texts, written in any order.

    Attributes
    ----------
    kl : (B · room,) what the meter charged for each token, 0 for those it does not charge.
    target, emitted : (B · room,) ln q and ln h, or None where they are not wanted.
    """

    def __init__(self, batch: int, room: int, log_probs: bool) -> None:
        self.batch, self.room = batch, room
        self.kl = torch.zeros(batch * room, dtype=torch.float64)
        self.target = torch.full_like(self.kl, torch.nan) if log_probs else None
        self.emitted = torch.full_like(self.kl, torch.nan) if log_probs else None

    def slots(self, text: int, first: int, count: int) -> Int[Tensor, "count"]:
        """Return the places of ``count`` tokens of a text, from its new token ``first`` on."""
        start = text * self.room + first
        return torch.arange(start, start + count)

    def score(
        self,
        place: tuple[int, int],
        ids: Sequence[int],
        target_probs: Float[Tensor, "rows vocab"],
        path: Int[Tensor, "most"] | None = None,
    ) -> None:
        """Enter ln q of a round's tokens, for ln h as well: :meth:`charge` replaces that later.

        ``place`` is the text and its new tokens before these, ``target_probs`` the text's rows
        of the round, ``path`` the accepted tokens of a tree among the drafted ones, None where
        they are the first ones.
        """
        if self.target is None or self.emitted is None:
            return
        rows: Any = slice(0, len(ids))
        if path is not None:  # a token's row follows the accepted token before it
            rows = [0, *(taken + 1 for taken in path[: len(ids) - 1].tolist())]
        q = check.normalised(target_probs[rows])
        own = q.gather(-1, torch.tensor(ids, device=q.device)[:, None])[:, 0].log().cpu()
        slots = self.slots(*place, len(ids))
        self.target[slots] = self.emitted[slots] = own

    def charge(
        self,
        slots: Int[Tensor, "rows"],
        ids: Int[Tensor, "rows"],
        emitted: Float[Tensor, "rows vocab"],
        spent: Float[Tensor, "rows"],
    ) -> None:
        """Enter what charged tokens cost, and ln h."""
        self.kl[slots] = spent.cpu()
        if self.emitted is not None:
            self.emitted[slots] = emitted.gather(-1, ids[:, None])[:, 0].log().cpu()

    def costs(self, width: int) -> Float[Tensor, "batch width"]:
        """Return what the first ``width`` tokens of each text were charged."""
        return self.kl.reshape(self.batch, self.room)[:, :width].clone()

    def log_probs(self, width: int) -> LogProbs | None:
        """Return the logarithms of the first ``width`` tokens of each text."""
        if self.target is None or self.emitted is None:
            return None
        shape = self.batch, self.room
        return LogProbs(*(own.reshape(shape)[:, :width] for own in (self.target, self.emitted)))
