"""Whole texts, enumerated: what lossless, lossy and cut-off decodes must satisfy exactly."""

import itertools
import math

import pytest
import torch

from tests.amounts import amount, some
from tests.markov.pair import Setting, TinyPair, markov_pair
from tests.markov.places import follow_places
from tests.markov.rounds import every_round
from tests.markov.texts import enumerate_texts

# of probabilities and nats that are the same number added up in another order
EXACT = 1e-12
# the least slack, KL or difference that counts as one: nine orders above EXACT
CLEAR = 1e-3
VERIFIERS = ("chain", "block")
# policies with a row of their own, which both verifiers follow
LOSSY = (
    "band:price=1",
    "cactus:delta=0.3",
    "mixture:alpha=0.5",
    "band:delta=0.2",
    "lenience:lenience=0.5",
)
EVERY = [(spec, verifier) for verifier in VERIFIERS for spec in LOSSY] + [
    ("band:price=1,per_row=True", "block"),
    ("typical", "chain"),
]
SOME = some(EVERY, 5)
SEEDS = amount(2, 8)
LENGTH = 5


def pairs(vocab=3, **dials):
    return [
        markov_pair(vocab, order=1 + seed % 2, seed=seed, distance=1.5, **dials)
        for seed in range(SEEDS)
    ]


def widest(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def texts_of(pair, spec, width, verifier="chain", length=LENGTH, end=None):
    return enumerate_texts(pair, Setting(spec, width, length, verifier, end))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("end", [None, 1])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_lossless_texts_have_the_target_law(verifier, end, zeros):
    for pair, width in itertools.product(pairs(zeros=zeros), range(1, LENGTH + 1)):
        exact = texts_of(pair, "speculative", width, verifier, end=end)
        assert widest(exact.law, exact.target) < EXACT
        assert max(exact.kl, exact.meter.mean, exact.total_variation) < EXACT


BY_PLACE = ("speculative", "band:price=0.5", "cactus:delta=0.3")


@pytest.mark.parametrize(
    ("spec", "verifier"), [*SOME, *((BY_PLACE, verifier) for verifier in VERIFIERS)]
)
def test_what_the_meter_is_over_is_what_a_token_tells_about_the_loop(spec, verifier):
    """The identity: metered − KL = Σ_t I(S_t; X_t | text so far), token by token.

    Both sums come from how far verifiers get, the law of texts from where they stop.
    """
    most = 0.0
    for pair, width, end in itertools.product(pairs(), (1, 3), (None, 2)):
        setting = Setting(spec, width, LENGTH, verifier, end)
        exact, places = enumerate_texts(pair, setting), follow_places(pair, setting)
        assert abs(sum(places.kl) - exact.kl) < EXACT
        assert exact.kl > CLEAR or (spec, width) == (BY_PLACE, 1)  # its first place is lossless
        assert abs(sum(places.metered) - exact.meter.mean) < EXACT
        for kl, metered, told in zip(places.kl, places.metered, places.information, strict=True):
            assert abs(metered - kl - told) < EXACT
        assert places.kl[-1] == pytest.approx(0, abs=EXACT)  # nothing is drafted for the last
        most = max(most, sum(places.information))
    assert most > CLEAR / 10


def test_without_a_bonus_the_meter_is_over_where_policies_depend_on_the_place():
    """V = 2, T = 4, K = 3: a bonus would be token 4, which nothing is drafted for either."""
    pair = markov_pair(2, order=2, seed=1, distance=1.5)
    own = ("speculative", "band:price=0.5", "band:price=0.5")
    exact = enumerate_texts(pair, Setting(own, 3, 4))
    assert exact.slack > CLEAR
    same = enumerate_texts(pair, Setting("band:price=0.5", 3, 4))
    assert abs(same.slack) < EXACT and same.kl > CLEAR


@pytest.mark.parametrize(("spec", "verifier"), SOME)
def test_the_bound_is_strict_once_a_text_can_go_on_after_a_bonus(spec, verifier):
    pair = markov_pair(3, seed=2, distance=1.5)
    for width in (1, 2, 3):
        assert texts_of(pair, spec, width, verifier).slack > CLEAR
    for width in (LENGTH - 1, LENGTH + 3):  # the bonus is the last token
        whole = texts_of(pair, spec, width, verifier)
        assert abs(whole.slack) < EXACT and whole.kl > CLEAR


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_bound_is_met_where_every_draft_is_accepted(verifier):
    """Every text has its bonus tokens at the same places: no mixture anywhere."""
    for width in (1, 2, 3):
        whole = texts_of(markov_pair(3, distance=1.5), "mixture:alpha=1.0", width, verifier)
        assert abs(whole.slack) < EXACT and whole.kl > CLEAR
        calls = math.ceil(LENGTH / (width + 1))
        assert whole.calls.mean == pytest.approx(calls, abs=EXACT)
        assert whole.calls.deviation < math.sqrt(EXACT)


def never_a_bonus():
    """Return a pair that refuses every second drafted token.

    The target writes a high token (3–5) and a low one in turn; the draft always a high one.
    """
    source = torch.Generator().manual_seed(4)
    three = torch.randn(2, 6, 3, generator=source, dtype=torch.float64).softmax(-1)
    none = torch.zeros(3, 3, dtype=torch.float64)
    after_low, after_high = (
        torch.cat([none, three[0, :3]], 1),
        torch.cat([three[0, 3:], none], 1),
    )
    draft = torch.cat([torch.zeros(6, 3, dtype=torch.float64), three[1]], 1)
    return TinyPair(torch.cat([after_low, after_high]), draft, torch.arange(6).expand(6, 6))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("spec", ["band:price=1", "cactus:delta=0.3"])
def test_the_bound_is_met_where_no_bonus_is_drawn(spec, verifier):
    pair, setting = never_a_bonus(), Setting(spec, 2, LENGTH, verifier)
    for rounds, _ in every_round(pair, setting)[:-2]:
        assert rounds.width == 2 and float(rounds.alive[2].max()) == 0
    exact = enumerate_texts(pair, setting)
    assert abs(exact.slack) < EXACT and exact.kl > CLEAR and exact.calls.deviation > CLEAR
