"""A drafter of one file reads hidden states of the target, as the last verified pass left them."""

from dataclasses import dataclass, field

import pytest
import torch

from cactus_theory.decoding import Drafter, ModelDrafter, generate
from cactus_theory.decoding.drafters import Drafting
from cactus_theory.decoding.models import CachedModel

PROMPTS = torch.tensor([[1, 5, 9, 2], [0, 0, 4, 2], [0, 7, 7, 1]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
LAYERS = (0, 1, 2)  # embeddings, after the first layer, what the head reads
CLOSE = 1e-5  # the library takes norms in float32, whatever the model is in


@dataclass(frozen=True)
class Reader(Drafter):
    """Drafts with a model, and notes ids and states of each text before each round."""

    model: object
    noted: list = field(default_factory=list)

    def reads(self, target_model):
        return LAYERS

    def begin(self, setting):
        return ReaderDrafting(setting, self)


class ReaderDrafting(Drafting):
    def __init__(self, setting, own):
        self.texts, self.features, self.noted = setting.texts, setting.features, own.noted
        self.inner = ModelDrafter(own.model).begin(setting)

    def propose(self, wanted, coins):
        lengths = list(self.features.lengths)
        starts = [min(row, length) for row, length in enumerate(lengths)]
        counts = [length - start for length, start in zip(lengths, starts, strict=True)]
        states = {layer: self.features.hidden(layer, starts, counts) for layer in LAYERS}
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            own = {layer: rows[row, :count].clone() for layer, rows in states.items()}
            self.noted.append((self.texts.ids[row][: start + count], start, own))
        for rows in states.values():
            rows.fill_(torch.nan)  # they are copies: nobody else sees this
        return self.inner.propose(wanted, coins)

    def keep(self, rows):
        self.inner.keep(rows)

    def settle(self):
        self.inner.settle()


def check(model, ids, start, states):
    """Compare states of a text from ``start`` on with those of a pass without a cache."""
    output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    for layer, own in states.items():
        assert torch.allclose(own, output.hidden_states[layer][0, start:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("fast", [True, False])
def test_a_drafter_reads_what_was_verified_and_kept(tiny, fast):
    target, draft = tiny
    options = {"policy": "band:price=1", "max_new_tokens": 12, "eos_token_ids": [3, 11]}
    options |= {"attention_mask": MASK, "fast_forward": fast, "seed": 2}
    reader = Reader(draft)
    found = generate(target, reader, PROMPTS, **options)
    usual = generate(target, draft, PROMPTS, **options)
    assert found.output_token_ids.equal(usual.output_token_ids)
    assert 0 < found.num_accepted < found.num_tokens and len(set(found.row_lengths)) > 1
    first, later = reader.noted[:3], reader.noted[3:]
    assert all(ids == [] for ids, _, _ in first) and len(later) > 6
    with torch.inference_mode():
        for ids, start, states in later:
            check(target, ids, start, states)


@pytest.mark.parametrize("fast", [True, False])
def test_states_move_with_the_keys(tiny, fast):
    model = CachedModel(tiny[0], 12, 2, fast_forward=fast, reads=LAYERS)
    with torch.inference_mode():
        model.feed(torch.tensor([[1, 5, 9], [4, 2, 0]]), [3, 2], [1, 1])
        tree, parents = torch.tensor([[7, 8, 6, 3]] * 2), torch.tensor([[-1, -1, 1, 0]] * 2)
        model.feed(tree, [4, 4], [1, 1], parents)
        model.select(0, 3, [1, 2])
        model.select(1, 2, [0, 3])
        model.keep([1])
        assert list(model.lengths) == [4]
        check(tiny[0], [4, 2, 7, 3], 1, {own: model.hidden(own, [1], [3])[0] for own in LAYERS})
        model.rollback(0, 3)
        with pytest.raises(ValueError, match="counts: row 0 has states of 3 tokens; got 3 from 1"):
            model.hidden(0, [1], [3])
        with pytest.raises(ValueError, match=r"layer: must be one of those to read \[0, 1, 2\]"):
            model.hidden(3, [0], [1])
