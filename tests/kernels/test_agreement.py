"""Kernels emit what the float64 closed forms emit by the same random numbers."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels import Workspace, has_kernel, random_numbers, verify_logits
from cactus_theory.verify.draw import pick
from tests.amounts import THOROUGH, amount, some, thorough
from tests.kernels import checks
from tests.kernels.checks import DRAFTED, TARGET
from tests.kernels.closed_forms import closed_form, compare, last_coins, rows_of
from tests.kernels.hopper import KERNEL_ROWS

# one request of every kind of rows; a request takes a fifth of a second, interpreted
KINDS = len(checks.KINDS)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
OWN = ("speculative", "band:price=2,per_row=True")
PLAIN = (("band:price=2", "chain"), ("band:price=2,per_row=True", "block"))
# requests whose choice float32 may decide either way, of those whose coins are near a border;
# 4 of 40 at V = 2 in blocks, where one-hot rows leave residuals of rounding size, else none seen
MOST_EXCLUDED = 0.15
# E, which an edge zeroes, is a sum of float32 numbers, and the edge is settled to 1e-6
EDGE_ERROR = 3e-6


def just_below(gap):
    return (gap < -1e-4) & (gap > -0.03)


def just_above(gap):
    return (gap > 1e-4) & (gap < 0.03)


def test_decisions_and_tokens_agree(device):
    width, vocabularies = amount(2, 4), amount((9,), (2, 300))
    for vocab in vocabularies:
        assert_agreement(device, amount(KINDS, 5 * KINDS), vocab, 5, PLAIN, width)


@pytest.mark.parametrize("vocab", [2, 9])
def test_the_torch_path_agrees(vocab):
    assert_agreement("cpu", 5 * KINDS, vocab, 5)


def assert_agreement(*given):
    for row in checks.kernel_agreement(*given):
        assert not row["mismatches"] and row["rows"] >= KINDS, row
        assert row["excluded"] <= MOST_EXCLUDED * row["rows"], row


TILTED = (("speculative", "chain"), ("lenience:lenience=0.5", "chain"), ("band:price=2", "chain"),
          ("speculative", "block"), ("band:price=2,per_row=True", "block"))  # fmt: skip


@pytest.mark.parametrize(("spec", "verifier"), some(TILTED, 2))
def test_a_tilt_multiplies_the_target_s_logits_alone(device, spec, verifier):
    """1.5 is exact, so that both steps read the same rows; without a draft row, and greedy, too."""
    batch, width, vocab = amount(4, 40), 3, 40
    generator = torch.Generator(device=device).manual_seed(3)
    target, draft = (
        2 * torch.randn(batch, count, vocab, generator=generator, device=device)
        for count in (width + 1, width)
    )
    ids, numbers = draft.argmax(-1), torch.arange(batch, device=device)
    ids[0, 1:] = -1
    heat = torch.full((batch,), 0.7, device=device)
    heat[1] = 0.0
    given = {"seeds": numbers, "positions": numbers, "temperature": heat, "verifier": verifier}
    rule = ct.policy(spec)
    for rows in (draft, None):
        tilted = verify_logits(ct.policy(rule, tilt=0.5), target, rows, ids, **given)
        scaled = verify_logits(rule, 1.5 * target, rows, ids, **given)
        assert torch.equal(tilted.output_token_ids, scaled.output_token_ids)


def test_a_tilt_weighs_the_parts_of_a_bonus_row(device):
    """Wrong parts change one token in four; the first part has 2,048 of 2,300 tokens."""
    batch, generator = amount(10, 60), torch.Generator(device=device).manual_seed(4)
    target = 0.1 * torch.randn(batch, 1, 2300, generator=generator, device=device)
    target[..., :2048] -= 1.5
    numbers = torch.arange(batch, device=device)
    ids = torch.empty(batch, 0, dtype=torch.int64, device=device)
    given = {"seeds": numbers, "positions": numbers}
    tilted = verify_logits(ct.policy("speculative:tilt=0.5"), target, None, ids, **given)
    scaled = verify_logits(ct.policy("speculative"), 1.5 * target, None, ids, **given)
    assert torch.equal(tilted.output_token_ids, scaled.output_token_ids)


def test_the_scale_of_a_residual_takes_tokens_out(device):
    """Cactus leaves (0.7 q − p)₊, only token 1; lossless sampling would draw token 2, too."""
    q = torch.tensor([0.3, 0.3, 0.4], device=device)
    p = torch.tensor([0.6, 0.1, 0.3], device=device)
    seeds = torch.arange(600, device=device)
    zero = torch.zeros_like(seeds)
    coins = random_numbers.coins(seeds, zero, zero[:, None], random_numbers.ACCEPT)[:, 0]
    # (q − p)₊ is (0, .2, .1)
    at = ((coins > 0.9) & (last_coins(seeds, zero) > 0.7)).nonzero()[: amount(2, 15), 0]
    rows = [row.log().expand(len(at), width, 3) for row, width in ((q, 2), (p, 1))]
    verdict = verify_logits(
        ct.policy("cactus", delta=0.1), *rows, zero[at][:, None],
        seeds=seeds[at], positions=zero[at],
    )  # fmt: skip
    assert verdict.output_token_ids.tolist() == [[1, -1]] * amount(2, 15)


def test_where_nothing_is_left_the_whole_row_is_drawn_from(device):
    """A draft's row that is no distribution leaves no residual."""
    numbers = torch.arange(amount(4, 30), device=device)
    generator = torch.Generator(device=device).manual_seed(3)
    target = torch.randn(len(numbers), 2, 9, generator=generator, device=device)
    draft = torch.full((len(numbers), 1, 9), torch.nan, device=device)
    place = torch.zeros_like(numbers)
    verdict = verify_logits(
        ct.policy("speculative"), target, draft, place[:, None], seeds=numbers, positions=numbers
    )
    drawn = pick(target[:, 0].double().softmax(-1), last_coins(numbers, numbers))
    assert verdict.output_token_ids[:, 0].equal(drawn)


