"""Random Markov pairs and their dials, and what is refused."""

import math

import pytest
import torch

import cactus_theory as ct
from simulations.markov import Setting, enumerate_texts, markov_pair
from simulations.markov.pair import TinyPair


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


ROW, STAY = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64)


def texts(**changes):
    given = {"policy": "speculative", "num_draft_tokens": 2, "length": 4} | changes
    return enumerate_texts(markov_pair(3), Setting(**given))


# fmt: off
WRONG = [
    (lambda: markov_pair(1), "vocab: must be at least 2; got 1"),
    (lambda: markov_pair(3, order=0), "order: must be at least 1, .* got 0"),
    (lambda: markov_pair(3, order=30), "order: .*≤ 2\\^21; got 30"),
    (lambda: markov_pair(3, sharpness=-1.0), "sharpness: must be at least 0 and finite; got -1.0"),
    (lambda: markov_pair(3, distance=math.nan), "distance: must be at least 0 and finite; got nan"),
    (lambda: markov_pair(3, zeros=1.5), "zeros: must be at most 1; got 1.5"),
    (lambda: TinyPair(ROW, ROW / 2, STAY), "draft: every row must sum to 1"),
    (lambda: TinyPair(ROW, ROW, STAY + 1), "following: must be states from 0 to 0; got 1 to 1"),
    (lambda: TinyPair(ROW, ROW.expand(2, 2), STAY), r"draft: must have the target's shape \(1, 2"),
    (lambda: TinyPair(ROW, ROW, STAY, start=-1), "start: must be states from 0 to 0; got -1 to -1"),
    (lambda: texts(num_draft_tokens=0), "num_draft_tokens: must be at least 1; got 0"),
    (lambda: texts(length=0), "length: must be at least 1; got 0"),
    (lambda: texts(policy="nonsense"), "nonsense"),
    (lambda: texts(verifier="nonsense"), "verifier: must be one of"),
    (lambda: texts(policy="typical", verifier="block"), "verifier: block needs .* typical"),
    (lambda: texts(end=3), "end: must be a token below 3; got 3"),
    (lambda: texts(length=14), "length: at most 2\\^21 texts can be enumerated; got 3\\^14"),
]
# fmt: on


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_bad_dials_pairs_and_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
