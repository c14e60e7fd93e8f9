"""Turn logits into probabilities: processors with top-k and top-p, then the temperature.

The host loop, drafters and ``served`` use this module. The device loop, which has no processors,
uses ``device.verify.probabilities``.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import greedy, scaled, softmax_in_order, warn_of_probabilities
from cactus_theory.decoding.processors import Places, Processors
from cactus_theory.decoding.text import Texts
from cactus_theory.verify.draft import Draft


class Warp:
    """Function from logits to probabilities: processors, then softmax(logits / temperature).

    At temperature 0 a row is 1 at the (first) largest processed logit, and 0 at all other tokens.
    With ``soft`` the row at temperature 0 is the softmax at temperature 1, for policies that are
    charged in regret. A row with NaN, or without a logit above −∞, becomes NaN throughout. Rows
    have the precision of the logits, at least float32, and are written over the logits.
    Half-precision logits are first copied to float32, and processors get copies; otherwise no
    memory of the size of the logits is allocated.
    """

    def __init__(
        self, temperature: float, processors: Processors | None = None, soft: bool = False
    ) -> None:
        self.temperature, self.processors = temperature, processors or Processors()
        self.soft = soft
        self.checked = not self.processors.all  # without processors there is nothing to warn of

    @property
    def greedy(self) -> bool:
        """Return whether the temperature is 0."""
        return self.temperature == 0

    def __call__(
        self,
        logits: Float[Tensor, "batch some vocab"],
        texts: Texts,
        first: int,
        drafted: Sequence[int],
        out: Tensor | None = None,
        draft: Draft | None = None,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return probabilities, written into ``out`` or over the logits.

        Row (b, i) is the distribution of the token after text b and the text's first ``first + i``
        drafted tokens; rows of text b are valid up to ``first + i = drafted[b]``. If ``draft`` is a
        tree, row (b, i) follows the path to node i instead.
        """
        scores = self.scores(logits, texts, first, drafted, draft)
        if self.greedy:
            rows = softmax_in_order if self.soft else greedy
            return rows(scores, scores if out is None else out)
        if self.temperature != 1:
            scores = scaled(scores, self.temperature, scores)
        return torch.softmax(scores, -1, out=scores if out is None else out)

    def scores(
        self,
        logits: Float[Tensor, "batch some vocab"],
        texts: Texts,
        first: int,
        drafted: Sequence[int],
        draft: Draft | None = None,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return the logits after processors and before the temperature; arguments as in a call."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        self.processors(Places(logits, texts, first, drafted, draft))
        if not self.checked:
            self.checked = True
            warn_of_probabilities("logits_processor", logits[0, 0])
        return logits


def checked_temperature(temperature: float) -> float:
    """Return the temperature; ValueError unless finite and at least 0."""
    return check.finite("temperature", temperature, 0)
