"""The random numbers: Philox as published, one stream a purpose, the laws they lead to."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels import random_numbers
from tests.amounts import amount, some
from tests.kernels import checks as laws
from tests.kernels.closed_forms import emitted, rows_of

# Random123's known answers for philox4x32-10: counters, key, numbers
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
# the other token's noise is on the grid, too: half a step of 2^-32 at each of the token's bits
HALF_STEP, LATEST = 2.0**-33, 50
# a float32 logarithm of a number near 1, relative
NOISE_ERROR = 5e-6


@pytest.mark.parametrize(("counters", "key", "numbers"), KNOWN)
def test_philox_gives_the_published_numbers(counters, key, numbers):
    whole = int(np.uint64(key[0] + (key[1] << 32)).astype(np.int64))
    parts = tuple(torch.tensor([counter]) for counter in counters)
    outputs = random_numbers.philox(torch.tensor([whole]), parts)
    assert tuple(int(part) for part in outputs) == numbers


def test_noise_is_exponential_and_never_0_or_infinite():
    count = 4000
    seeds = torch.arange(count)
    noise = random_numbers.noise(seeds, seeds, seeds, random_numbers.BONUS, 40)
    assert bool(((noise > 0) & (noise < 23)).all())
    # the mean of 160,000 draws is within 5 of its standard deviations
    assert abs(float(noise.mean()) - 1) < 5 / (count * 40) ** 0.5


def test_noise_in_kernels_is_exact_to_float32(device):
    from tests.kernels.probes import show_noise

    ends = [0, 1, 2**28 - 1, 2**28, 2**28 + 1, 2**31, 2**32 - 2, 2**32 - 1]
    more = torch.randint(2**32, (248,), generator=torch.Generator().manual_seed(1))
    bits = torch.cat([torch.tensor(ends), more]).to(device)
    noise = torch.zeros(256, device=device)
    show_noise[(1,)](bits, noise, COUNT=256, enable_fp_fusion=True)
    exact = -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)
    assert float((noise.double() / exact - 1).abs().max()) < NOISE_ERROR


def test_coins_keep_to_their_stream_place_and_position():
    seeds, places = torch.tensor([3]), torch.arange(2)[None]
    first = random_numbers.coins(seeds, seeds, places, random_numbers.ACCEPT)
    again = random_numbers.coins(seeds, seeds + 2**32, places, random_numbers.ACCEPT)
    assert torch.equal(first, again)  # only the low 32 bits of a position count
    for other in (
        random_numbers.coins(seeds, seeds + 1, places, random_numbers.ACCEPT),
        random_numbers.coins(seeds, seeds, places + 2, random_numbers.ACCEPT),
        random_numbers.coins(seeds, seeds, places, random_numbers.DRAW),
        random_numbers.coins(seeds + 1, seeds, places, random_numbers.ACCEPT),
    ):
        assert not bool((first == other).any())


def first_by_the_grid(q):
    """Return the exact probability that a token of probability q wins a race against 1 − q.

    Both have noise −ln(1 − u), u = (bits + 1/2) 2^-32: a sum over the bits of the token, and for
    each the share of the other's bits that arrive later, of which none is left after LATEST times
    the other's mean.
    """
    bits = torch.arange(min(2**32, int(LATEST * q * 2**32) + 2), dtype=torch.float64)
    time = -torch.log1p(-(bits + 0.5) * 2.0**-32) * (1 - q) / q
    earlier = (-torch.expm1(-time) * 2.0**32 - 0.5).floor() + 1  # bits of the other up to then
    return float((1 - earlier * 2.0**-32).sum()) * 2.0**-32


@pytest.mark.parametrize("q", [1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-6, 1e-5][: amount(6, 7)])
def test_noise_of_32_bits_starves_rare_tokens_as_the_formula_says(q):
    x = random_numbers.GRID / q
    lost = 1 - first_by_the_grid(q) / q
    error = HALF_STEP * (LATEST + 2.0**-32 / q)
    assert lost == pytest.approx(1 - x / math.sinh(x), abs=error)


def test_what_all_rare_tokens_lose_together_is_bounded():
    """A token loses q (1 − x/sinh x) = GRID (1/x − 1/sinh x) with x = GRID/q."""
    x = torch.logspace(-3, 2, 20_001, dtype=torch.float64)
    most = random_numbers.GRID * float((1 / x - 1 / x.sinh()).max())
    assert 2.73e-11 < most < 2.75e-11
    assert most * 151_936 < 4.3e-6 and most * 2**19 < 1.5e-5


@pytest.mark.parametrize(("spec", "verifier"), some(laws.LAWS, 3))
def test_the_numbers_of_the_kernels_lead_to_the_exact_law(spec, verifier):
    """Drafts, coins and races of the closed forms, to which kernels are held one by one."""
    p_value, _ = law_of(spec, verifier, amount(4000, 100_000))
    assert p_value > laws.FALSE_ALARM


def test_a_recovered_token_from_the_noise_of_the_draft_is_noticed(monkeypatch):
    monkeypatch.setattr(random_numbers, "RECOVERED", random_numbers.DRAFT)
    p_value, _ = law_of("speculative", "chain", 8000)
    assert p_value < laws.FALSE_ALARM


def law_of(spec, verifier, trials):
    rule = ct.policy(spec)
    target, draft = (torch.tensor(rows).log() for rows in (laws.TARGET, laws.DRAFTED))
    seeds = torch.arange(trials)
    positions, zero = torch.full_like(seeds, 5), torch.zeros_like(seeds)
    noise = [
        random_numbers.noise(seeds, positions, zero + k, random_numbers.DRAFT, 4) for k in (0, 1)
    ]
    drafted = [(row - delays.log()).argmax(-1) for row, delays in zip(draft, noise, strict=True)]
    rows = rows_of(
        target.expand(trials, -1, -1), draft.expand(trials, -1, -1), torch.stack(drafted, 1)
    )
    output = emitted(rule, verifier, rows, seeds, positions).output_token_ids
    exact = [row.double().softmax(-1) for row in (target, draft)]
    expected = trials * laws._law(rule, verifier, *exact)
    cell = ((output + 1) * 5 ** torch.arange(3)).sum(-1)
    seen = torch.bincount(cell, minlength=125).double()
    statistic, dof = laws.chi_square(seen, expected)
    return float(torch.special.gammaincc(torch.tensor(dof / 2), torch.tensor(statistic / 2))), dof