@pytest.mark.parametrize("spec", OWN if THOROUGH else OWN[:1])
def test_a_coin_inside_a_block_is_compared_with_its_own_value(spec, device):
    """Coins on either side of the first node's value, and a last one that does not pass."""
    rule = ct.policy(spec)
    target, draft = (torch.tensor(rows, device=device).log() for rows in (TARGET, DRAFTED))
    paths = torch.cartesian_prod(torch.arange(4), torch.arange(4)).to(device)
    seeds = torch.arange(16 * 200, device=device)
    zero = torch.zeros_like(seeds)
    every = paths.repeat(200, 1)
    rows = rows_of(target.expand(3200, -1, -1), draft.expand(3200, -1, -1), every)
    borders = closed_form(rule, "block", rows, seeds, zero).borders
    place = torch.arange(2, device=device).expand(3200, -1)
    above = random_numbers.coins(seeds, zero, place, random_numbers.ACCEPT) - borders
    inner = (borders[:, 0] > 0.1) & (borders[:, 0] < 0.9) & (above[:, 1] > 0.01)
    chosen = [
        (inner & near(above[:, 0])).nonzero()[: amount(3, 60), 0]
        for near in (just_below, just_above)
    ]
    at = torch.cat(chosen)
    verdict = verify_logits(
        rule, target.expand(len(at), -1, -1), draft.expand(len(at), -1, -1), every[at],
        seeds=seeds[at], positions=zero[at], verifier="block",
    )  # fmt: skip
    assert verdict.num_accepted.tolist() == [1] * len(chosen[0]) + [0] * len(chosen[1])


def test_a_node_passes_up_to_what_all_of_its_row_leaves(device):
    """P = 1/2 before a row without common tokens: (P q − p)₊ has the mass P, and P is the value."""
    q = torch.tensor([[0.4, 0.6, 0, 0], [0.5, 0.5, 0, 0], [1, 0, 0, 0]], device=device)
    p = torch.tensor([[0.8, 0.2, 0, 0], [0, 0, 0.5, 0.5]], device=device)
    seeds = torch.arange(300, device=device)
    zero = torch.zeros_like(seeds)
    coins = random_numbers.coins(seeds, zero, zero[:, None], random_numbers.ACCEPT)[:, 0]
    near = ((coins > 0.3) & (coins < 0.7) & ((coins - 0.5).abs() > 0.01)).nonzero()[:, 0]
    at = near[: amount(8, 60)]
    target, draft = (rows.log().expand(len(at), -1, -1) for rows in (q, p))
    ids = torch.tensor([[0, 2]], device=device).expand(len(at), -1).contiguous()
    verdict = verify_logits(
        ct.policy("speculative"), target, draft, ids,
        seeds=seeds[at], positions=zero[at], verifier="block",
    )  # fmt: skip
    assert torch.equal(verdict.num_accepted, (coins[at] < 0.5).long())
    assert 0 < int(verdict.num_accepted.sum()) < len(at)


