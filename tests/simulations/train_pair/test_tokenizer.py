"""The tokenizer loses nothing, loads anywhere, and knows where definitions begin."""

import pytest
import torch
from transformers import AutoTokenizer

from simulations.train_pair.corpus import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    as_transformers,
    read_corpus,
    train_tokenizer,
    training,
)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'é\u2028'\n", "", "  \n\n x", "\x00\x7f"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_token(tokenizer):
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    assert tokenizer.get_vocab_size() == 300


def test_training_is_deterministic(corpus_folder, tokenizer):
    again = train_tokenizer([d.text for d in training(read_corpus(corpus_folder))], 300)
    assert again.to_str() == tokenizer.to_str()


def test_auto_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    as_transformers(tokenizer, 1024).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def alpha(beta):\n    return beta + 1\n" + END_OF_TEXT
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids
    assert ids[-1] == loaded.eos_token_id == loaded.bos_token_id == END_OF_TEXT_ID
    assert loaded.decode(ids) == text


def test_stream_keeps_every_document_and_marks_starts(corpus_folder, tokenizer, stream):
    documents = training(read_corpus(corpus_folder))
    text = tokenizer.decode(stream.tokens.tolist(), skip_special_tokens=False)
    assert text == END_OF_TEXT + "".join(d.text + END_OF_TEXT for d in documents)
    separators = torch.nonzero(stream.tokens == END_OF_TEXT_ID).flatten()[:-1]
    assert set((separators + 1).tolist()) <= set(stream.starts.tolist())
    others = sorted(set(stream.starts.tolist()) - set((separators + 1).tolist()))
    words = {tokenizer.decode(stream.tokens[i : i + 4].tolist()).split()[0] for i in others}
    assert words == {"def", "class"}


def test_small_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 257, got 256"):
        train_tokenizer(["x"], 256)
