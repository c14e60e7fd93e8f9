import pytest
import torch

import cactus_theory as ct
from simulations.figures.frontier import PRICES, Envelope, spending, table


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 12, 40, generator=generator, dtype=torch.float64) * 2
    logits[1] = logits[0] + 0.5 * logits[1]
    return tuple(logits.softmax(-1))


@pytest.fixture(scope="module")
def envelope(rows):
    return Envelope.of(*rows, PRICES)


@pytest.fixture(scope="module")
def lines(rows, envelope):
    return table(*rows, envelope)


def test_no_policy_is_below_the_envelope(lines):
    ratios = {line["series"]: [] for line in lines}
    for line in lines:
        if line["kl_ratio"] is not None:
            ratios[line["series"]].append(line["kl_ratio"])
    assert all(abs(ratio - 1) < 1e-9 for ratio in ratios.pop("band_price"))
    assert min(ratios.pop("band_delta")) > 1 - 1e-6
    assert min(ratio for found in ratios.values() for ratio in found) > 1 - 1e-6
    assert ratios["cactus"][0] > 1.05


def test_interpolated_envelope_meets_a_solved_price(rows, envelope):
    solved = ct.optimal_acceptance(*rows, price=1.7)
    accepted, kl = solved.acceptance.mean().item(), solved.divergence.mean().item()
    found = envelope.compare(accepted, kl)
    assert found["kl_ratio"] == pytest.approx(1, abs=1e-4)
    assert found["frontier_acceptance"] == pytest.approx(accepted, abs=1e-5)


def test_only_the_published_rule_exceeds_its_proposals_budget(rows):
    assert spending(ct.policy("cactus", delta=0.01), *rows)["over_share"] > 0
    assert spending(ct.policy("cactus_exact", delta=0.01), *rows)["over_share"] == 0
    assert spending(ct.policy("band", delta=0.01), *rows)["over_share"] is None
