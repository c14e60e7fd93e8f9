"""Ville's bound on toy laws, exactly and drawn; every alternative against the law it names."""

import itertools
import math

import numpy as np
import pytest
import torch

from cactus_theory.base.confidence import log_mean
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.served.alternatives import (
    OF_TARGET,
    SHARE,
    Claim,
    Rows,
    alternatives,
    log_factors,
)
from cactus_theory.served.evidence import Evidence, paired
from tests.amounts import amount

VOCAB, EXACT = 7, 1e-12
CLAIMS = [
    Claim(),
    Claim(0.7),
    Claim(1.3, Cuts(top_k=4, top_p=0.8)),
    Claim(0.8, Cuts(top_p=0.6)),
    Claim(1.5, Cuts(top_k=1)),
]
LOSSY = [Claim(policy="band:price=1"), Claim(0.7, Cuts(top_k=4), "lenience:lenience=0.5")]
TABLE = alternatives(drafted=True)


def rows_of(claim: Claim, seed: int = 0, greedy: bool = False, places: int = 3) -> Rows:
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(places, VOCAB, generator=source, dtype=torch.float64)
    draft = logits + torch.randn(places, VOCAB, generator=source, dtype=torch.float64)
    prompt, before = torch.tensor([1, 2, 2]), torch.tensor([4, 5, 4, 0])[: places + 1]
    return Rows(logits, claim, prompt, before, draft, greedy)


def every(rows: Rows):
    """Return ln r/h of every token, (n, V, M)."""
    ids = torch.arange(VOCAB).expand(len(rows.logits), VOCAB)
    return log_factors(rows, ids, TABLE)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_under_the_claim_every_factor_has_mean_one(claim: Claim, greedy: bool) -> None:
    """Less where the alternative has mass on what the claim never emits: that mass is missing."""
    rows = rows_of(claim, greedy=greedy)
    factors, growth, _ = every(rows)
    means = (rows.h[..., None] * factors.exp()).sum(1)
    for number, other in enumerate(TABLE):
        law = other.law(rows)
        assert float((law.sum(-1) - 1).abs().max()) < EXACT and bool((law >= 0).all()), other.name
        inside = torch.where(rows.h > 0, law, 0.0).sum(-1)
        expected = (1 - SHARE) * inside + SHARE
        assert means[:, number] == pytest.approx(expected.numpy(), abs=EXACT), other.name
    assert claim.cuts != WHOLE or bool((growth >= -EXACT).all())


@pytest.mark.parametrize("claim", LOSSY, ids=str)
def test_of_a_policy_drafted_and_undrafted_tokens_have_a_mean_of_one_at_most(claim: Claim) -> None:
    rows = rows_of(claim)
    factors, _, distance = every(rows)
    for law in (rows.h, rows.q):
        assert float((law[..., None] * factors.exp()).sum(1).max()) <= 1 + EXACT
    assert bool(distance.any()) == (claim.cuts != WHOLE)


def test_evidence_of_three_tokens_has_mean_one_by_enumeration() -> None:
    """Rows depend on the token before; every path, and the average over all alternatives."""
    claim, total, ever = Claim(0.8), 0.0, 0.0
    rows = {place: rows_of(claim, place, places=1) for place in range(VOCAB + 1)}
    known = {place: every(own)[0][0].numpy() for place, own in rows.items()}
    for path in itertools.product(range(VOCAB), repeat=3):
        state, mass, logs = VOCAB, 1.0, []
        own = np.zeros(len(TABLE))
        for token in path:
            mass *= float(rows[state].h[0, token])
            own = own + known[state][token]
            logs.append(log_mean(own))
            state = token
        total += mass * math.exp(logs[-1])
        ever += mass * (max(logs) >= math.log(2))
    assert total == pytest.approx(1, abs=1e-9) and 0 < ever <= 0.5


def test_a_healthy_stream_seldom_passes_and_a_cold_one_does() -> None:
    """At α = 10 %: of 200 runs more than 35 pass with probability 0.1 %."""
    claim, runs = Claim(), amount(200, 1000)
    rows, source = rows_of(claim, places=5), np.random.default_rng(0)
    factors = every(rows)[0].numpy()
    for law, found in ((rows.h, False), (rows.cut(0.6), True)):
        off = 0
        for _ in range(runs):
            seen = Evidence(tuple(own.name for own in TABLE), alpha=0.1)
            places = source.integers(5, size=300)
            ids = [source.choice(VOCAB, p=law[at].numpy()) for at in places]
            seen.add(1, factors[places, ids], np.zeros(len(TABLE)))
            off += seen.off is not None
        assert (off > 0.9 * runs) if found else (off <= 0.175 * runs)


