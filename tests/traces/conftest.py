"""Tiny models and small traces made by hand."""

import pytest
import torch

from cactus_theory.traces import Cycle

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from tests.decoding.conftest import tiny  # noqa: E402, F401

VOCAB = 5


def rows_of(generator: torch.Generator, *shape: int) -> torch.Tensor:
    rows = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 3 + 1e-3
    return rows / rows.sum(-1, keepdim=True)


@pytest.fixture
def ragged() -> list[list[Cycle]]:
    """Return texts whose cycles drafted 0 to 3 tokens, some deterministic, some with zeros."""
    source = torch.Generator().manual_seed(5)
    texts = []
    for text, counts in enumerate([(3, 0, 2), (1,), (3, 3, 1, 2)]):
        cycles, position = [], 0
        for number, count in enumerate(counts):
            target = rows_of(source, count + 1, VOCAB)
            draft = rows_of(source, count, VOCAB)
            if count > 1:
                target[1] = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0])
                draft[0] = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
            deterministic = not count or number == 2
            ids = draft.argmax(-1)
            cycles.append(Cycle(text, position, ids, target, None if deterministic else draft))
            position += 1 + number
        texts.append(cycles)
    return texts
