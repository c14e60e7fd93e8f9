"""A row that is no distribution stops a decode: by name, with what there was, and no token."""

import math
import pickle
from itertools import product

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import DecodingError, generate, speculative_generate
from tests.amounts import amount

PROMPTS = torch.tensor([[1, 5, 9], [1, 6, 4]])
NEW = 6


class Spoil:
    """Gives every row of scores one value, once a text has ``length`` tokens and ends as told."""

    def __init__(self, value: float, length: int, start: int = 5) -> None:
        self.value, self.length, self.start = value, length, start

    def __call__(self, ids, scores):
        hit = (ids[:, 1] == self.start) & (ids.shape[1] >= self.length)
        return torch.where(hit[:, None], torch.full_like(scores, self.value), scores)


def decode(tiny, kind, **options):
    shared = {"max_new_tokens": NEW, "seed": 3, **options}
    if kind == "plain":
        return generate(tiny[0], None, PROMPTS, **shared)
    verifier, _, policy = kind.partition(" ")
    return generate(*tiny, PROMPTS, policy=policy, verifier=verifier, num_draft_tokens=3, **shared)


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
    result = error.result
    for text, (own, count) in enumerate(
        zip(result.output_token_ids.tolist(), result.row_lengths, strict=True)
    ):
        assert count <= (length - 3 if text == 0 else NEW)
        assert own[:count] == sound.output_token_ids[text, :count].tolist()


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


RULES = (
    "speculative",
    "cactus:delta=0.1",
    "band:price=1",
    "typical",
    "top_k:k=3",
    "tempered:temperature=0.5",
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
def test_tensors_that_nobody_checked(verify, rule):
    rule = ct.policy(rule)
    if verify is ct.verify_block and rule.name in ("typical", "top_k"):
        return  # these have no row of their own
    source = torch.Generator().manual_seed(0)
    q, p = (torch.rand(2, 4, 8, generator=source).softmax(-1) for _ in range(2))
    ids = q[:, :3].argmax(-1)  # which every rule keeps at coin 0
    for place, value, rows in product(range(4), (math.nan, 0.0), (q, p)):
        if (value == 0.0 or place == 3) and rows is p:
            continue  # tokens that were drafted though p = 0 are kept; p has three rows
        spoilt = rows.clone()
        spoilt[1, place] = value
        given = (spoilt, p) if rows is q else (q, spoilt)
        for coin in (0.0, 0.999):
            accept = torch.zeros(2, 3, dtype=torch.float64)
            accept[:, place:] = coin
            draw = torch.full((2,), 0.5, dtype=torch.float64)
            if value == 0.0 and rule.name == "typical" and place < 3:
                continue  # takes the likeliest token, whatever the rows sum to
            with pytest.raises(ValueError, match="NaN, ∞ or no mass in row 1 of the batch"):
                verify(rule, given[0], given[1][:, :3], ids, coins=(accept, draw), validate=False)
