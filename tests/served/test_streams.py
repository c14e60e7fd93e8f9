"""Streams of tokens drawn from logged rows of a published model: false alarms, and faults found."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
from cactus_theory.base.confidence import log_mean
from cactus_theory.policies import read_policy
from cactus_theory.served.alternatives import Claim, Rows, alternatives, log_factors
from cactus_theory.traces import Trace
from tests.amounts import amount

TRACE = Path(__file__).resolve().parents[2] / "simulations/data/smollm_trace"
TABLE = alternatives(drafted=True)
NAMES = [own.name for own in TABLE]
EXACT = 1e-4  # nats: logged rows are the engine's
LIMIT = math.log(100)
LAWS = {own.name: own.law for own in TABLE}
# bands near 0.02 and 0.05 nats on these rows, which are none of the alternatives
ENGINES = {
    "healthy": lambda rows: rows.h,
    "temperature x 0.9": LAWS["temperature x 0.9"],
    "band 0.02": lambda rows: read_policy("band:price=1.6").emitted(rows.q, rows.p),
    "band 0.05": lambda rows: read_policy("band:price=1.05").emitted(rows.q, rows.p),
    "top-p 0.95 not told": LAWS["top-p 0.95 not told"],
    "recovered from the target": LAWS["recovered from the target"],
    "coin used twice": LAWS["coin used twice"],
}


@pytest.fixture(scope="module")
def pools() -> dict[str, np.ndarray]:
    """Return ln r/h of tokens that each engine draws, (rows × draws, M)."""
    source, found = torch.Generator().manual_seed(0), {name: [] for name in ENGINES}
    draws = amount(60, 3400)
    for number, cycle in enumerate(Trace.open(TRACE)):
        if cycle.draft_probs is None or (number % amount(16, 1)):
            continue
        count = len(cycle.draft_probs)
        q, p = (
            own[:count].clamp(min=1e-12).log() for own in (cycle.target_probs, cycle.draft_probs)
        )
        rows = Rows(q, Claim(), torch.arange(100, 140), cycle.draft_token_ids[: count - 1], p)
        for name, law in ENGINES.items():
            below = law(rows).cumsum(-1)
            few = draws if name == "healthy" else 60
            coins = torch.rand(count, few, generator=source, dtype=torch.float64) * below[:, -1:]
            ids = torch.searchsorted(below, coins).clamp(max=below.shape[-1] - 1)
            factors, _, beyond = log_factors(rows, ids, TABLE, EXACT, slice(0, 0))
            assert not beyond.any()
            found[name].append(factors.flatten(0, 1).numpy().astype(np.float32))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def first_alarms(pool: np.ndarray, streams: int, length: int) -> np.ndarray:
    """Return after how many tokens each stream passed, ∞ for never."""
    source, found = np.random.default_rng(1), []
    for _ in range(streams):
        path = pool[source.integers(len(pool), size=length)].astype(np.float64).cumsum(0)
        passed = np.flatnonzero(log_mean(path) >= LIMIT)
        found.append(passed[0] + 1 if len(passed) else math.inf)
    return np.array(found)


def test_healthy_streams_seldom_alarm(pools) -> None:
    """One in a hundred at most: of 1,000 more than 18 do with probability 0.7 %."""
    streams = amount(150, 1000)
    alarms = first_alarms(pools["healthy"], streams, amount(500, 2000)) < math.inf
    assert alarms.sum() <= amount(6, 18)


@pytest.mark.parametrize("name", list(ENGINES)[1:])
def test_a_fault_is_found_soon(pools, name: str) -> None:
    """In 90 of 100 streams within 3 ln(M/α) over the nearest alternative's nats a token."""
    growth = pools[name].mean(0, dtype=np.float64)
    length = math.ceil(3 * (LIMIT + math.log(len(TABLE))) / growth.max())
    found = first_alarms(pools[name], 100, length) <= length
    assert found.sum() >= 90
    assert name not in NAMES or growth[NAMES.index(name)] > 0.95 * growth.max()