@pytest.mark.parametrize("accepted", [True, False], ids=["bonus", "recovered"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
def test_a_row_of_several_parts_is_drawn_from(accepted, deterministic, device):
    """Parts have a largest logit each, so that their sums are in units of their own."""
    rule, vocab, batch = ct.policy("speculative"), 2300, amount(6, 40)
    generator = torch.Generator(device=device).manual_seed(11)
    target = 4 * torch.randn(batch, 2, vocab, generator=generator, device=device)
    draft = target[:, :1].clone() if accepted else target[:, :1].flip(-1).contiguous()
    ids = (target if accepted or deterministic else draft)[:, 0].argmax(-1, keepdim=True)
    if deterministic:  # q_n is 1, or 1/2 below the coin: the token may not be drawn again
        rest = target[:, 0].scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        target[:, 0].scatter_(-1, ids, rest + 60 if accepted else rest)
    numbers = torch.arange(50 * batch, device=device)
    coins = random_numbers.coins(numbers, numbers, 0 * numbers[:, None], random_numbers.ACCEPT)
    numbers = (coins[:, 0] > 0.6).nonzero()[:batch, 0]
    given = None if deterministic else draft
    verdict = verify_logits(rule, target, given, ids, seeds=numbers, positions=numbers)
    counted = compare(rule, "chain", rows_of(target, given, ids), numbers, numbers, verdict)
    assert verdict.num_accepted.tolist() == [int(accepted)] * batch
    assert not counted["mismatches"] and not counted["excluded"]


@thorough
@pytest.mark.parametrize("vocab", [7, 4096])
def test_every_kernel_agrees(vocab, device):
    assert_agreement(device, 2 * KINDS, vocab, 6)


@pytest.mark.parametrize(("price", "vocab"), [(0.5, 60), (2.0, 4), (3.0, 500)][: amount(2, 3)])
def test_bands_are_solved_to_float32(price, vocab, device):
    """Block verification solves every row from the first that may be refused.

    On small rows a Newton step often arrives at the root, E = 0 to the last bit.
    """
    rule = ct.policy("band", price=price, per_row=True)
    batch, width = amount(1, 2 * KINDS), amount(3, 4)
    generator = torch.Generator(device=device).manual_seed(9)
    target, draft = checks.logits(batch, width, vocab, generator)
    ids = checks.drawn(draft, generator)
    work = Workspace(batch, width, target.shape[-1], device)
    numbers = {"seeds": torch.arange(batch, device=device)}
    numbers["positions"] = numbers["seeds"]
    verify_logits(rule, target, draft, ids, verifier="block", workspace=work, **numbers)
    rows = rows_of(target, draft, ids)
    solved, edge = work.bands[0].flags != 0, work.bands[0].points[..., None]
    q, p = rows.q[:, :width], rows.p
    lifted = (edge * math.exp(-1 / price) * q - p).clamp(min=0).sum(-1)
    excess = torch.where(solved, lifted - (p - edge * q).clamp(min=0).sum(-1), 0.0)
    assert bool(solved.any()) and float(excess.abs().max()) <= EDGE_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "rows"), KERNEL_ROWS.items())
def test_ten_thousand_rows_agree(vocab, rows):
    assert_agreement("cuda", rows, vocab, 7)


@pytest.mark.parametrize("spec", ["cactus:delta=0.5", "band:price=1,per_row=True"])
@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_deterministic_drafts_agree(spec, verifier, device):
    rule = ct.policy(spec)
    if not has_kernel(rule, verifier):
        pytest.skip(f"{spec} has no kernel in a {verifier}")
    generator = torch.Generator(device=device).manual_seed(3)
    batch = amount(3, 40)
    target, draft = checks.logits(batch, 2, 9, generator)
    ids = checks.drawn(draft, generator)
    seeds = torch.arange(batch, device=device)
    verdict = verify_logits(
        rule, target, None, ids, seeds=seeds, positions=seeds, verifier=verifier
    )
    counted = compare(rule, verifier, rows_of(target, None, ids), seeds, seeds, verdict)
    assert not counted["mismatches"], counted
