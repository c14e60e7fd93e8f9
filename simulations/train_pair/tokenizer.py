"""A byte-level BPE tokenizer trained on the corpus, and the corpus as token ids."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .corpus import Document, boundaries

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


@dataclass(frozen=True)
class Stream:
    """Documents in a row, each preceded by end-of-text, and where short windows may begin.

    ``tokens`` (n,) int32; ``starts`` (m,) int64 index the first token of a document or
    of a top-level definition.
    """

    tokens: Tensor
    starts: Tensor


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE; ids 0 is end-of-text, the rest bytes and merges.

    Raises
    ------
        ValueError: ``vocab_size`` cannot hold the 256 bytes and end-of-text.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_transformers(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Wrap for ``save_pretrained``; end-of-text is bos, eos and pad."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_stream(tokenizer: Tokenizer, documents: list[Document]) -> Stream:
    """Encode the documents in the given order into one stream."""
    tokens: list[int] = []
    starts: list[int] = []
    for document in documents:
        encoding = tokenizer.encode(document.text)
        tokens.append(END_OF_TEXT_ID)
        first = len(tokens)
        wanted = {0, *boundaries(document.text)}
        offsets = enumerate(encoding.offsets)
        starts.extend(first + i for i, (begin, _) in offsets if begin in wanted)
        tokens.extend(encoding.ids)
    tokens.append(END_OF_TEXT_ID)
    return Stream(torch.tensor(tokens, dtype=torch.int32), torch.tensor(starts))
