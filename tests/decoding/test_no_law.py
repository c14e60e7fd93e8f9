"""A row that is no distribution stops a decode: by name, with what there was, and no token."""

import math
import pickle
from itertools import product

import pytest
import torch
import transformers

from cactus_theory.decoding import DecodingError, generate, speculative_generate
from tests.amounts import amount

PROMPTS = torch.tensor([[1, 5, 9], [1, 6, 4]])
NEW = 6


class Spoil:
    """Gives every row of scores one value, once a text has ``length`` tokens."""

    def __init__(self, value: float, length: int) -> None:
        self.value, self.length = value, length

    def __call__(self, ids, scores):
        return torch.full_like(scores, self.value) if ids.shape[1] >= self.length else scores


def decode(tiny, kind, ids=PROMPTS[:1], **options):
    shared = {"max_new_tokens": NEW, "seed": 3, **options}
    if kind == "plain":
        return generate(tiny[0], None, ids, **shared)
    verifier, _, policy = kind.partition(" ")
    return generate(*tiny, ids, policy=policy, verifier=verifier, num_draft_tokens=3, **shared)


KINDS = (
    "plain",
    "chain speculative",
    "chain cactus:delta=0.1",
    "chain band:price=1",
    "chain typical",
    "chain top_k:k=3",
    "block speculative",
    "block band:price=1,per_row=True",
    "block band:price=1",
)


LENGTHS = (3, 5, 3 + NEW - 1)
CASES = list(product(LENGTHS, (math.nan, -math.inf), (0.0, 1.0), KINDS))


# every 11th: prime to the 9 kinds, 2 temperatures, 2 values and 3 lengths, so all are met
@pytest.mark.filterwarnings("ignore:policy. .* relaxes nothing at temperature 0")
@pytest.mark.parametrize(("length", "value", "temperature", "kind"), CASES[:: amount(11, 1)])
def test_names_text_position_and_cause(tiny, kind, value, temperature, length):
    spoilt = [Spoil(value, length)]
    sound = decode(tiny, kind, temperature=temperature)
    with pytest.raises(DecodingError) as caught:
        decode(tiny, kind, temperature=temperature, logits_processor=spoilt)
    error = caught.value
    assert (error.text, error.position) == (0, length - 3)
    assert "text 0" in str(error) and f"new token {length - 3}" in str(error)
    assert "Spoil" in str(error)
    (own,), (count,) = error.result.output_token_ids.tolist(), error.result.row_lengths
    assert count <= length - 3
    assert own[:count] == sound.output_token_ids[0, :count].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_texts_of_a_batch_keep_what_they_have(tiny, kind):
    """Every token after 9 is forbidden: the second text begins with one that ends so."""
    forbids = {(9, token): -math.inf for token in range(24)}
    spoilt = [transformers.SequenceBiasLogitsProcessor(forbids)]
    with pytest.raises(DecodingError, match="text 1 .*SequenceBias") as caught:
        decode(tiny, kind, PROMPTS.flip(0), logits_processor=spoilt)
    assert (caught.value.text, caught.value.position) == (1, 0)
    assert caught.value.result.output_token_ids.shape == (2, 0)


def test_hugging_face_names_its_processor_and_the_error_travels(tiny):
    target, draft = tiny
    options = {"max_new_tokens": 4, "do_sample": True, "suppress_tokens": list(range(24))}
    with pytest.raises(DecodingError, match="SuppressTokens") as caught:
        target.generate(
            PROMPTS[:1], custom_generate=speculative_generate, draft_model=draft, **options
        )
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.text, error.position, error.result.num_tokens) == (0, 0, 0)
    assert str(error) == str(caught.value)


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize(("part", "name"), [(0, "target_model"), (1, "draft_model")])
def test_names_the_model_whose_weights_are_lost(tiny, make_model, verifier, part, name):
    models = list(tiny)
    models[part] = spoilt = make_model(seed=part)
    with torch.no_grad():
        spoilt.lm_head.weight[7] = torch.nan
    for loop in (False, "torch"):
        with pytest.raises(DecodingError, match=f"{name}: .* weights that hold NaN"):
            generate(
                *models,
                PROMPTS,
                policy="cactus:delta=0.1",
                verifier=verifier,
                max_new_tokens=NEW,
                device_loop=loop,
            )
