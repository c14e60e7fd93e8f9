"""The random numbers: Philox as published, one stream a purpose, the laws they lead to."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels import random_numbers
from cactus_theory.verify.draw import pick
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


@pytest.mark.parametrize(("counters", "key", "numbers"), KNOWN)
def test_philox_gives_the_published_numbers(counters, key, numbers):
    whole = int(np.uint64(key[0] + (key[1] << 32)).astype(np.int64))
    parts = tuple(torch.tensor([counter]) for counter in counters)
    outputs = random_numbers.philox(torch.tensor([whole]), parts)
    assert tuple(int(part) for part in outputs) == numbers


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


@pytest.mark.parametrize(("spec", "verifier"), some(laws.LAWS, 3))
def test_the_numbers_of_the_kernels_lead_to_the_exact_law(spec, verifier):
    """Drafts, coins and draws of the closed forms, to which kernels are held one by one."""
    p_value, _ = law_of(spec, verifier, amount(4000, 100_000))
    assert p_value > laws.FALSE_ALARM


def test_a_recovered_token_from_a_coin_of_the_draft_is_noticed(monkeypatch):
    monkeypatch.setattr(random_numbers, "DRAW", random_numbers.DRAFT)
    p_value, _ = law_of("speculative", "chain", 8000)
    assert p_value < laws.FALSE_ALARM


def law_of(spec, verifier, trials):
    rule = ct.policy(spec)
    target, draft = (torch.tensor(rows).log() for rows in (laws.TARGET, laws.DRAFTED))
    seeds = torch.arange(trials)
    positions, places = torch.full_like(seeds, 5), torch.arange(2).expand(trials, -1)
    coins = random_numbers.coins(seeds, positions, places, random_numbers.DRAFT)
    chances = draft.double().softmax(-1)
    drafted = [pick(row.expand(trials, -1), coins[:, k]) for k, row in enumerate(chances)]
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