def test_laws_of_recovered_tokens_are_what_engines_with_these_faults_emit() -> None:
    """A million drafts of one row, with the coins of each fault."""
    rows, source = rows_of(Claim(), places=1), np.random.default_rng(1)
    assert rows.p is not None and rows.raw_p is not None
    q, p, raw = (own[0].numpy() for own in (rows.q, rows.p, rows.raw_p))
    count = 400_000
    n, coin = source.choice(VOCAB, size=count, p=p), source.random(count)
    refused = coin >= q[n] / p[n]
    rest = np.maximum(q - p, 0) / np.maximum(q - p, 0).sum()

    def drawn(ends: np.ndarray, draw: np.ndarray) -> np.ndarray:
        return (draw[:, None] >= ends).sum(1).clip(max=VOCAB - 1)

    again = drawn(rest.cumsum(), coin)
    others = np.where(np.eye(VOCAB, dtype=bool), 0, q)
    others = (others / others.sum(1, keepdims=True)).cumsum(1)
    emitted = {
        "coin used twice": np.where(refused, again, n),
        "recovered from the target": np.where(refused, source.choice(VOCAB, count, p=q), n),
        "recovered without subtraction": np.where(refused, drawn(others[n], source.random(count)),
                                                  n),
    }  # fmt: skip
    laws = {own.name: own.law for own in TABLE}
    for name, ids in emitted.items():
        shares = np.bincount(ids, minlength=VOCAB) / count
        assert shares == pytest.approx(laws[name](rows)[0].numpy(), abs=0.004), name
    hot = Rows(rows.logits, Claim(0.5), rows.prompt, rows.before, torch.tensor(np.log(raw))[None])
    assert hot.p is not None and hot.raw_p is not None
    n = source.choice(VOCAB, size=count, p=hot.p[0].numpy())
    refused = source.random(count) >= hot.q[0].numpy()[n] / hot.raw_p[0].numpy()[n]
    rest = (hot.q - hot.raw_p).clamp(min=0.0)[0].numpy()
    ids = np.where(refused, source.choice(VOCAB, count, p=rest / rest.sum()), n)
    law = laws["draft's law before temperature"](hot)[0].numpy()
    assert np.bincount(ids, minlength=VOCAB) / count == pytest.approx(law, abs=0.004)


def test_cuts_are_those_of_engines() -> None:
    import cactus_theory as ct

    pytest.importorskip("transformers")
    for claim in CLAIMS[:4]:
        rows, cuts = rows_of(claim), claim.cuts
        told = {"temperature": claim.temperature, "top_k": cuts.top_k, "top_p": cuts.top_p}
        assert rows.q.numpy() == pytest.approx(ct.cut_rows(rows.logits, **told).numpy(), abs=EXACT)


