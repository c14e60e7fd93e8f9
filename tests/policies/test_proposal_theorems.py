"""The published rules and the programs behind them: THEORY.md, Theorems 2, 3 and 27."""

import math

import pytest
import torch

import cactus_theory as ct
from tests.amounts import amount
from tests.formulas import ALL, by_hand
from tests.rows import rows

# KL of two points by hand, relative to its budget
EXACT = 1e-9
# an exact root is not compared beside q_n = 1, where 1 − γ has few digits
DELTAS = (1e-3, 0.05, 0.3, 1.0, 3.0)


def two_points(gamma, q_n):
    pairs = torch.stack([gamma, 1 - gamma], -1), torch.stack([q_n, 1 - q_n], -1)
    return torch.as_tensor(by_hand("kl", *pairs))


@pytest.mark.parametrize("delta", DELTAS)
def test_the_published_rule_is_within_budget_while_the_two_sum_to_one(delta):
    """γ + q_n ≤ 1 is enough; from q_n = ½ on, up to certainty, it always overspends."""
    q_n = torch.linspace(1e-6, 1 - 1e-6, 40_001, dtype=torch.float64)
    gamma = ct.policy("cactus", delta=delta).gamma(q_n)
    spent = two_points(gamma, q_n)
    inside, beyond = gamma + q_n <= 1, (q_n >= 0.5) & (gamma < 1)
    assert (spent[inside] <= delta * (1 + EXACT)).all()
    assert (spent[beyond] >= delta * (1 - EXACT)).all()
    assert (gamma[inside] > 0.5).any()  # more than the published condition, γ ≤ ½


@pytest.mark.parametrize("spec", ALL)
def test_no_row_with_the_raised_entry_costs_less_than_two_points(spec):
    """Any split of 1 − γ over the other tokens, those with q = 0 included."""
    kind, count, vocab = ct.divergence(spec), amount(200, 5000), 5
    q = rows(count, vocab, seed=1, kind="zeros")
    split = rows(count, vocab - 1, seed=2, kind="spiky")
    q_n = q[:, 0]
    lift = rows(count, 2, seed=3)[:, 0]
    gamma = q_n + lift * (1 - q_n)
    h = torch.cat([gamma[:, None], (1 - gamma)[:, None] * split], -1)
    pair = torch.stack([gamma, 1 - gamma], -1), torch.stack([q_n, 1 - q_n], -1)
    least = kind.value(*pair)
    assert (kind.value(h, q) >= least * (1 - EXACT) - EXACT).all()
    on = (q_n < 1)[:, None]
    scaled = torch.where(
        on, (1 - gamma)[:, None] * q[:, 1:] / (1 - q_n).clamp(min=1e-300)[:, None], 0
    )
    best = torch.cat([gamma[:, None], scaled], -1)
    torch.testing.assert_close(kind.value(best, q), least, rtol=1e-6, atol=EXACT)


@pytest.mark.parametrize("alpha", [None, 0.05, 1.0])
@pytest.mark.parametrize("epsilon", [0.02, 0.3, 1.0])
def test_typical_acceptance_rounds_the_program_with_cross_entropy(epsilon, alpha):
    """Two entries of h are enough of a linear program with two rules: h_n, and one more token."""
    rule = ct.policy("typical", epsilon=epsilon, alpha=alpha)
    q = rows(amount(60, 2000), 6, seed=8, kind="spiky")
    surprise, entropy = -q.log(), -torch.special.xlogy(q, q).sum(-1)
    share = epsilon**0.5 if alpha is None else alpha
    budget = (entropy - math.log(share)).clamp(min=-math.log(epsilon))[:, None, None]
    own, other = surprise[:, :, None], surprise[:, None, :]
    inside = ((budget - other) / (own - other)).nan_to_num(nan=1.0).clamp(0, 1)
    most = torch.where(own <= budget, 1.0, torch.where(other <= budget, inside, 0.0)).amax(-1)
    least = surprise.amin(-1, keepdim=True)
    stated = torch.where(own[..., 0] <= budget[..., 0], 1.0,
                         (budget[..., 0] - least) / (surprise - least))  # fmt: skip
    torch.testing.assert_close(stated[q > 0], most[q > 0], rtol=EXACT, atol=EXACT)
    ids = torch.arange(6).expand(len(q), 6)
    accepted, clear = rule.acceptance(q, q, ids), (own - budget)[..., 0].abs() > EXACT
    assert (accepted == (most >= 1).double())[clear & (q > 0)].all()
    assert {0.0, 1.0} == set(accepted.flatten().tolist()) and (most[accepted == 0] > 0).any()
    likeliest = rule.residual(q, q, torch.zeros(len(q), dtype=torch.int64))
    assert likeliest.argmax(-1).equal(surprise.argmin(-1))
