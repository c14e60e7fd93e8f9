"""Bounds of an answer's events under a cap, against every event of texts that are enumerated."""

import itertools
import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.answer_bounds import event_interval, most_variation
from cactus_theory.decoding import ByPosition, Ledger
from tests.amounts import amount, some
from tests.decoding.ledger_texts import target_of, texts_of
from tests.markov.pair import Setting, markov_pair
from tests.markov.texts import enumerate_texts

# an end of an interval, and what is a sum in another order
EXACT = 1e-12
# the nats of an end: its last digit, times a slope that is steep next to 0 and 1
NATS = 1e-9
RATES = (1e-300, 1e-30, 1e-9, 0.01, 0.3, 0.5, 0.9, 0.99, 1 - 1e-9)
CAPS = (1e-30, 1e-15, 1e-9, 1e-4, 0.01, 0.1, 1.0, 5.0, 20.0)


def kl2(s, r):
    """Return kl₂(s‖r) of arrays."""
    s, r = np.broadcast_arrays(np.asarray(s, float), np.asarray(r, float))
    parts = np.zeros(s.shape)
    for above, below in ((s, r), (1 - s, 1 - r)):
        some_mass = above > 0
        with np.errstate(divide="ignore"):
            parts[some_mass] += above[some_mass] * np.log(above[some_mass] / below[some_mass])
    return parts


def by_halving(rate, cap, up):
    """Return an end of the interval by a plain bisection of a plain formula."""
    inside, outside = rate, 1.0 if up else 0.0
    if kl2(outside, rate) <= cap:
        return outside
    for _ in range(200):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if kl2(middle, rate) <= cap else (inside, middle)
    return inside


@pytest.mark.parametrize("rate", RATES)
def test_ends_are_where_the_binary_kl_is_the_cap(rate):
    for cap in CAPS:
        low, high = event_interval(rate, cap)
        assert 0 <= low <= rate <= high <= 1
        if 0.001 < rate < 0.999 and cap > 1e-6:
            assert low == pytest.approx(by_halving(rate, cap, False), abs=EXACT)
            assert high == pytest.approx(by_halving(rate, cap, True), abs=EXACT)
            for end in {low, high} - {0.0, 1.0}:
                assert float(kl2(end, rate)) == pytest.approx(cap, rel=NATS)
        assert event_interval(rate, 2 * cap)[0] <= low and high <= event_interval(rate, 2 * cap)[1]
        mirrored = event_interval(1 - rate, cap)
        assert 1 - mirrored[1] == pytest.approx(low, abs=EXACT)


def test_edges_of_rate_and_cap():
    assert event_interval(0.3, 0.0) == (0.3, 0.3)
    assert event_interval(0.3, math.inf) == event_interval(0.0, math.inf) == (0.0, 1.0)
    assert event_interval(0.0, 3.0) == (0.0, 0.0) and event_interval(1.0, 3.0) == (1.0, 1.0)
    assert event_interval(0.5, math.log(2) * (1 - 1e-12))[0] > 0
    assert event_interval(0.5, math.log(2)) == (0.0, 1.0)
    # a change of a tiny cap is √(2 C r (1 − r)), one from a tiny rate C/ln(C/r) or so
    assert event_interval(0.5, 1e-30)[1] - 0.5 == pytest.approx(math.sqrt(0.5e-30), abs=1e-16)
    low, high = event_interval(1e-300, 0.1)
    assert low == 0 and high * (math.log(high) + math.log(1e300)) - high == pytest.approx(
        0.1, abs=1e-6
    )
    assert event_interval(5e-324, 1e-3)[1] < 1e-4


@pytest.mark.parametrize("cap", [1e-12, 1e-8, 1e-6, 1e-3, 0.1, 1.0, 3.9, 4.1, 20.0, 800.0])
def test_total_variation_is_that_of_the_worst_two_outcomes(cap):
    variation = most_variation(cap)
    rates = np.concatenate([np.geomspace(1e-12, 1e-3), np.linspace(0.001, 0.999, 200)[1:]])
    for _ in range(9):  # ever nearer around the best
        changes = [event_interval(rate, cap)[1] - rate for rate in rates]
        best = min(max(int(np.argmax(changes)), 1), len(rates) - 2)
        assert max(changes) <= variation + EXACT
        rates = np.linspace(rates[best - 1], rates[best + 1], 21)
    assert variation - max(changes) < 1e-9
    assert variation <= min(math.sqrt(cap / 2), math.sqrt(-math.expm1(-cap))) + 1e-16
    assert most_variation(0.0) == 0.0 and most_variation(math.inf) == 1.0


