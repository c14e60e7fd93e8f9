"""The harness decodes what ``generate`` decodes, with seeds of their own for every pass."""

import pytest
import torch

pytest.importorskip("transformers")

from cactus_theory.decoding import generate  # noqa: E402
from simulations.common.decode import Harness  # noqa: E402
from simulations.common.grid import Config  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
RULE = Config("band:price=1", 2)


@pytest.fixture(scope="module")
def harness(shipped) -> Harness:
    return Harness(shipped, PROMPTS, max_new_tokens=6, seed=3)


def test_a_decode_is_that_of_generate_with_the_prompts_own_seed(harness: Harness) -> None:
    found = harness.decode(RULE, 1, repeat=2, meter=True)
    pair = harness.pair
    own = generate(
        pair.target, pair.draft, torch.tensor([PROMPTS[1]]), policy=RULE.policy,
        num_draft_tokens=2, max_new_tokens=6, seed=3 + 1 + 2 * len(PROMPTS),
        eos_token_ids=pair.target.generation_config.eos_token_id,
    )  # fmt: skip
    assert found.outputs == own.output_token_ids.tolist()
    assert found.result is not None and found.result.reading == own.reading
    assert found.seconds == found.result.seconds.total


@pytest.mark.parametrize("method", ["plain", "hf_plain", "hf_assisted"])
def test_baselines_decode_too_and_leave_the_models_and_the_generator_alone(harness, method) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), harness.pair.draft.generation_config.to_dict()
    found = harness.decode(Config(method, 0 if "plain" in method else 2), 0)
    assert 1 <= len(found.outputs[0]) <= 6 and found.seconds > 0
    assert (found.result is None) == method.startswith("hf_")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == harness.pair.draft.generation_config.to_dict()
