"""A tilt: tokens as at another temperature, charges from the target, the best row of Theorem 28."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Ledger, ModelDrafter, NGram
from cactus_theory.emitted import directions
from cactus_theory.policies.tilt import colder, worth_of_rows
from cactus_theory.traces import Trace, replay
from cactus_theory.verify import Assignment, Draft, find_verifier
from cactus_theory.verify.on_device import Blocks
from tests.rows import pair

IDS, TILT, KL = torch.tensor([[1, 2, 3]]), 0.25, ct.divergence("kl")
# sums over a row in another order; float32 rows of a cached and of a whole pass
RESUMMED, ROUNDING = 1e-12, 1e-5
PRICE = 0.7


def decoded(pair, policy, verifier, drafter, temperature=1.0):
    draft = NGram(2) if drafter == "ngram" else ModelDrafter(pair[1])
    given = {"max_new_tokens": 40, "seed": 5, "num_draft_tokens": 3, "verifier": verifier}
    return ct.generate(pair[0], draft, IDS, policy=policy, temperature=temperature, **given)


@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
def test_a_tilt_is_a_temperature(tiny, verifier):
    """With drafts that do not know the temperature: the same coins give the same tokens."""
    heat = 1 / (1 + TILT)
    tilted = decoded(tiny, f"speculative:tilt={TILT}", verifier, "ngram")
    colder_by = decoded(tiny, "speculative", verifier, "ngram", heat)
    assert torch.equal(tilted.output_token_ids, colder_by.output_token_ids)
    assert tilted.reading.emitted_divergence > 0.01
    assert colder_by.reading.emitted_divergence == 0


@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
def test_log_probabilities_are_the_target_s_and_those_of_the_law(tiny, verifier):
    given = {"max_new_tokens": 24, "log_probs": True, "num_draft_tokens": 3, "verifier": verifier}
    rule = f"speculative:tilt={TILT}"
    result = ct.generate(*tiny, IDS, policy=rule, **given)
    ids = torch.cat([IDS, result.output_token_ids], 1)
    q = tiny[0](ids).logits[0, 2:-1].detach().double().softmax(-1)
    for rows, logs in ((q, result.log_probs.target), (colder(q, TILT), result.log_probs.emitted)):
        due = rows.gather(-1, ids[0, 3:, None])[:, 0].log()
        assert torch.allclose(logs[0], due, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_ledger_keeps_its_cap_and_its_rungs_have_the_tilt(tiny, verifier):
    capped = decoded(tiny, Ledger("band:price=0.3,tilt=0.2", 0.02), verifier, "model")
    spent = capped.token_charges[0].cumsum(-1)
    assert bool((spent <= 0.02 * torch.arange(1, 41) + 1e-9).all()) and float(spent[-1]) > 0
    rule = "band:price=0.3,tilt=2"
    free, loose = (
        decoded(tiny, own, verifier, "model") for own in (rule, Ledger(rule, 1e6, burst=1e8))
    )
    assert torch.equal(free.output_token_ids, loose.output_token_ids)
    assert torch.allclose(free.token_charges, loose.token_charges, rtol=0, atol=RESUMMED)


@pytest.mark.parametrize("verifier", ["chain", "block", "tree"])
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_nodes_are_charged_what_their_law_is_from_the_target(verifier, kind):
    """Rows of zeros and one-hot ones, too; a batch whose other text has no tilt is charged 0."""
    q, p = pair(12, 5, seed=7, kinds=("zeros", "spiky"))
    q, p = q.reshape(4, 3, 5), p.reshape(4, 3, 5)[:, :2]
    judge, tilted = find_verifier(verifier), ct.policy("band:price=0.7,tilt=0.5")
    ids = torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]])
    draft = Draft(ids, [2] * 4, p if kind == "sampled" else None)
    choice = torch.tensor([0, 1, 0, 1])[:, None].expand(4, 3)
    assigned = Assignment((tilted, ct.policy("speculative")), choice)
    coins = torch.rand(4, 2, generator=torch.Generator().manual_seed(1)), torch.full((4, 3), 0.4)
    draws = coins[1] if verifier == "tree" else coins[1][:, 0]
    verdict = judge.decide(assigned, q, draft, coins[0].double(), draws.double())
    for row in range(4):
        for place, node in enumerate(verdict.nodes(row)):
            assert torch.allclose(node.target, q[row, place], rtol=0, atol=RESUMMED)
            assert node.lossless == (row % 2 == 1) and (row % 2 == 0 or node.charge().spent == 0)
            due = float(KL.value(node.law, q[row, place])) if row % 2 == 0 else 0.0
            assert node.charge().spent == pytest.approx(due, abs=RESUMMED)
            if place == 2 and row % 2 == 0:  # the bonus token's row
                assert torch.allclose(node.law, colder(q[row, 2], 0.5), rtol=0, atol=RESUMMED)


def value_of(q, ids, tilt: float) -> tuple[float, float]:
    """Return what the law of a deterministic draft is worth, and E_q's recursion claims."""
    assigned = Assignment((ct.policy(f"band:price={PRICE},tilt={tilt}"),))
    walk = Blocks(assigned, q, Draft(ids, [ids.shape[1]], None))
    alive, width = walk.alive[0], ids.shape[1]
    laws = [*walk.emitted[0], colder(q[0, width], tilt)]
    total = float(alive[1:].sum())
    for place, law in enumerate(laws):
        row = q[0, place]
        surprise = directions(law, row)[1]  # −Σ (h − q) ln q, and r̃ = ln q + H(q)
        total -= PRICE * float(alive[place] * (KL.value(law, row) + tilt * surprise))
    worth = worth_of_rows(q[0], tilt).tolist()
    following = PRICE * worth[width]
    for place in range(width - 1, -1, -1):
        chance = float(colder(q[0, place], tilt)[ids[0, place]])
        gain = 1 - chance + chance * math.exp((1 + following) / PRICE)
        following = PRICE * (worth[place] + math.log(gain))
    return total, following


