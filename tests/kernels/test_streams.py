"""The random numbers: Philox as published, one stream a purpose, the laws they lead to."""

import numpy as np
import pytest
import torch

from cactus_theory.kernels import random_numbers
from tests.amounts import amount
from tests.kernels import checks as laws

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


def test_the_numbers_lead_to_the_exact_law():
    """Coins and draws of the torch path, which is the closed forms' (test_agreement)."""
    found = laws.kernel_laws("cpu", amount(4000, 30_000), 1)
    assert min(found.values()) > laws.FALSE_ALARM, found


def test_a_stream_that_is_shared_is_noticed(monkeypatch):
    monkeypatch.setattr(random_numbers, "DRAW", random_numbers.ACCEPT)
    found = laws.kernel_laws("cpu", 8000, 1, [("speculative", "chain")])
    assert max(found.values()) < laws.FALSE_ALARM


@pytest.mark.gpu
def test_kernels_emit_the_exact_laws():
    found = laws.kernel_laws("cuda", 10**6, 1)
    assert min(found.values()) > laws.FALSE_ALARM, found
