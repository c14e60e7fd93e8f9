"""One verification step: its exact law, its coins, its batches."""

import contextlib
import math

import pytest
import torch

import cactus_theory as ct
from tests.rows import rows
from tests.verify.blocks import LAST_COIN


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def step(width, vocab, *, seed=0, kinds=("smooth", "smooth"), batch=None):
    """Return q (…, K + 1, V) and p (…, K, V)."""
    lead = () if batch is None else (batch,)
    q = rows(*lead, width + 1, vocab, seed=2 * seed, kind=kinds[0])
    return q, rows(*lead, width, vocab, seed=2 * seed + 1, kind=kinds[1])


@pytest.mark.parametrize("spec", ["speculative", "lenience:lenience=0.9999999999"])
def test_extreme_coins_with_nothing_left_draw_from_the_target(spec):
    """A row that misses 1 refuses a token by rounding, and has nothing over the draft."""
    q, p = tensor([0.5, 0.5 - 2.0**-30], [0.5, 0.5]), tensor([0.5, 0.5])
    for draw, token in ((0.25, 0), (0.75, 1)):
        coins = tensor([LAST_COIN]), tensor(draw)
        verdict = ct.verify_chain(
            ct.policy(spec), q[None], p[None], torch.tensor([[1]]), coins=coins, validate=False
        )
        assert verdict.num_accepted.item() == 0
        assert verdict.output_token_ids.tolist() == [[token, -1]]


@pytest.mark.parametrize("spec", ["band:price=1e6", "band:delta=1e-12", "band:price=inf"])
@pytest.mark.parametrize(("coin", "accepted"), [(0.49998, 1), (0.50002, 0)])
def test_the_sums_of_rows_decide_close_calls(spec, coin, accepted):
    """φ = 0.5 by rows over their sums; the entries alone, 0.25001 and 0.49998, say 0.50004."""
    q, p = torch.tensor([0.25, 0.75]) * 1.00004, torch.tensor([0.5, 0.5]) * 0.99996
    assert (q.dtype, float(q[0] / p[0]) > 0.50003) == (torch.float32, True)
    rows = torch.stack([q, q])[None], p[None, None], torch.tensor([[0]])
    coins = torch.tensor([[coin]]), torch.tensor([0.5])
    verdict = ct.verify_chain(ct.policy(spec), *rows, coins=coins, validate=False)
    assert verdict.num_accepted.item() == accepted


def test_one_generator_per_row_makes_a_row_behave_as_if_alone():
    q, p = step(3, 5, seed=4, batch=6)
    ids = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(0))
    lengths = [3, 0, 2, 1, 3, 2]
    for row, length in enumerate(lengths):
        ids[row, length:] = -1
    rule = ct.policy("cactus:delta=0.2")
    many = [torch.Generator().manual_seed(100 + row) for row in range(6)]
    together = [ct.verify_chain(rule, q, p, ids, generator=many) for _ in range(5)]
    for row, k in enumerate(lengths):
        own = torch.Generator().manual_seed(100 + row)
        one = slice(row, row + 1)
        for verdict in together:  # several steps: the streams must stay in line
            alone = ct.verify_chain(
                rule, q[one, : k + 1], p[one, :k], ids[one, :k], generator=[own]
            )
            assert torch.equal(verdict.output_token_ids[row, : k + 1], alone.output_token_ids[0])
        # a coin a drafted token and one draw, each step: no number is passed over
        counted = torch.Generator().manual_seed(100 + row)
        torch.rand(5 * (k + 1), generator=counted, dtype=torch.float64)
        assert torch.equal(own.get_state(), counted.get_state())


def test_a_rule_for_every_row():
    specs = ("speculative", "cactus:delta=1", "band:price=0.5", "typical:recover=target")
    mixed, (q, p) = [ct.policy(spec) for spec in specs], step(3, 5, seed=4, batch=4)
    ids = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(0))
    coins = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)).double()
    options = {"coins": (coins[:, :3], coins[:, 3])}
    together = ct.verify_chain(mixed, q, p, ids, **options).rows()
    assert together == [
        ct.verify_chain(rule, q, p, ids, **options).rows()[row] for row, rule in enumerate(mixed)
    ]


@pytest.mark.parametrize("vocab", [2, 40_000])
@pytest.mark.parametrize("spec", ["speculative", "band:price=1", "band:delta=0.1"])
@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
def test_a_target_row_without_mass_is_refused_by_name(verify, spec, vocab):
    p, coins = torch.full((1, 1, vocab), 1 / vocab), (tensor([0.5]), tensor(0.5))
    for entry, draft in ((0.0, p), (0.0, None), (-0.5, None)):
        q, ids = torch.full((1, 2, vocab), entry), torch.tensor([[0]])
        with pytest.raises(ValueError, match="no mass in row 0 of the batch, after 0 accepted"):
            verify(ct.policy(spec), q, draft, ids, coins=coins, validate=False)


@pytest.mark.parametrize(
    "spec", ["price=0.8,divergence=reverse_kl", "delta=0.1", "price=1,head=0.3"]
)
@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
def test_a_target_row_with_infinity_ends_in_no_raw_error(verify, spec):
    q = torch.tensor([[[math.inf, 0.3, 0.2], [0.2, 0.3, 0.5]]])
    p, ids = torch.tensor([[[0.2, 0.3, 0.5]]]), torch.tensor([[2]])
    with contextlib.suppress(ValueError):
        coins = tensor([0.99]), tensor(0.5)
        verify(ct.policy(f"band:{spec}"), q, p, ids, coins=coins, validate=False)
