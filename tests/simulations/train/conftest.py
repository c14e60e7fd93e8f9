"""A corpus small enough to train on within a test."""

from pathlib import Path

import pytest

from simulations.train.corpus import Stream, encode_stream, read_corpus, train_tokenizer
from tests.threads import one_thread  # noqa: F401

LINES = (
    "import {a}\n",
    "def {a}({b}):\n    return {b} + {n}\n",
    "class {b}:\n    def {a}(self):\n        self.{b} = {n}\n",
    "for {b} in range({n}):\n    {a}({b})\n",
)
NAMES = ("alpha", "beta", "gamma", "delta", "total")


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """Eighty files of a few lines each; which line goes where depends on indices only."""
    root = tmp_path_factory.mktemp("corpus")
    for i in range(80):
        parts = [
            LINES[(i + j) % 4].format(a=NAMES[(i + j) % 5], b=NAMES[(i * j) % 5], n=i + j)
            for j in range(6)
        ]
        (root / f"module_{i}.py").write_text("\n".join(parts))
    return root


@pytest.fixture(scope="session")
def tokenizer(corpus_folder):
    return train_tokenizer([d.text for d in read_corpus(corpus_folder)[0]], 300)


@pytest.fixture(scope="session")
def stream(corpus_folder, tokenizer) -> Stream:
    return encode_stream(tokenizer, read_corpus(corpus_folder)[0])