def test_a_block_of_a_deterministic_draft_is_worth_what_its_recursion_claims():
    for seed in range(20):
        q, _ = pair(4, 6, seed=seed)
        ids = torch.tensor([[seed % 6, 2, 5]])
        attained, claimed = value_of(q[None], ids, 0.4)
        assert attained == pytest.approx(claimed, abs=1e-9)
        for tilt in (0.35, 0.45):  # the law of another tilt is worth less
            other = ct.policy(f"band:price={PRICE},tilt={tilt}")
            walk = Blocks(Assignment((other,)), q[None], Draft(ids, [3], None))
            laws, total = [*walk.emitted[0], colder(q[3], tilt)], float(walk.alive[0, 1:].sum())
            for place, law in enumerate(laws):
                spent = KL.value(law, q[place]) + 0.4 * directions(law, q[place])[1]
                total -= PRICE * float(walk.alive[0, place] * spent)
            assert total < claimed


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_replay_adds_up_what_the_law_is_charged(verifier):
    trace = Trace.open("simulations/data/trace")
    rule, judge = ct.policy("band:price=0.8,tilt=0.3"), find_verifier(verifier)
    found, due = replay(trace, rule, verifier).spent["kl"].sum(), 0.0
    for cycle in trace:
        q, ids = cycle.target_probs, cycle.draft_token_ids
        p = None if cycle.draft_probs is None else cycle.draft_probs[None]
        law = judge.law(Assignment((rule,)), q[None], Draft(ids[None], [len(ids)], p))
        ended = torch.isin(ids, ids.new_tensor(trace.ends)).cumsum(-1) > 0
        going = torch.cat([ended.new_zeros(1), ended]).logical_not()
        rows = torch.cat([law.emitted[0], colder(q[-1:].double(), 0.3)])
        due += float((law.alive[0] * going * KL.value(rows, q.double())).sum())
    assert found == pytest.approx(due, rel=1e-9)


def test_what_has_no_meaning_is_refused():
    for spec in ("band:delta=0.1,tilt=0.1", "band:price=1,divergence=reverse_kl,tilt=0.1"):
        with pytest.raises(ValueError, match="tilt: goes with a price of kl"):
            ct.policy(spec)
    for value in (-1, -2, math.inf, math.nan):
        with pytest.raises(ValueError, match="tilt: must"):
            ct.policy("speculative", tilt=value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "spec",
    ["speculative", "band:price=0.7", "band:price=0.7,tilt=0.5", "cactus:delta=0.3",
     "mixture:alpha=0.5,support=free"],
)  # fmt: skip
def test_the_meter_s_directions_are_those_of_the_laws(spec, dtype):
    q, p = (
        rows.reshape(4, 3, 5).to(dtype) for rows in pair(12, 5, seed=3, kinds=("zeros", "zeros"))
    )
    draft = Draft(torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]]), [2] * 4, p[:, :2])
    coins = (
        torch.rand(4, 2, generator=torch.Generator().manual_seed(1)).double(),
        torch.full((4,), 0.4),
    )
    judge, rule = find_verifier("chain"), ct.policy(spec)
    verdict = judge.decide(Assignment((rule,)), q, draft, coins[0], coins[1].double())
    for node in (node for row in range(4) for node in verdict.nodes(row)):
        due = [float(part) for part in directions(node.law, node.target)]
        assert node.directions == pytest.approx(due, abs=1e-7)
