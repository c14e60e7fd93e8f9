"""Expected acceptances of drafted tokens: looked up, fitted, refused."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import DraftStop, EarlyExit, ModelDrafter, generate
from cactus_theory.decoding.drafters.stop import Watch
from cactus_theory.decoding.result import VerifiedRows

PROMPT = torch.tensor([[1, 5, 9]])
# a few float64 roundings
EXACT = 1e-12


@pytest.mark.parametrize(
    "stop", [DraftStop(), DraftStop(knots=((0.3, 0.5),)), DraftStop(knots=((0.2, 0), (0.9, 0.7)))]
)
def test_what_is_looked_up_is_the_acceptance(stop):
    places = [*np.linspace(0, 1, 101), *(place for place, _ in stop.knots)]
    for place, expected in zip(places, stop.acceptance(places), strict=True):
        watch = Watch(stop, [2])
        watch.see(1, torch.tensor([[0.0, place]], dtype=torch.float64), torch.tensor([1]))
        assert watch.products[0] == pytest.approx(expected, abs=EXACT)


def test_a_fit_is_the_monotone_regression_on_its_groups():
    source = np.random.default_rng(0)
    p = source.random(6000)
    truth = 0.4 + 0.5 * p**2
    stop = DraftStop.fit(p, source.random(6000) < truth, threshold=0.2, bins=10)
    assert stop.threshold == 0.2 and 3 < len(stop.knots) <= 10
    places = np.linspace(0.05, 0.95, 19)
    # a group of 600 coins has a standard error of .02
    assert np.abs(stop.acceptance(places) - (0.4 + 0.5 * places**2)).max() < 0.07
    assert (np.diff(stop.acceptance(np.linspace(0, 1, 101))) >= 0).all()


@pytest.mark.parametrize(
    ("p", "accepted", "knots"),
    [
        ([0.1, 0.5, 0.9], [0.2, 0.4, 0.9], [(0.1, 0.2), (0.5, 0.4), (0.9, 0.9)]),
        ([0.9, 0.1, 0.5], [0.9, 0.2, 0.4], [(0.1, 0.2), (0.5, 0.4), (0.9, 0.9)]),
        ([0.1, 0.5, 0.9], [0.6, 0.2, 0.9], [(0.3, 0.4), (0.9, 0.9)]),  # a violator is pooled
        ([0.1, 0.5, 0.9], [0.9, 0.6, 0.0], [(0.5, 0.5)]),  # and its pool with the one before
        ([0.5, 0.5, 0.9], [0.2, 0.4, 0.9], [(0.5, 0.3), (0.9, 0.9)]),  # one p, one knot
        ([1.0], [1.0], [(1.0, 1.0)]),
    ],
)
def test_neighbours_that_do_not_rise_are_pooled(p, accepted, knots):
    found = DraftStop.fit(p, accepted).knots
    assert np.array(found) == pytest.approx(np.array(knots), abs=EXACT)


def test_rows_of_a_decode_are_enough_for_a_fit(tiny):
    result = generate(*tiny, PROMPT, policy="cactus:delta=0.3", num_draft_tokens=4,
                      max_new_tokens=90, record_rows=True)  # fmt: skip
    rows, at = result.rows, result.rows.draft_token_ids[:, None]
    p = rows.draft_probs.gather(1, at)[:, 0]
    rule = ct.policy("cactus:delta=0.3")
    phi = rule.acceptance(rows.target_probs, rows.draft_probs, at)[:, 0]
    assert isinstance(rows, VerifiedRows)
    assert DraftStop.from_rows(rows) == DraftStop.fit(p, rows.accepted)
    exact = DraftStop.from_rows(rows, "cactus:delta=0.3", threshold=0.4, bins=4)
    assert exact == DraftStop.fit(p, phi, threshold=0.4, bins=4)
    assert exact.knots != DraftStop.from_rows(rows, bins=4).knots


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftStop(1.2), r"threshold: must lie in \[0, 1\]; got 1.2"),
        (lambda: DraftStop(float("nan")), r"threshold: must lie in \[0, 1\]; got nan"),
        (lambda: DraftStop("high"), "threshold: must be a number; got 'high'"),
        (lambda: ModelDrafter(None, stop=-1), r"threshold: must lie in \[0, 1\]; got -1"),
        (lambda: EarlyExit(1, stop=-1), r"threshold: must lie in \[0, 1\]; got -1"),
        (lambda: DraftStop(knots=()), r"knots: must be pairs of numbers in \[0, 1\]; got \(\)"),
        (lambda: DraftStop(knots=((0, 1.5),)), r"knots: must be pairs of numbers in \[0, 1\]"),
        (lambda: DraftStop(knots=((0.5, 0.1), (0.5, 0.2))), "knots: p must rise"),
        (lambda: DraftStop(knots=((0.1, 0.3), (0.5, 0.2))), "acceptance must not fall"),
        (lambda: DraftStop.fit([], []), "draft_prob, accepted: must be two lists of one length"),
        (lambda: DraftStop.fit([0.5], [0.5, 1]), "draft_prob, accepted: must be two lists"),
        (lambda: DraftStop.fit([0.5], [1.5]), r"accepted: must lie in \[0, 1\]; got 1.5 to 1.5"),
        (lambda: DraftStop.fit([float("nan")], [1]), r"draft_prob: must lie in \[0, 1\]; got nan"),
        (lambda: DraftStop.fit([0.5], [1], bins=0), "bins: must be an integer of at least 1"),
    ],
)
def test_refuses_what_is_no_stop(make, message):
    with pytest.raises(ValueError, match=message):
        make()
