"""A tokenizer of 24 tokens for the tiny models: letters, and pairs that straddle words."""

from tokenizers import Tokenizer, decoders
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

MARKS = ("<pad>", "<s>", "</s>")
LETTERS = tuple("abcdef .\nx")  # the library joins tokens to "abcdef" to see their own text
MERGES = (" a", " b", "ab", "ba", "cd", "d.", "ee", " ab", "abc", "f\n", "ef")


def tokenizer():
    """Return it; token i is the i-th of ``PIECES``."""
    merges = [(piece[:-1], piece[-1]) for piece in MERGES]
    vocabulary = {piece: place for place, piece in enumerate(PIECES)}
    built = Tokenizer(kinds.BPE(vocabulary, merges))
    built.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), MARKS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=built, **names)


PIECES = MARKS + LETTERS + MERGES
