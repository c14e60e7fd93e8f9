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

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> Cycle(0, 0, torch.tensor([1]), rows, rows[:1]).draft_token_ids
    tensor([1])
    """

    text: int
    position: int
    draft_token_ids: Int[Tensor, "K"]
    target_probs: Float[Tensor, "K1 vocab"]
    draft_probs: Float[Tensor, "K vocab"] | None
