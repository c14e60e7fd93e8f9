"""The dials of a synthetic pair do what they say."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import SavedRows, replay
from simulations.synthetic import Dials, Texts, levels, synthetic_rows, synthetic_trace
from tests.amounts import some

# a bisection of 64 halvings, and sums over a few hundred tokens
MET = 1e-10
# what float32 log-probabilities leave of float64 rows
STORED = 1e-6
SIGMAS = 5.0


def drawn(dials: Dials, distances=None, rows: int = 6, seed: int = 0):
    same = torch.full((rows,), dials.distance, dtype=torch.float64)
    wanted = same if distances is None else distances
    return synthetic_rows(dials, wanted, torch.Generator().manual_seed(seed))


def close(values: torch.Tensor, expected: float, tolerance: float = MET) -> None:
    torch.testing.assert_close(values, torch.full_like(values, expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize("distance", some([0.0, 0.01, 0.3, 0.7, 0.9], 3))
@pytest.mark.parametrize("over", [0.0, 0.25])
def test_the_total_variation_is_met(distance: float, over: float) -> None:
    dials = Dials(200, 1.0, max(distance, over), over_propose=over)
    q, p = drawn(dials)
    variation = 1 - torch.minimum(p, q).sum(-1)
    close(variation, dials.distance)
    for rows in (q, p):
        assert (rows >= 0).all()
        close(rows.sum(-1), 1.0)


@pytest.mark.parametrize("distance", some([0.0, 0.05, 0.5, 3.0], 3))
@pytest.mark.parametrize("over", [0.0, 0.25])
def test_the_kl_is_met_on_what_the_target_allows(distance: float, over: float) -> None:
    q, p = drawn(Dials(200, 0.8, distance, "kl", over))
    inside = torch.where(q > 0, p, 0.0)
    kl = ct.divergence("kl").value(inside / inside.sum(-1, keepdim=True), q)
    close(kl, distance)


def test_the_target_is_zipf_in_an_order_of_its_own() -> None:
    q, _ = drawn(Dials(50, 1.3, 0.2))
    ranks = torch.arange(1, 51).double() ** -1.3
    for row in q:
        torch.testing.assert_close(row.sort(descending=True).values, ranks / ranks.sum())
    assert len({int(row.argmax()) for row in q}) > 1
    even, _ = drawn(Dials(50, 0.0, 0.2))
    torch.testing.assert_close(even, torch.full((6, 50), 0.02).double())


def test_over_proposed_mass_is_where_the_target_has_none() -> None:
    q, p = drawn(Dials(40, 1.0, 0.5, over_propose=0.2))
    excluded = q == 0
    assert (excluded.sum(-1) == 4).all()
    lost = torch.where(excluded, p, 0.0).sum(-1)
    close(lost, 0.2)


def test_rows_may_each_have_a_distance_and_repeat_by_seed() -> None:
    wanted = torch.linspace(0, 0.8, 7, dtype=torch.float64)
    q, p = drawn(Dials(100), wanted)
    torch.testing.assert_close(1 - torch.minimum(p, q).sum(-1), wanted, atol=MET, rtol=0)
    again, other = drawn(Dials(100), wanted), drawn(Dials(100), wanted, seed=1)
    assert torch.equal(q, again[0]) and torch.equal(p, again[1])
    assert not torch.equal(q, other[0])


def test_the_level_keeps_its_mean_spread_and_persistence() -> None:
    count, texts = 20_000, Texts(spread=0.3, persistence=0.8)
    found = levels(Dials(10, 1.0, 0.2), texts, count, torch.Generator().manual_seed(2))
    logs = found.log().numpy()
    assert logs.std() == pytest.approx(0.3, rel=0.1)
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] == pytest.approx(0.8, abs=0.03)
    # an autoregression of 0.8 has a ninth of the independent values
    error = found.std() / np.sqrt(count / 9)
    assert abs(float(found.mean()) - 0.2) < SIGMAS * float(error)
    assert 0 < found.min() and found.max() <= 0.95
    assert set(levels(Dials(), Texts(), 5, torch.Generator()).tolist()) == {0.3}


def test_the_texts_are_a_trace_of_these_rows(tmp_path) -> None:
    dials, texts = Dials(30, 1.0, 0.4), Texts(texts=2, cycles=3, num_draft_tokens=4)
    trace = synthetic_trace(tmp_path / "t", dials, texts)
    assert (trace.texts, len(trace), trace.num_draft_tokens) == (2, 6, 4)
    q, p = trace.rows()
    variation = 1 - torch.minimum(p, q).sum(-1)
    close(variation, 0.4, STORED)
    for cycle in trace:
        assert len(cycle.target_probs) == 5 and (cycle.draft_token_ids < 30).all()


def test_lossless_sampling_rejects_the_distance(tmp_path) -> None:
    """Positions are independent, so that a call yields (1 − a^{K+1})/(1 − a) tokens, a = 1 − TV."""
    q, p = drawn(Dials(60, 1.0, 0.35), rows=40)
    assert replay(SavedRows.of(q, p), "speculative").tokens_per_call.value == pytest.approx(1.65)
    texts = Texts(texts=40, cycles=5, num_draft_tokens=4, seed=3)
    trace = synthetic_trace(tmp_path / "t", Dials(60, 1.0, 0.35), texts)
    for width in (1, 2, 4):
        found = replay(trace, "speculative", num_draft_tokens=width).tokens_per_call
        expected = (1 - 0.65 ** (width + 1)) / 0.35
        assert abs(found.value - expected) < SIGMAS * found.standard_error


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab": 1}, "vocab: must be at least 2; got 1"),
        ({"zipf": -1}, r"zipf: must lie in \[0, inf\]; got -1"),
        ({"distance": 1.2}, r"distance: must lie in \[0, 1\]; got 1.2"),
        ({"distance": 0.1, "over_propose": 0.2}, r"distance: must lie in \[0.2, 1\]; got 0.1"),
        ({"over_propose": 1.0}, r"over_propose: must lie in \[0, 1\); got 1.0"),
        ({"measure": "renyi"}, "measure: must be one of total_variation, kl; got 'renyi'"),
    ],
)
def test_dials_out_of_range_are_named(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        Dials(**wrong)


def test_a_distance_out_of_reach_is_named() -> None:
    with pytest.raises(ValueError, match="distance: must be below about .*; got 50"):
        drawn(Dials(10, 1.0, 50.0, "kl"))
    with pytest.raises(ValueError, match=r"persistence: must lie in \[0, 1\); got 1"):
        Texts(persistence=1)
    with pytest.raises(ValueError, match="cycles: must be at least 1; got 0"):
        Texts(cycles=0)
