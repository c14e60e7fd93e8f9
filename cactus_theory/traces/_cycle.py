"""One round of a decode: the drafted tokens and the rows of both models along them."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Cycle:
    """One round of a decode, all of it: rows after the first refusal too.

    Attributes
    ----------
    text : number of the text.
    position : how many new tokens the text had before.
    draft_token_ids : (K,) int64, as drafted; K may be 0.
    target_probs : (K + 1, V) float64; row 0 follows the text, row i + 1 drafted token i.
    draft_probs : (K, V) float64, the rows the tokens were drawn from; None if the drafter was
        certain of them.
    """

    text: int
    position: int
    draft_token_ids: Int[Tensor, "K"]
    target_probs: Float[Tensor, "K1 vocab"]
    draft_probs: Float[Tensor, "K vocab"] | None