@pytest.mark.parametrize(
    "claim", [Claim(1.0, Cuts(top_k=2)), Claim(0.0), Claim(1.0, Cuts(top_p=0.5))], ids=str
)
def test_tokens_beyond_a_cut_count_by_their_distance(claim: Claim) -> None:
    """Of top-p the smaller one of both distances: here the third token is 1.2 nats lower."""
    logits = torch.tensor([[3.0, 2.2, 1.0, -9.0]], dtype=torch.float64)
    rows = Rows(logits, claim, torch.tensor([0]), torch.tensor([], dtype=torch.int64))
    factors, _, distance = log_factors(rows, torch.tensor([[0, 1, 2]]), OF_TARGET)
    above = float(logits.softmax(-1)[0, :1])
    expected = {2: [0, 0, 1.2], 0: [0, 0.8, 2.0] if not claim.temperature else None}
    if claim.cuts.top_p < 1:
        kept = float(logits.softmax(-1)[0, :2].sum())
        expected[0] = [0, min(0.8, math.log(above / (1 - above))),
                       min(2.0, math.log(kept / (1 - kept)))]  # fmt: skip
    assert distance[0].tolist() == pytest.approx(expected[claim.cuts.top_k], abs=1e-9)
    assert bool(factors.isfinite().all())
    if claim.temperature:  # farther out the evidence for a lost cut is larger
        number = [own.name for own in OF_TARGET].index("no top-p")
        lost = number if claim.cuts.top_p < 1 else number - 1
        assert factors[0, 2, lost] > 0 > factors[0, 0, lost]
        exact, _, _ = log_factors(rows, torch.tensor([[2]]), OF_TARGET, 1e-4)
        assert float(exact[0, 0, lost]) == pytest.approx(
            math.log((1 - SHARE) * 1000 * float(rows.whole[rows.q > 0].sum())), rel=1e-9
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("claim", [Claim(0.01), Claim(0.7, Cuts(50, 0.95)), Claim()], ids=str)
def test_large_rows_with_zeros_and_one_hot_rows_have_finite_numbers(claim, dtype) -> None:
    """V = 151,936; a tenth of the logits are −∞, and one row has a single token."""
    source, size = torch.Generator().manual_seed(0), 151_936
    logits = 3 * torch.randn(2, size, generator=source)
    logits[:, ::10] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[1, 0] = 1.0
    draft = logits.roll(1, -1)
    ids = torch.stack([logits.argmax(-1), torch.tensor([5, 0]), torch.tensor([10, 3])], 1)
    at = torch.tensor([7]), torch.tensor([1])
    rows = Rows(logits.to(dtype), claim, *at, draft.to(dtype))
    factors, growth, distance = log_factors(rows, ids, TABLE)
    assert bool(factors.isfinite().all()) and bool(growth.isfinite().all())
    assert distance[0, 2] == distance[1, 2] == math.inf  # what the target never emits
    assert distance[0, 0] == distance[1, 0] == 0


def test_evidence_goes_on_from_its_content_and_is_thinned() -> None:
    source, names = np.random.default_rng(2), ("a", "b", "c")
    whole = Evidence(names, slack=0.01)
    half = Evidence(names, slack=0.01)
    for line in range(1, 1001):
        if line == 400:
            half = Evidence(**half.content())
        factors = source.normal(-0.01, 0.3, (source.integers(1, 5), 3))
        for own in (whole, half):
            own.add(line, factors, np.array([0.1, 0.2, 0.0]))
    assert whole.content() == half.content() and len(whole.curve) <= 400
    assert whole.needed()[2] == math.inf and whole.stride > 1
    with pytest.raises(ValueError, match="slack: must lie in"):
        Evidence(names, slack=-1.0)


def test_off_is_where_the_evidence_first_passed_and_stays() -> None:
    seen = Evidence(("a",), alpha=0.1)
    up, down = np.full((2, 1), math.log(4)), np.full((9, 1), -1.0)
    seen.add(7, up, np.ones(1))
    seen.add(9, np.concatenate([down, up]), np.ones(1))
    assert seen.off == {"line": 7, "token": 1, "tokens": 2} and seen.verdict == "off"
    assert seen.log < 0 < seen.limit <= seen.top
    few = Evidence(("a", "b", "the claim"), alpha=0.1)
    few.add(1, np.zeros((1, 3)), np.array([0.1, 0.2, 0.0]))
    assert few.verdict == "too little"
    few.add(2, np.zeros((1, 3)), np.array([5.0, 0.0, 0.0]))
    assert few.verdict == "as claimed"


def test_nats_are_bounded_from_below() -> None:
    """An engine at 0.7 of the temperature: the bound rises to most of what it is off, not above."""
    rows, source = rows_of(Claim(), places=5), np.random.default_rng(3)
    law = rows.cut(0.6)
    nats = float((law * (law / rows.q).log()).sum(-1).mean())
    factors = every(rows)[0].numpy()
    seen = Evidence(tuple(own.name for own in TABLE))
    for _ in range(60):
        places = source.integers(5, size=100)
        ids = [source.choice(VOCAB, p=law[at].numpy()) for at in places]
        seen.add(1, factors[places, ids], np.zeros(len(TABLE)))
    assert 0.5 * nats < seen.nats.bound(0.01) < nats


def test_pairs_of_one_law_have_mean_one_whichever_it_is() -> None:
    """Two answers of any law: 2 g/(g + g′) by enumeration; of two laws it grows."""
    source = np.random.default_rng(4)
    g, law = source.normal(0, 3, (VOCAB, 2)), source.dirichlet(np.ones(VOCAB))
    mean = sum(law[i] * law[j] * math.exp(paired(g[[i]], g[[j]])[0])
               for i in range(VOCAB) for j in range(VOCAB))  # fmt: skip
    assert mean == pytest.approx(1, abs=EXACT)
    ours, controls = np.full((30, 2), 0.5), np.full((30, 2), -0.5)
    assert paired(ours, controls)[-1] > math.log(100) > 0 > paired(controls, ours)[-1]


def test_the_slack_lowers_the_evidence_of_every_alternative_token_by_token() -> None:
    factors, growth = np.full((7, 2), 0.3), np.full(2, 0.1)
    plain, slack = Evidence(("a", "b")), Evidence(("a", "b"), slack=0.01)
    for one in (plain, slack):
        one.add(1, factors, growth)
    np.testing.assert_allclose(plain.own - slack.own, 7 * 0.01)
    np.testing.assert_allclose(plain.grown - slack.grown, 7 * 0.01)
    # the bound on nats is of the factors as they are
    np.testing.assert_allclose(slack.nats.bound(0.01), plain.nats.bound(0.01), rtol=1e-9)
