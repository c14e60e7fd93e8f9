"""What a token is drawn from where nothing was drafted belongs to the policy, and is charged."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ByPosition, Ledger, ModelDrafter, NGram
from cactus_theory.testing import assert_verifier_properties
from cactus_theory.traces import Trace, replay
from cactus_theory.verify import Assignment, Draft, find_verifier
from cactus_theory.verify.chain import chain_on_device
from cactus_theory.verify.on_device import block_on_device

IDS, HEAT, COLD = torch.tensor([[1, 2, 3]]), 0.6, f"speculative:tilt={1 / 0.6 - 1}"
KL = ct.divergence("kl")
# float32 logits of a cached and of a whole pass
ROUNDING = 1e-5


def decoded(pair, policy, verifier="chain", drafter="model"):
    draft = NGram(2) if drafter == "ngram" else ModelDrafter(pair[1])
    given = {"max_new_tokens": 40, "seed": 5, "num_draft_tokens": 3, "verifier": verifier}
    return ct.generate(pair[0], draft, IDS, policy=policy, log_probs=True, **given)


def costs_at(pair, result, heat=HEAT):
    """Return the KL of the target at another temperature, and its ln h, at every new token."""
    ids = torch.cat([IDS, result.output_token_ids], 1)
    q = pair[0](ids).logits[0, 2:-1].detach().double().softmax(-1)
    h = (q.log() / heat).softmax(-1)
    return KL.value(h, q), h.gather(-1, ids[0, 3:, None])[:, 0].log()


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
def test_every_token_has_the_law_of_that_temperature_and_its_charge(tiny, verifier, drafter):
    result = decoded(tiny, COLD, verifier, drafter)
    due, logs = costs_at(tiny, result)
    assert float(due.min()) > 1e-4  # a bonus token from q would be seen
    assert torch.allclose(result.token_charges[0], due, rtol=0, atol=ROUNDING)
    assert torch.allclose(result.log_probs.emitted[0], logs, rtol=0, atol=ROUNDING)
    assert result.reading.emitted_divergence == pytest.approx(float(due.sum()), abs=ROUNDING)


@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
def test_it_is_drawn_from_the_policys_row_on_host_and_device(verifier):
    """After a draft that is accepted as a whole, and where nothing was drafted; q gives token 1."""
    q = torch.tensor([[[0.5, 0.3, 0.2], [0.34, 0.36, 0.3]]], dtype=torch.float64)
    rule = ct.policy("truncated:top_k=1")
    for draft in (torch.tensor([[0]]), torch.empty(1, 0, dtype=torch.int64)):
        rows = q if draft.numel() else q[:, 1:]
        coins = torch.zeros(1, draft.shape[1]).double(), torch.tensor([0.1]).double()
        given = Assignment((rule,)), rows, Draft(draft, [draft.shape[1]], None), *coins
        assert find_verifier(verifier).verify(*given).last.tolist() == [1]
        assert chain_on_device(*given)[1].tolist() == [1]
        assert block_on_device(*given).last.tolist() == [1]
    law = find_verifier(verifier).law(*given[:3])
    assert law.last[0, 0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.thorough
@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("spec", [COLD, "truncated:top_k=2"])
def test_the_check_of_verifiers_holds_it_to_the_policys_row(verifier, spec):
    assert_verifier_properties(verifier, policies=[spec])


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_schedule_chooses_for_the_token_that_nobody_drafted(tiny, verifier):
    result = decoded(tiny, ByPosition([(0, "speculative"), (20, COLD)]), verifier)
    due, _ = costs_at(tiny, result)
    due[:20] = 0.0
    assert torch.allclose(result.token_charges[0], due, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
def test_a_ledger_pays_for_it(tiny, verifier):
    free, capped = (decoded(tiny, rule, verifier) for rule in (COLD, Ledger(COLD, 0.01)))
    spent = capped.token_charges[0].cumsum(-1)
    assert bool((spent <= 0.01 * torch.arange(1, 41) + 1e-9).all()) and float(spent[-1]) > 0
    assert float(free.token_charges.sum()) > 3 * float(spent[-1])


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_replay_charges_it_and_an_engine_that_draws_it_does_not(verifier):
    trace, rule, judge = (
        Trace.open("simulations/data/trace"),
        ct.policy(COLD),
        find_verifier(verifier),
    )
    found, engine = (
        replay(trace, COLD, verifier, undrafted=who).spent["kl"].sum()
        for who in ("policy", "target")
    )
    due = free = 0.0
    for cycle in trace:
        q, ids = cycle.target_probs, cycle.draft_token_ids
        p = None if cycle.draft_probs is None else cycle.draft_probs[None]
        law = judge.law(Assignment((rule,)), q[None], Draft(ids[None], [len(ids)], p))
        ended = torch.isin(ids, ids.new_tensor(trace.ends)).cumsum(-1) > 0
        going = torch.cat([ended.new_zeros(1), ended]).logical_not()
        paid = law.alive[0] * going * KL.value(rule.target(q, q), q)
        due, free = due + float(paid.sum()), free + float(paid[:-1].sum())
    assert found == pytest.approx(due, rel=1e-9) and engine == pytest.approx(free, rel=1e-9)
    assert found > 1.02 * engine
    with pytest.raises(ValueError, match="undrafted: must be one of policy, target; got 'bonus'"):
        replay(trace, COLD, verifier, undrafted="bonus")
