"""What a decode raises where a row that decides a token is no distribution."""

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._checks import HALF, dtype_of
from cactus_theory.decoding.result import GenerationResult


class DecodingError(RuntimeError):
    """A token of a text has no law: its row holds NaN, or leaves no token possible.

    The decode stops there, for all texts of the batch. A text behaves as if it were alone, so
    the others go on where they stood if they are decoded again without this one, each with the
    seed that it had (``seed + row`` of a single seed).

    Attributes
    ----------
    text : the number of the text in the batch.
    position : how many new tokens it would have had before that one.
    result : the :class:`GenerationResult` of all texts, up to the round before.

    Examples
    --------
    >>> def spoilt(ids, scores):
    ...     return scores if ids.shape[1] < 6 else scores * float("nan")
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> try:
    ...     generate_plain(pair.target, ids, max_new_tokens=8, logits_processor=[spoilt])
    ... except DecodingError as error:
    ...     error.text, error.position, error.result.num_tokens
    (0, 3, 3)
    """

    def __init__(self, message: str, text: int, position: int, result: GenerationResult) -> None:
        super().__init__(message, text, position, result)
        self.text, self.position, self.result = text, position, result

    def __str__(self) -> str:
        return str(self.args[0])


def failure(
    text: int,
    before: int,
    rows: tuple[Float[Tensor, "K1 vocab"], Float[Tensor, "K vocab"] | None],
    places: range,
    about: tuple[Any, Sequence[Any]],
    result: GenerationResult,
) -> DecodingError:
    """Return the error for a text whose round emitted no token.

    Parameters
    ----------
    before : its new tokens before the round.
    rows : its rows of the target and of the draft in that round.
    places : those of the rows that may be to blame, the first one first.
    about : the target, and the logits processors.
    """
    place, name = _blamed(rows, places)
    model, processors = about
    causes = [f"a logits processor ({', '.join(map(_name, processors))})"] if processors else []
    if name == "policy":
        causes = ["a rule of one's own that returned NaN"]
    else:
        causes.append("weights that hold NaN")
        if model.dtype in HALF:
            causes.append(f"an overflow of {dtype_of([model])}")
    message = (
        f"{name}: new token {before + place} of text {text} has no law, as its row holds NaN or "
        f"leaves no token possible; likely cause: {' or '.join(causes)}. What was decoded before "
        "is in the error's result"
    )
    return DecodingError(message, text, before + place, result)


def _blamed(rows: tuple[Tensor, Tensor | None], places: range) -> tuple[int, str]:
    """Return the place of the first row without a law, and whose it is."""
    for place in places:
        for name, own in zip(("target_model", "draft_model"), rows, strict=True):
            if own is not None and place < len(own) and not 0 < float(own[place].sum()) < math.inf:
                return place, name
    return places[0], "policy"


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
