"""Random Markov pairs and their dials; texts of one token."""

import pytest
import torch

import cactus_theory as ct
from tests.markov.pair import Setting, markov_pair
from tests.markov.texts import enumerate_texts


def test_states_are_the_last_tokens():
    pair = markov_pair(3, order=2, seed=1)
    last_two = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    for state, (_, token) in enumerate(last_two):
        for following in range(3):
            assert last_two[int(pair.following[state, following])] == (token, following)
    texts = pair.prefixes(3)
    assert [len(states) for states in texts] == [1, 3, 9, 27]
    assert last_two[int(texts[3][0 * 9 + 2 * 3 + 1])] == (2, 1)  # after 0, 2, 1


def test_dials_do_what_they_say():
    same = markov_pair(4, distance=0.0)
    assert torch.equal(same.target, same.draft)
    flat = markov_pair(4, sharpness=0.0, distance=2.0)
    assert bool((flat.target == 0.25).all()) and not bool((flat.draft == 0.25).any())
    holes = markov_pair(6, order=2, zeros=0.4)
    for rows in (holes.target, holes.draft):
        assert 0.2 < float((rows == 0).double().mean()) < 0.45
        assert float((rows.sum(-1) - 1).abs().max()) < 1e-12
    assert not torch.equal(holes.target == 0, holes.draft == 0)
    assert bool((markov_pair(6, zeros=1.0).target.amax(-1) == 1).all())
    assert not torch.equal(markov_pair(3, seed=1).target, markov_pair(3, seed=2).target)


def test_one_token_is_the_target_row():
    pair = markov_pair(3)
    exact = enumerate_texts(pair, Setting(ct.policy("cactus:delta=1.0"), 4, 1))
    assert torch.equal(exact.law[1], pair.target[0])
    assert (exact.calls.mean, exact.meter.mean, exact.tokens) == (1.0, 0.0, 1.0)


def test_texts_that_do_not_sum_to_1_are_an_error():
    pair = markov_pair(3)
    lossy = pair.target.clone()
    lossy[0] *= 0.5
    object.__setattr__(pair, "target", lossy)
    with pytest.raises(RuntimeError, match="probabilities must sum to 1; got 0.5"):
        enumerate_texts(pair, Setting("speculative", 1, 1))
