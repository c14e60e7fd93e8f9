"""A small trace of made-up rows, a pair of tiny models, costs that are round numbers."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from cactus_theory.traces import Cycle, Trace, save_trace  # noqa: E402
from cactus_theory.tuning import Costs  # noqa: E402
from tests.decoding.conftest import tiny  # noqa: E402, F401
from tests.threads import one_thread  # noqa: E402, F401

TEXTS, CYCLES, WIDTH, VOCAB = 6, 8, 4, 24


@pytest.fixture(scope="session")
def trace(tmp_path_factory) -> Trace:
    """48 cycles of six texts: drafted tokens follow their rows, which are near the target's."""
    source = torch.Generator().manual_seed(3)
    texts = [[_cycle(text, place, source) for place in range(CYCLES)] for text in range(TEXTS)]
    folder = tmp_path_factory.mktemp("tuning") / "trace"
    return save_trace(folder, texts, vocab_size=VOCAB, num_draft_tokens=WIDTH, eos_token_ids=[0, 1])


def _cycle(text: int, place: int, source: torch.Generator) -> Cycle:
    logits = 2 * torch.randn(WIDTH + 1, VOCAB, generator=source, dtype=torch.float64)
    noise = torch.randn(WIDTH, VOCAB, generator=source, dtype=torch.float64)
    p = (logits[:-1] + 0.8 * noise).softmax(-1)
    ids = torch.multinomial(p, 1, generator=source)[:, 0]
    return Cycle(text, 3 * place, ids, logits.softmax(-1), p)


@pytest.fixture(scope="session")
def cheap() -> Costs:
    """Drafting is nearly free, so that relaxing pays."""
    return Costs.ratios(0.05, 0.01, 0.1)
