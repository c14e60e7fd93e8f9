"""The bias on drafted logits emits the law of the policy, in the engine's own precision too."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.vllm.bias import drafted_bias, is_lossless, lifts_of
from tests.amounts import some

# both laws are sums of at most V float64 terms
EXACT = 1e-12
NOTHING = -torch.inf
SPECS = (
    "band:price=2",
    "band:price=0.3",
    "band:price=0",
    "band:price=1,divergence=reverse_kl",
    "band:price=0.5,divergence=squared_hellinger",
    "band:price=1,divergence=pearson_chi2",
    "band:price=1,divergence=jensen_shannon",
    "band:price=1,divergence=alpha:a=0.5",
    "band:delta=0.3",
    "band:delta=0",
    "band:delta=0.2,divergence=total_variation",
    "band:delta=0.2,divergence=max_divergence",
    "band:delta=0.2,divergence=renyi:a=2",
    "cactus:delta=0.5",
    "cactus:delta=inf",
    "cactus_exact:delta=0.4",
    "lenience:lenience=0.3",
    "mixture:alpha=0.3",
    "speculative",
)


def rows(count, vocab, dtype=torch.float64):
    """Return logits, a third of them with an excluded token, and drafted tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(count, vocab, dtype=torch.float64, generator=generator)
    logits[::3, 1] = NOTHING
    logits[5, 2] = 40.0
    drafted = torch.randint(0, vocab, (count,), generator=generator)
    drafted[5] = 2
    return logits.to(dtype), drafted


def biased(rule, logits, drafted, heat, width=1, **given):
    heat = torch.as_tensor(heat, dtype=torch.float64).expand(len(logits))
    bias = drafted_bias(lifts_of([rule], whole=True), logits, drafted, heat, width=width, **given)
    assert bias.dtype == torch.float64
    return logits.scatter_add(1, drafted.clamp(min=0)[:, None], bias.to(logits.dtype)[:, None])


@pytest.mark.parametrize("heat", [1.0, 0.7])
@pytest.mark.parametrize("spec", some(SPECS, 14))
def test_the_biased_row_is_the_emitted_law(spec, heat):
    rule = ct.policy(spec)
    logits, drafted = rows(60, 7)
    law = (biased(rule, logits, drafted, heat) / heat).softmax(-1)
    expected = ct.emitted_law(rule, (logits / heat).softmax(-1), None, draft_token_ids=drafted)
    excluded = logits.gather(1, drafted[:, None])[:, 0] == NOTHING
    if rule.name != "mixture":
        torch.testing.assert_close(law, expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(law[~excluded], expected[~excluded], rtol=0, atol=EXACT)
    assert excluded.any() and (law[excluded].gather(1, drafted[excluded][:, None]) == 0).all()


def test_greedy_rows_are_left_alone():
    logits, drafted = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2])
    assert torch.equal(biased(ct.policy("band:price=0.1"), logits, drafted, torch.zeros(1)), logits)


@pytest.mark.parametrize("bad", [NOTHING, torch.nan, torch.inf])
@pytest.mark.parametrize("spec", ["band:price=0", "cactus:delta=1", "band:price=0.1"])
def test_rows_without_a_distribution_stay_as_they_are(spec, bad):
    logits = torch.full((2, 3), bad)
    logits[1, 0] = 0.0  # the drafted token is the only one
    logits[1, 1:] = NOTHING
    moved = biased(ct.policy(spec), logits, torch.tensor([0, 0]), 1.0, width=2)
    torch.testing.assert_close(moved[:1], logits[:1], equal_nan=True)
    assert moved[1].softmax(-1).tolist() == [1.0, 0.0, 0.0]


def test_a_row_with_a_nan_does_not_reach_the_rows_before_it():
    logits = torch.zeros(3, 4)
    logits[1, 3] = torch.nan
    drafted, rule = torch.tensor([0, 0, -1]), ct.policy("band:price=1")
    moved = biased(rule, logits, drafted, 1.0, width=2)
    ends = biased(rule, torch.zeros(2, 4), torch.tensor([0, -1]), 1.0, width=2)
    assert torch.equal(moved[0], ends[0]) and moved[1].isnan().tolist() == [False] * 3 + [True]


def test_which_policies_are_a_bias():
    for spec in ("typical", "top_k:k=2", "fuzzy:threshold=0.1", "band:price=1,head=0.2"):
        with pytest.raises(
            ValueError, match="policy: must judge a deterministic draft by the drafted"
        ):
            lifts_of([ct.policy(spec)])
    for spec in ("speculative", "band:price=inf"):
        assert is_lossless(ct.policy(spec))
    assert not is_lossless(ct.policy("band:price=9"))
