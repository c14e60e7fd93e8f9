"""A bonus from the policy's row: charged, so that every token of a block has the law h."""

from dataclasses import replace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ModelDrafter, NGram, generate
from cactus_theory.policies._decisions import PathState
from cactus_theory.verify import Assignment, Block, Draft, find_verifier

# enumerated sums of a few float64 products
EXACT = 1e-12
POLICIES = ["speculative", "band:price=1", "cactus:delta=0.1", "band:price=1,per_row=True"]
PROMPT = torch.tensor([[1, 5, 9], [4, 4, 2]])


def rows(seed, width, vocab=4, batch=3):
    source = torch.Generator().manual_seed(seed)
    q = (2 * torch.randn(batch, width + 1, vocab, generator=source, dtype=torch.float64)).softmax(
        -1
    )
    p = (2 * torch.randn(batch, width + 1, vocab, generator=source, dtype=torch.float64)).softmax(
        -1
    )
    ids = torch.multinomial(p[:, :width].reshape(-1, vocab), 1, generator=source)
    return q, p, ids.reshape(batch, width)


@pytest.mark.parametrize("spec", POLICIES)
def test_the_bonus_has_the_law_of_the_policys_row(spec):
    rule, width = ct.policy(spec), 2
    q, p, ids = rows(0, width)
    counts = torch.tensor([2, 1, 2])
    batch = torch.arange(len(ids))
    start = PathState(torch.ones(3, dtype=torch.float64))
    h = rule.target(q[batch, counts], p[batch, counts], start)
    judge = find_verifier("block:bonus=policy")
    assert judge.needs_next_draft_row and judge.spec == "block:bonus=policy"
    law = judge.law(Assignment((rule,)), q, Draft(ids, counts.tolist(), p))
    free = Block().law(Assignment((rule,)), q, Draft(ids, counts.tolist(), p[:, :width]))
    torch.testing.assert_close(law.last[batch, counts], h, rtol=0, atol=EXACT)
    torch.testing.assert_close(law.emitted[batch, counts], h, rtol=0, atol=EXACT)
    torch.testing.assert_close(law.stop, free.stop, rtol=0, atol=EXACT)
    ends = h.cumsum(-1)
    for token in range(q.shape[-1]):  # all accepted, and a draw in the middle of a token's share
        draw = ends[:, token] - h[:, token] / 2
        ragged = ids.masked_fill(torch.arange(width) >= counts[:, None], -1)
        coins = torch.zeros(3, width, dtype=torch.float64), draw
        found = ct.verify_block(rule, q, p, ragged, coins=coins, bonus="policy")
        whole = found.num_accepted == counts
        assert (found.last == token)[whole].all() and found.charges_bonus


def test_the_bonus_follows_the_policy_of_the_last_drafted_token():
    q, p, ids = rows(0, 2)
    batch, counts = torch.arange(3), [2, 1, 2]
    choice = torch.tensor([[0, 1], [1, 0], [1, 0]])
    policies = tuple(ct.policy(spec) for spec in ("speculative", "band:price=1"))
    judge, draft = find_verifier("block:bonus=policy"), Draft(ids, counts, p)
    alone = [judge.law(Assignment((rule,)), q, draft).last[batch, counts] for rule in policies]
    law = judge.law(Assignment(policies, choice), q, draft)
    expected = torch.stack([alone[1][0], alone[1][1], alone[0][2]])
    torch.testing.assert_close(law.last[batch, counts], expected, rtol=0, atol=EXACT)


def test_the_row_after_the_last_drafted_token_is_needed():
    q, p, ids = rows(1, 2)
    with pytest.raises(
        ValueError, match=r"draft_probs: shape must be \(3, 3, 4\); got \(3, 2, 4\)"
    ):
        ct.verify_block(ct.policy("band:price=1"), q, p[:, :2], ids, bonus="policy")
    with pytest.raises(ValueError, match="bonus: must be one of target, policy; got 'both'"):
        ct.verify_block(ct.policy("band:price=1"), q, p, ids, bonus="both")
    with pytest.raises(ValueError, match="block takes the options bonus; got 'coin'"):
        find_verifier("block:coin=1")
    with pytest.raises(ValueError, match="bonus must be given once; got 'block:bonus=policy,"):
        find_verifier("block:bonus=policy,bonus=target")
    with pytest.raises(ValueError, match="chain takes no options; got 'bonus'"):
        find_verifier("chain:bonus=policy")


@pytest.mark.parametrize("spec", POLICIES)
def test_a_decode_charges_every_token_of_a_drafted_round(tiny, spec):
    target, draft = tiny
    found = generate(
        target, draft, PROMPT, policy=spec, num_draft_tokens=3, max_new_tokens=25,
        verifier="block:bonus=policy", seed=4,
    )  # fmt: skip
    plain_rounds = sum(
        times for (drafted, *_), times in found.reading.rounds.items() if not drafted
    )
    assert found.reading.rows == sum(found.row_lengths) - plain_rounds
    assert (found.reading.emitted_divergence > 0.01) == (spec != "speculative")


def test_drafters_without_that_row_are_told(tiny):
    target, draft = tiny
    shared = {"policy": "band:price=1", "num_draft_tokens": 3, "max_new_tokens": 12}
    deterministic = generate(target, NGram(), PROMPT, verifier="block:bonus=policy", **shared)
    assert (
        deterministic.output_token_ids.shape[1] == 12
    )  # deterministic drafts get the target's own bonus

    class Short(ModelDrafter):
        def begin(self, setting):
            return super().begin(replace(setting, next_row=False))

    with pytest.raises(ValueError, match="needs the row after the last drafted token"):
        generate(target, Short(draft), PROMPT, verifier="block:bonus=policy", **shared)