def events(outcomes):
    """Return every event as a row of zeros and ones."""
    return (np.arange(2**outcomes)[:, None] >> np.arange(outcomes) & 1).astype(float)


def whole(masses):
    """Return sums of probabilities, those of everything but a rounding being 1."""
    return np.where(np.abs(masses - 1) < EXACT, 1.0, masses)


def level_sets(h, q):
    """Return h and q of all sets of outcomes whose ratio h/q is above a level."""
    order = np.argsort(-np.where(q > 0, h / np.where(q > 0, q, 1), 0.0), kind="stable")
    return tuple(whole(law[order].cumsum()) for law in (h, q))


def inside(h, q, cap):
    """Whether each event's h lies in the interval that its q and the cap leave: by kl₂."""
    return kl2(h, q) <= cap * (1 + NATS) + EXACT


def check_events(h, q, kl, meter):
    """Every event, and that level sets have the largest kl₂ among them; returns the largest."""
    chosen = events(len(h))
    rates = whole(chosen @ np.stack([h, q], 1))
    spent = kl2(rates[:, 0], rates[:, 1])
    assert spent.max() <= kl * (1 + NATS) + EXACT and kl <= meter * (1 + NATS) + EXACT
    for rate in some(np.unique(rates[:, 1].round(14)), 40):
        low, high = event_interval(float(rate), meter)
        here = rates[np.abs(rates[:, 1] - rate) < 1e-14, 0]
        assert low - NATS <= here.min() and here.max() <= high + NATS
    assert np.abs(rates[:, 0] - rates[:, 1]).max() <= most_variation(kl) + EXACT
    levels = kl2(*level_sets(h, q))
    assert levels.max() == pytest.approx(spent.max(), abs=1e-10)
    return float(spent.max())


LOSSY = ("band:price=1", "cactus:delta=0.3", "mixture:alpha=0.5", "lenience:lenience=0.5")
CASES = list(itertools.product(LOSSY, ("chain", "block"), ((2, 4), (4, 2))))


@pytest.mark.parametrize(("spec", "verifier", "size"), some(CASES, 5))
def test_every_event_of_a_markov_text_lies_within_the_bounds(spec, verifier, size):
    vocab, length = size
    for seed in range(amount(1, 2)):
        pair = markov_pair(vocab, seed=seed, distance=1.5, zeros=0.2 * (seed % 2))
        texts = enumerate_texts(pair, Setting(spec, min(2, length), length, verifier))
        most = check_events(
            texts.law[-1].numpy(), texts.target[-1].numpy(), texts.kl, texts.meter.mean
        )
        assert most > 0.01 * texts.kl > 0


@pytest.mark.parametrize(("vocab", "length"), [(3, 6), (4, 5)])
def test_level_sets_of_longer_texts_lie_within_the_bounds(vocab, length):
    for spec, verifier in some(itertools.product(LOSSY, ("chain", "block")), 3):
        pair = markov_pair(vocab, seed=1, distance=1.5)
        texts = enumerate_texts(pair, Setting(spec, 3, length, verifier, 0))
        h, q = (torch.cat(law).numpy() for law in (texts.law, texts.target))
        assert len(h) > 1000 and texts.meter.mean < math.inf
        levels = level_sets(h, q)
        assert inside(*levels, texts.kl).all()
        assert np.abs(np.subtract(*levels)).max() == pytest.approx(texts.total_variation, abs=NATS)
        assert texts.total_variation <= most_variation(texts.kl)


WAYS = list(itertools.product(("chain", "block"), (False, True)))


