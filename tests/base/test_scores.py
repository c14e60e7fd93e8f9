"""Rows from scores at any temperature, and a word about scores that are none."""

import math
import warnings

import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.rows import ORDINARY, greedy, load_rows, scaled, warn_of_probabilities
from cactus_theory.kernels import verify_logits

# of float32 and of the softmax over a few entries
CLOSE = 1e-6
LEAST, MOST = 5e-324, 1.7e308  # the least positive float, and nearly the largest
TEMPERATURES = (LEAST, 1e-300, 1e-45, 1e-30, 1e-4, 0.5, 1e4, 1e30, 1e38, 1e300, MOST)


def exact(scores: list[float], temperature: float) -> list[float]:
    """Return the softmax in Python's own floats."""
    most = max(scores)
    weights = [math.exp((score - most) / temperature) for score in scores]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_temperature_is_exact(temperature, dtype):
    for scores in (
        [30.0, 29.99, 30.0, -math.inf],
        [0.0, -1e-4, -2e-4, 5e-5],
        [-7.0, -7.5, 1.0, 2.0],
    ):
        row = torch.tensor(scores, dtype=dtype)
        expected = torch.tensor(exact(row.tolist(), temperature), dtype=dtype)
        own = row.clone()
        for found in (scaled(row, temperature), scaled(own, temperature, own)):
            assert torch.allclose(found.softmax(-1), expected, atol=CLOSE)
            assert found.dtype == dtype


def test_ordinary_temperatures_divide_as_ever():
    row = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for temperature in (*ORDINARY, 0.7, 1.5):
        assert scaled(row, temperature).equal(row / temperature)


@pytest.mark.parametrize("tilt", [1e-15 - 1, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tilted_target_at_the_ends(tilt, dtype):
    q, p = torch.tensor([0.4, 0.0, 0.2, 0.4], dtype=dtype), torch.full((4,), 0.25, dtype=dtype)
    expected = [0.5, 0.0, 0.0, 0.5] if tilt > 0 else [1 / 3, 0.0, 1 / 3, 1 / 3]
    law = ct.emitted_law(ct.policy("speculative", tilt=tilt), q, p)
    assert law.tolist() == pytest.approx(expected, abs=CLOSE)


def test_greedy_rows_of_scores_without_a_law_are_nan():
    scores = torch.tensor(
        [[1.0, 2.0, 2.0], [1.0, math.nan, 0.0], [-math.inf] * 3, [0, math.inf, 0]]
    )
    found = greedy(scores)
    assert found[0].tolist() == [0, 1, 0] and found[3].tolist() == [0, 1, 0]
    assert found[1:3].isnan().all()


def test_probabilities_among_scores_are_named():
    with pytest.warns(UserWarning, match="Model: holds probabilities where logits belong"):
        warn_of_probabilities("Model", torch.tensor([0.5, 0.25, 0.25]).half())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in ([0.5, 0.25, 0.5], [1.5, -0.5, 0.0], [math.nan, 0.5, 0.5], [-0.5, -0.7, -3.0]):
            warn_of_probabilities("Model", torch.tensor(row))


def test_probabilities_given_as_logits_are_warned_of(tmp_path):
    row = torch.tensor([[0.5, 0.25, 0.25]])
    (tmp_path / "rows.json").write_text(str(row.tolist()))
    with pytest.warns(UserWarning, match="rows.json: holds probabilities where logits belong"):
        load_rows(str(tmp_path / "rows.json"), logits=True)
    ids, at = torch.tensor([[1]]), {"seeds": torch.tensor([7]), "positions": torch.tensor([1])}
    logits = torch.zeros(1, 1, 3)
    with pytest.warns(UserWarning, match="target_logits: holds probabilities"):
        verify_logits(ct.policy("typical"), row.expand(1, 2, 3), logits, ids, **at, temperature=1)
