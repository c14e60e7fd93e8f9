"""Check that two models mean the same token by the same id."""

from typing import Any

from torch import Tensor

from cactus_theory.decoding.models import text_config


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError unless both tokenizers map the same texts to the same ids.

    Compares the maps of ``get_vocab()``, token by token in order of id; equal sizes prove
    nothing. The message names the first token that differs.

    Examples
    --------
    >>> check_same_vocabulary(pair.tokenizer, pair.tokenizer)
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return
    ids = {**draft, **target}
    for token in sorted(ids, key=lambda text: (ids[text], text)):
        if target.get(token) != draft.get(token):
            raise ValueError(
                "draft_tokenizer: its token map must equal that of target_tokenizer; "
                f"token {token!r} is {_named(target.get(token))} in the target "
                f"and {_named(draft.get(token))} in the draft"
            )


def check_model_vocabularies(target_model: Any, draft_model: Any) -> int:
    """Return the common vocabulary size of two models, or raise ValueError."""
    sizes = [text_config(model).vocab_size for model in (target_model, draft_model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft_model: vocabulary must equal that of target_model ({sizes[0]} tokens); "
            f"got {sizes[1]}"
        )
    return sizes[0]


def check_ids(name: str, token_ids: Tensor, vocab: int) -> None:
    """Raise ValueError unless every id lies in [0, vocab)."""
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"{name}: ids must lie in [0, {vocab}); got {low if low < 0 else high}")


def _named(index: int | None) -> str:
    return "missing" if index is None else f"id {index}"
