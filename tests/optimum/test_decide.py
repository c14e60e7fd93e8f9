"""Decisions without solving: the same as the solved band, at the precision of the rows."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.roots import rising_root
from cactus_theory.base.tolerances import DECIDED, LEAST
from cactus_theory.optimum.band_row import PricedBand, PricedRow
from tests.amounts import amount, some
from tests.verify.blocks import LAST_COIN, decided

# what deciding in float32 may change of an emitted law, in total variation, at any budget: an
# edge is found to 2 units of rounding (1.2e-7 each) and so are p/q and Σp/Σq, and the law moves by
# at most the mass outside the band times that: 8 units are 1e-6. The worst of 40 seeds is 1.3e-7.
FLOAT32_LAW = 1e-6
# sums of a few numbers
ROUNDING = 1e-12
# halvings that find a threshold to 2e-14
STEPS = 46
PRICED = ("kl", "reverse_kl", "pearson_chi2", "squared_hellinger", "jensen_shannon", "alpha:a=0.5")
PRICES = (0.05, 1.0, 20.0)
BUDGETED = (*PRICED, "neyman_chi2", "alpha:a=1.5", "alpha:a=-1", "renyi:a=0.5", "renyi:a=2")


def rows(count, vocab, dtype, seed=0, spread=2.0, noise=1.0, zeros=False):
    source = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(count, vocab, generator=source, dtype=torch.float64)
    stray = noise * torch.randn(count, vocab, generator=source, dtype=torch.float64)
    q, p = logits, logits + stray
    if zeros:
        q = q.masked_fill(torch.rand(count, vocab, generator=source) < 0.2, -math.inf)
        p = p.masked_fill(torch.rand(count, vocab, generator=source) < 0.2, -math.inf)
    return q.softmax(-1).to(dtype), p.softmax(-1).to(dtype)


def thresholds(q, p, accepted):
    """Return, for every token, the coin at which a decision turns, by bisection."""
    low, high = torch.zeros(q.shape, dtype=torch.float64), torch.ones(q.shape, dtype=torch.float64)
    for _ in range(STEPS):
        middle = (low + high) / 2
        below = accepted(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("divergence", some(PRICED, 3))
@pytest.mark.parametrize("head", [0.0, 0.3])
def test_the_decision_turns_at_phi_exactly_in_float64(divergence, price, zeros, head):
    q, p = rows(1, 9, torch.float64, seed=3, zeros=zeros)
    rule = ct.policy("band", price=price, divergence=divergence, head=head)
    tokens = torch.arange(9)
    wide = q.expand(9, 9), p.expand(9, 9)
    turn = thresholds(q[0], p[0], lambda coin: decided(rule, *wide, tokens, coin)[0])
    phi = rule.acceptance(q, p, tokens[None])[0]
    drafted = p[0] > 0
    assert (turn - phi).abs()[drafted].max() < 1e-12


NARROW = [f"{knob},divergence={f}" for knob in ("price=2.0", "delta=0.1,head=0.3") for f in PRICED]
NARROW += [f"delta={delta},divergence={f}" for delta in (1e-3, 1e-5, 2e-6) for f in BUDGETED]


@pytest.mark.parametrize("spec", some(NARROW, 8))
def test_float32_rows_move_the_emitted_law_by_less_than_a_millionth(spec):
    """The law that float32 decisions emit, enumerated over tokens, against the float64 law."""
    rule = ct.policy(f"band:{spec}")
    worst = 0.0
    for seed in range(amount(1, 2)):
        q, p = rows(1, 20, torch.float32, seed=seed, noise=2.0)
        tokens = torch.arange(20)
        wide = q.expand(20, 20).contiguous(), p.expand(20, 20).contiguous()
        turn = thresholds(q[0], p[0], lambda coin, w=wide, t=tokens: decided(rule, *w, t, coin)[0])
        _, residual = decided(rule, *wide, tokens, torch.full((20,), LAST_COIN).double())
        exact_q, exact_p = (row.double() / row.double().sum() for row in (q[0], p[0]))
        law = exact_p * turn
        residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-300)
        law = law + ((exact_p * (1 - turn))[:, None] * residual).sum(0)
        apart = (law - rule.emitted(exact_q, exact_p)).abs().sum() / 2
        worst = max(worst, float(apart))
    assert worst < FLOAT32_LAW


TINY = {
    torch.float64: (1e-320, 1e-308, 1e-300, 1e-285, 1e-200),
    torch.float32: (1e-44, 1e-38, 1e-33, 1e-28, 1e-20),
}


@pytest.mark.parametrize("size", range(5))
@pytest.mark.parametrize("dtype", TINY)
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "squared_hellinger"])
def test_a_drafted_token_that_the_target_all_but_excludes(divergence, dtype, size):
    """Under reverse KL it may be raised by any factor; below normal numbers decisions refuse it."""
    tiny = TINY[dtype][size]
    q = torch.tensor([[1.0, tiny, 0.0], [0.75, tiny, 0.25]], dtype=dtype)
    p = torch.tensor([[0.25, 0.5, 0.25], [0.0, 1.0, 0.0]], dtype=dtype)
    exact, token = (q.double(), p.double()), torch.tensor([1, 1])
    for knob in ("price=0.8", "price=0.8,per_row=True"):
        rule = ct.policy(f"band:{knob},divergence={divergence}")
        law = rule.emitted(*exact)
        assert (law.sum(-1) - 1).abs().max() < ROUNDING
        many = [torch.cat([row, row[:1].expand(40, -1)]) for row in exact]
        assert torch.allclose(rule.emitted(*many)[:2], law, rtol=0, atol=ROUNDING)
        phi = rule.acceptance(*exact, token[:, None])[:, 0]
        assert torch.allclose(phi, law[:, 1] / exact[1][:, 1], rtol=0, atol=ROUNDING)
        for coin in (phi / 2, (1 + phi) / 2):
            accepted = (coin < phi) & (tiny >= LEAST)
            sure = (coin - phi).abs() > 0.01
            coins = coin[:, None], torch.full((2,), 0.3, dtype=torch.float64)
            kept, _ = decided(rule, q, p, token, coin)
            rows = torch.stack([q, q], 1), p[:, None], token[:, None]
            found = ct.verify_block(rule, *rows, coins=coins, validate=False)
            assert (kept == accepted)[sure].all()
            assert (found.num_accepted.bool() == accepted)[sure].all()


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl"])
def test_wide_float32_rows_that_miss_one_decide_as_their_normalised_selves(divergence):
    """V = 151,936 and sums off by 1.5e-5, as float32 softmaxes leave them."""
    q, p = rows(1, 151_936, torch.float32, spread=3.0)
    q, p = q * (1 + 1.5e-5), p * (1 - 1.5e-5)
    exact = [row.double() / row.double().sum(-1, keepdim=True) for row in (q, p)]
    for knob in ("price=2", "delta=0.05"):
        rule = ct.policy(f"band:{knob},divergence={divergence}")
        token = (exact[1] / exact[0]).argsort(-1)[:, -2000]
        phi = rule.acceptance(*exact, token[:, None])[:, 0]
        assert 0.1 < phi < 0.9
        assert decided(rule, q, p, token, phi * (1 - 3e-6))[0].all()
        assert not decided(rule, q, p, token, phi * (1 + 3e-6))[0].any()


def test_narrow_rows_are_decided_in_float32():
    q, p = rows(8, 50, torch.bfloat16, seed=7)
    rule = ct.policy("band:price=2")
    tokens, coin = torch.arange(8), torch.full((8,), 0.5, dtype=torch.float64)
    narrow = decided(rule, q, p, tokens, coin)
    wide = decided(rule, q.float(), p.float(), tokens, coin)
    assert all(map(torch.equal, narrow, wide))
    assert torch.bfloat16 not in DECIDED


def test_secants_that_swing_across_a_kink_give_way_to_halving():
    """A millionth as steep below 0.9 as above: of each pair of secants one leaves the bracket."""

    places = []

    def kinked(x: float) -> float:
        places.append(x)
        return 1e-6 * (x - 0.8) if x < 0.9 else 1e-7 + x - 0.9

    root = rising_root(kinked, 1e-6, 1.0, 0.5, 1e-12, 1.0)
    assert root == pytest.approx(0.8, rel=1e-11) and len(places) < 20  # alone they never end


@pytest.mark.parametrize("price", [0.3, 0.8, 3.0])
@pytest.mark.parametrize("divergence", some(PRICED, 4))
def test_rows_whose_target_excludes_much_of_the_draft(divergence, price):
    """There the path may end before the price is reached: only excluded tokens are cut."""
    q, p = rows(20, 7, torch.float64, seed=8, zeros=True)
    q = torch.where(torch.arange(7) < 4, 0.0, q) + torch.where(torch.arange(7) == 6, 1e-9, 0.0)
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    rule = ct.policy("band", price=price, divergence=divergence)
    solved = ct.optimal_acceptance(q, p, price=price, divergence=divergence)
    assert (rule.emitted(q, p) - solved.target).abs().max() < 1e-12
    refused = torch.full((20,), LAST_COIN, dtype=torch.float64)
    accepted, law = decided(rule, q, p, torch.zeros(20, dtype=torch.int64), refused)
    assert not accepted.any()  # token 0 has no target mass
    expected = (solved.target - p).clamp(min=0.0)
    recovered, expected = (row / row.sum(-1, keepdim=True) for row in (law, expected))
    assert (recovered - expected).abs().max() < 1e-9


def test_a_coin_at_the_upper_edge_itself_refuses():
    """Numbers that binary fractions hold: b = 1.25, a = 0.75, and the excess is exactly 0."""
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    p = torch.tensor([0.75, 0.25], dtype=torch.float64)
    pytest.importorskip("numba")
    row = PricedRow(q.numpy(), p.numpy(), PricedBand(ct.divergence("pearson_chi2"), 1.0))
    assert not row.upper_exceeds(1.25)
    assert (row.scale, row.upper) == pytest.approx((0.75, 1.25), rel=1e-12)
