"""Bad input to verify_chain raises at the door, naming argument, rule and value."""

import math

import pytest
import torch

import cactus_theory as ct
from tests.rows import rows

RULE = ct.policy("speculative")


def good(**changes):
    arguments = {
        "policy": RULE,
        "target_probs": rows(2, 3, 4, seed=0),
        "draft_probs": rows(2, 2, 4, seed=1),
        "draft_token_ids": torch.tensor([[0, 3], [2, -1]]),
    }
    return {**arguments, **changes}


def spoiled(name, value, at=(0, 1, 2)):
    probs = good()[name].clone()
    probs[at] = value
    return {name: probs}


def coins(accept=(2, 2), draw=(2,), value=0.5):
    return {"coins": (torch.full(accept, value).double(), torch.full(draw, 0.5).double())}


IDS = good()["draft_token_ids"]


def test_the_good_arguments_are_good():
    assert ct.verify_chain(**good(), **coins()).output_token_ids.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"policy": [RULE] * 3}, ValueError, r"policy: must be one or one per row \(2\); got 3"),
        ({"target_probs": rows(2, 4)}, ValueError, r"draft_token_ids, target_probs: .*\(2, 4\)"),
        ({"target_probs": rows(2, 2, 4)}, ValueError, r"target_probs: .*\(2, 3, V\).*\(2, 2, 4\)"),
        ({"draft_probs": rows(2, 3, 4)}, ValueError, r"draft_probs: .*\(2, 2, 4\); got \(2, 3, 4"),
        ({"draft_probs": rows(2, 2, 5)}, ValueError, "draft_probs: vocabulary .* got 5"),
        ({"target_probs": rows(2, 3, 4).long()}, TypeError, "target_probs: dtype .* torch.int64"),
        (
            spoiled("target_probs", 0.9),
            ValueError,
            r"target_probs: .* row 0, 1 of 2 x . .from 0. sums to",
        ),
        (
            spoiled("draft_probs", 0.9),
            ValueError,
            r"draft_probs: .* row 0, 1 of 2 x . .from 0. sums to",
        ),
        (spoiled("target_probs", -0.1), ValueError, "target_probs: .* negative; got -0.1"),
        (spoiled("draft_probs", math.nan), ValueError, "draft_probs: .* finite; got nan"),
        (spoiled("target_probs", math.inf), ValueError, "target_probs: .* finite; got inf"),
        (spoiled("target_probs", 0.9, (1, 1, 0)), ValueError, "target_probs: .* row 1, 1 of 2"),
        ({"draft_token_ids": IDS[0]}, ValueError, r"draft_token_ids, target_probs: .*\(2,\)"),
        ({"draft_token_ids": IDS.flip(-1)}, ValueError, "-1 must end a row's draft; got a token"),
        ({"generator": [torch.Generator()]}, ValueError, r"generator: .* \(2\); got a list of 1"),
        (coins(accept=(2, 3)), ValueError, r"coins: accept .* \(2, 2\); got \(2, 3\)"),
        (coins(draw=(3,)), ValueError, r"coins: draw must have shape \(2,\); got \(3,\)"),
        ({"coins": ([[0.5]], [0.5])}, TypeError, "coins: accept must be a tensor; got list"),
        ({"coins": 0.5}, TypeError, "coins: must be two tensors, accept and draw; got float"),
        ({"generator": 5}, TypeError, "generator: must be a torch.Generator or .* of them; got 5"),
        ({"generator": [5, 5]}, TypeError, "generator: must be a torch.Generator .*; got 5"),
        ({"target_probs": rows(2, 3, 4).to_sparse()}, TypeError, "target_probs: .* sparse"),
        ({"draft_probs": rows(2, 2, 4).to("meta")}, TypeError, "draft_probs: .* the meta device"),
        (coins(value=1.0), ValueError, r"coins: accept must lie in \[0, 1\); got"),
        (coins(value=-0.1), ValueError, r"coins: accept must lie in \[0, 1\); got"),
        (coins(value=math.nan), ValueError, r"coins: accept must lie in \[0, 1\); got"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        ct.verify_chain(**good(**changes))


@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
@pytest.mark.parametrize("validate", [True, False])
def test_coins_and_a_generator_are_not_both_taken(verify, validate):
    with pytest.raises(ValueError, match="coins, generator: at most one may be given; got both"):
        verify(**good(), **coins(), generator=torch.Generator(), validate=validate)


def test_rows_behind_the_draft_are_not_checked():
    changes = {**spoiled("target_probs", 7.0, (1, 2, 0)), **spoiled("draft_probs", 7.0, (1, 1, 0))}
    assert ct.verify_chain(**good(**changes)).output_token_ids[1, 2] == -1
