"""The token ids of one text while it grows, in memory taken once."""

import torch
from jaxtyping import Int
from torch import Tensor


class GrowingText:
    """Prompt and generated ids in one buffer (1, prompt + max_new_tokens).

    Attributes
    ----------
    length : tokens that are settled; drafted ones lie behind them.
    new_ids : the generated ids so far.
    ended : whether an end-of-text token was generated.
    """

    def __init__(
        self, prompt: Int[Tensor, "1 prompt"], max_new_tokens: int, eos: frozenset[int]
    ) -> None:
        self.length = prompt.shape[1]
        self.buffer = torch.empty(
            1, self.length + max_new_tokens, dtype=torch.int64, device=prompt.device
        )
        self.buffer[:, : self.length] = prompt
        self.eos = eos
        self.new_ids: list[int] = []
        self.ended = False

    @property
    def room(self) -> int:
        """Return how many tokens may still be generated; 0 once the text has ended."""
        return 0 if self.ended else self.buffer.shape[1] - self.length

    def behind(self, start: int, drafted: int = 0) -> Int[Tensor, "1 some"]:
        """Return the ids from position ``start`` to the last settled or drafted one."""
        return self.buffer[:, start : self.length + drafted]

    def propose(self, offset: int, token: Int[Tensor, "1"]) -> None:
        """Write drafted token number ``offset`` behind the settled ones."""
        self.buffer[:, self.length + offset] = token

    def settle(self, token_ids: Int[Tensor, "1 some"]) -> list[int]:
        """Append ids up to the first end of text and return those that were appended."""
        ids: list[int] = token_ids[0].tolist()
        for count, token in enumerate(ids, 1):
            if token in self.eos:
                self.ended = True
                ids = ids[:count]
                break
        end = self.length + len(ids)
        self.buffer[:, self.length : end] = token_ids[:, : len(ids)]
        self.length = end
        self.new_ids += ids
        return ids
