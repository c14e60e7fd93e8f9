"""The device loop gives the tokens, counts and meter of the usual one, coin for coin."""

import copy

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.decoding.device import host_side
from cactus_theory.decoding.device import round as device_round
from tests.amounts import some

# the meter's rows come from attention over a padded cache: float32 sums in another order
METERED = 1e-5
POLICIES = [
    ("speculative", "chain"),
    ("cactus:delta=0.1", "chain"),
    ("band:price=1", "chain"),
    ("typical", "chain"),
    ("top_k:k=3", "chain"),
    ("cactus_exact:delta=0.2", "chain"),
    ("speculative", "block"),
    ("band:delta=0.1", "block"),
    ("band:price=1", "block"),
]
LENGTHS = (9, 5, 1)
ENDS = [3, 7]


def prompts(vocab=24, lengths=LENGTHS, seed=0):
    """Return prompts of different lengths against the right edge, one of a single token."""
    longest = max(lengths)
    ids = torch.randint(1, vocab, (len(lengths), longest), generator=_source(seed))
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def _source(seed):
    return torch.Generator().manual_seed(seed)


def both(target, draft, given, **options):
    common = {"num_draft_tokens": 3, "max_new_tokens": 21, "eos_token_ids": ENDS}
    options = common | {name: part.to(target.device) for name, part in given.items()} | options
    return [generate(target, draft, **options, device_loop=on) for on in (False, "torch")]


def assert_same(usual, found):
    assert found.loop == "device" and usual.loop == "host"
    assert found.output_token_ids.equal(usual.output_token_ids)
    for name in ("row_lengths", "row_ended", "row_rounds", "target_calls"):
        assert getattr(found, name) == getattr(usual, name), name
    if usual.reading.emitted_divergence is not None:
        assert found.reading.rows == usual.reading.rows
        for name in ("emitted_divergence", "largest_row_divergence", "expected_accepted"):
            expected = getattr(usual.reading, name)
            assert getattr(found.reading, name) == pytest.approx(expected, rel=METERED), name
    if usual.log_probs is not None:
        for name in ("target", "emitted"):
            mine, theirs = (getattr(own.log_probs, name) for own in (found, usual))
            assert torch.allclose(mine, theirs, atol=METERED, equal_nan=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def moved(request, tiny):
    """The small float64 pair on a device: rounding does not reach a coin."""
    return [copy.deepcopy(model).to(request.param) for model in tiny]


@pytest.mark.filterwarnings("ignore:policy. .* relaxes nothing at temperature 0")
@pytest.mark.parametrize(
    ("policy", "verifier", "temperature"),
    some([(*own, temperature) for temperature in (1.0, 0.0, 0.7) for own in POLICIES], 8),
)
def test_it_is_the_usual_loop(moved, monkeypatch, policy, verifier, temperature):
    """Rows of different lengths, accepted lengths and ends, one end of text inside a draft."""
    monkeypatch.setattr(host_side, "BUCKET", 16)
    graphs, capturing = [], device_round.Repeated._capture
    monkeypatch.setattr(
        device_round.Repeated,
        "_capture",
        lambda own, end: graphs.append(end) or capturing(own, end),
    )
    options = {"policy": policy, "verifier": verifier, "temperature": temperature, "seed": 1}
    usual, found = both(*moved, prompts(), **options, log_probs=True)
    assert_same(usual, found)
    assert len({count for _, count, _ in usual.reading.rounds}) > 2
    if moved[0].device.type == "cuda":  # one a bucket, and nothing is captured twice
        assert len(graphs) >= 2 and len(set(graphs)) == len(graphs)


def test_the_cases_above_end_inside_a_draft_and_at_different_lengths(tiny):
    usual, _ = both(*tiny, prompts(), policy="cactus:delta=0.1", seed=1)
    rounds = usual.reading.rounds
    assert any(inside for _, _, inside in rounds)
    assert len(set(usual.row_lengths)) > 1
    assert {drafted for drafted, _, _ in rounds} >= {1, 3} or len(rounds) > 4


@pytest.mark.parametrize("seed", some(range(6), 1))
def test_the_shipped_pair_over_several_buckets(shipped, monkeypatch, seed):
    monkeypatch.setattr(host_side, "BUCKET", 16)
    given = prompts(2048, (14, 30), seed)
    options = {"policy": "cactus:delta=0.05", "eos_token_ids": 0, "seed": seed}
    usual, found = both(shipped.target, shipped.draft, given, max_new_tokens=26, **options)
    assert_same(usual, found)
    assert usual.reading.emitted_divergence > 0


def test_policies_and_seeds_per_row(tiny):
    policy = ["speculative", ct.policy("band:price=0.5"), "typical"]
    found = []
    for on in (False, True):
        given = prompts() | {"seed": [7, 8, 9]}
        options = {"policy": policy, "max_new_tokens": 21, "eos_token_ids": ENDS}
        found.append(generate(*tiny, **given, **options, device_loop=on))
    assert_same(*found)


def test_plain_decoding(moved):
    for temperature in (0.0, 1.0):
        usual, found = both(moved[0], None, prompts(), temperature=temperature)
        assert_same(usual, found)
        assert found.draft_calls == 0
