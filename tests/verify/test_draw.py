import pytest
import torch

from cactus_theory.verify.draw import BLOCK, _pick_blocked, pick, pick_one, toss
from tests.verify.blocks import LAST_COIN


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_rows_need_not_be_normalised():
    row = tensor(0.0, 2.0, 0.0, 6.0, 0.0)
    draws = tensor(0.0, 0.2499, 0.25, 0.9, LAST_COIN)
    assert pick(row.expand(5, 5), draws).tolist() == [1, 1, 3, 3, 3]


def test_a_product_that_rounds_up_to_the_total_stays_on_a_possible_token():
    least = 2.0**-1074  # least · LAST_COIN rounds back to least
    rows = torch.stack([tensor(least, 0.0, 0.0), tensor(0.0, least, 0.0)])
    assert pick(rows, tensor(LAST_COIN, LAST_COIN)).tolist() == [0, 1]


def test_coins_are_uniform_float64_in_the_half_open_interval():
    lengths = torch.full((500,), 4)
    for generator in (torch.Generator().manual_seed(0), None):
        accept, draw = toss(lengths, 4, generator)
        assert accept.shape == (500, 4) and draw.shape == (500,)
        assert accept.dtype == draw.dtype == torch.float64
        assert ((accept >= 0) & (accept < 1)).all()
        assert abs(accept.mean() - 0.5) < 0.06  # nine standard errors of 2,000 coins


@pytest.mark.parametrize("width", [50, 9001])
def test_one_row_and_rows_on_a_device_get_what_rows_of_a_batch_get(width):
    source = torch.Generator().manual_seed(1)
    least = 2.0**-1074
    rows = torch.rand(300, width, generator=source, dtype=torch.float64)
    rows *= torch.rand(rows.shape, generator=source) < 0.1  # most tokens are impossible
    rows[:4], rows[0, 3], rows[1, 49], rows[2, 0] = 0, least, least, 5.0
    rows[4:12, 40:], rows[12:20, : width - 10], rows[4:20, 12] = 0, 0, 0.3
    draw = torch.rand(300, generator=source, dtype=torch.float64)
    draw[:3], draw[4::5], draw[5::5] = LAST_COIN, 0.0, LAST_COIN
    for precision in (torch.float64, torch.float32):
        own = rows.to(precision)
        tokens = pick(own, draw)
        empty = own.sum(-1) == 0
        assert torch.equal(tokens < 0, empty) and empty[3]
        assert (own.gather(-1, tokens.clamp(min=0)[:, None])[:, 0] > 0)[~empty].all()
        assert tokens.tolist() == [pick_one(own[i], draw[i].item()) for i in range(300)]
        assert tokens.tolist() == _pick_blocked(own, draw).tolist()


@pytest.mark.parametrize("width", [3, 9001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_without_a_law_gives_no_token(width, dtype):
    rows = torch.zeros(5, width, dtype=dtype)
    rows[1:, 1], rows[2, 2], rows[3, 2] = 1.0, torch.nan, torch.inf
    for coin in (0.0, 0.5, LAST_COIN):
        draw = torch.full((5,), coin, dtype=torch.float64)
        assert pick(rows, draw).tolist() == [-1, 1, -1, -1, 1]
        assert [pick_one(row, coin) for row in rows] == [-1, 1, -1, -1, 1]
        assert _pick_blocked(rows, draw).tolist() == [-1, 1, -1, -1, 1]


def test_what_rounding_leaves_below_zero_draws_no_token_without_mass():
    """The sum before the second block rounds to more than the threshold, which lies in it."""
    first, second = 0.7837985890347726, 0.30331272607892745
    total = first + second
    draw = first / total
    assert draw * total == first and total - second > first
    row = torch.zeros(1, 16 * BLOCK, dtype=torch.float64)
    row[0, 5], row[0, BLOCK + 7] = first, second
    assert pick_one(row[0], draw) == BLOCK + 7
    draws = torch.tensor([draw] * 2).double()
    assert _pick_blocked(row.expand(2, -1), draws).tolist() == [BLOCK + 7] * 2
