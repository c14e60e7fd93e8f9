"""Rates of long texts, against texts that get longer."""

import pytest

from simulations.markov import Setting, enumerate_texts, markov_pair
from tests.simulations.markov.rates import long_run_rates

# what is left of the ends of texts of 14 tokens: 4e-3 of the meter, 6e-4 of the calls
ENDS = 8e-3


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_long_texts_tend_to_them(verifier):
    """Six more tokens, twice what most rounds emit: the ends of the texts cancel."""
    pair = markov_pair(2, seed=1, distance=2.0)
    found = long_run_rates(pair, Setting("band:price=0.7", 2, 2, verifier))
    texts = [
        enumerate_texts(pair, Setting("band:price=0.7", 2, length, verifier)) for length in (8, 14)
    ]
    calls = texts[1].calls.mean - texts[0].calls.mean
    spent = texts[1].meter.mean - texts[0].meter.mean
    assert 6 / calls == pytest.approx(found.tokens_per_call, rel=ENDS)
    assert spent / 6 == pytest.approx(found.metered, rel=ENDS)