@pytest.mark.parametrize(("verifier", "deterministic"), WAYS)
def test_every_event_under_a_ledger_lies_within_the_bounds_of_its_cap(verifier, deterministic):
    pair, cap, length = markov_pair(2, seed=3, distance=2.0), 0.05, 4
    ledger = Ledger("band:price=0.3", cap)
    texts = texts_of(pair, ledger, length, 2, verifier, deterministic)
    law, most, rate, target = texts.law, texts.most, texts.rate, target_of(pair, length)
    assert law.sum() == pytest.approx(1, abs=EXACT) == target.sum()
    bounds = ct.EventBounds(per_token=cap, tokens=length, rate=0.5)
    assert 0.5 * bounds.nats < most <= bounds.nats and 0.95 * cap < rate <= cap
    h, q = law.reshape(-1), target.reshape(-1)
    kl = float(np.sum(h * np.log(h / q)))
    check_events(h, q, kl, bounds.nats)
    for first in range(1, length):  # an answer's beginning keeps its own, smaller share
        h, q = (x.reshape(2**first, -1).sum(-1) for x in (law, target))
        check_events(h, q, float(np.sum(h * np.log(h / q))), bounds.after(first).nats)


def test_by_position_the_first_tokens_are_the_targets_own():
    pair, length, strict = markov_pair(2, seed=3, distance=2.0), 4, 2
    schedule = ByPosition([(0, "speculative"), (strict, "band:price=0.3")])
    texts, target = texts_of(pair, schedule, length, 2), target_of(pair, length)
    law, most, mean = texts.law, texts.most, texts.mean
    bounds = ct.EventBounds(cap=most, rate=0.5, tokens=length, lossless=strict)
    early = bounds.after(strict)
    assert early.low == 0.5 == early.high and bounds.low < 0.5 < bounds.high
    for first in range(1, length + 1):
        h, q = (x.reshape(2**first, -1).sum(-1) for x in (law, target))
        assert (np.abs(h - q).max() < EXACT) == (first <= strict)
    h, q = law.reshape(-1), target.reshape(-1)
    check_events(h, q, float(np.sum(h * np.log(h / q))), mean)


def test_nats_of_a_token_are_not_those_of_an_answer():
    whole, each = ct.EventBounds(cap=0.1, tokens=200), ct.EventBounds(per_token=0.1, tokens=200)
    assert each.nats == 20 and whole.nats == 0.1
    assert "0.1 was taken as nats for a whole answer" in whole.unit and "--per-token" in whole.unit
    assert "taken as nats a token" in each.unit and "20 an answer of 200" in each.unit
    assert ct.EventBounds(per_token=0.1, burst=0.5, tokens=10).after(5).nats == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 2, 32, 1000])
@pytest.mark.parametrize(
    "mean", [0.0, 1e-300, *(10.0**-k for k in range(1, 16)), *(1 - 10.0**-k for k in range(1, 18))]
)
@pytest.mark.parametrize("cap", [1e-3, 0.5, 1e308])
def test_readings_anywhere_up_to_the_cap_have_a_bound(count, mean, cap):
    """A ledger that uses its cap up leaves readings beside it."""
    proof = ct.confidence_bound([mean * cap] * count, cap)
    assert proof.mean == pytest.approx(mean * cap, rel=1e-15)
    assert proof.mean <= proof.bound <= cap


@pytest.mark.parametrize(
    ("fixed", "per_token"), [(1e-4, 0.0), (0.3, 0.0), (0.0, 0.005), (0.3, 0.03)]
)
def test_no_law_within_the_nats_writes_longer_answers(fixed, per_token):
    """Theorem 23, corollary: the infimum over θ is the program over all laws of the lengths."""
    cp = pytest.importorskip("cvxpy")
    lengths, q = np.array([3, 5, 9, 20, 21, 40.0]), np.array([0.1, 0.2, 0.3, 0.1, 0.2, 0.1])
    h = cp.Variable(6, nonneg=True)
    limits = [cp.sum(h) == 1, cp.sum(cp.kl_div(h, q)) <= fixed + per_token * (lengths @ h)]
    best = cp.Problem(cp.Maximize(lengths @ h), limits).solve(solver=cp.CLARABEL)
    beyond = np.geomspace(1e-4, 10, 4000)
    moments = np.log(np.exp((per_token + beyond[:, None]) * lengths) @ q)
    assert ((fixed + moments) / beyond).min() == pytest.approx(best, rel=1e-5)
