"""The shipped example replayed against numbers computed by hand in plain numpy, file included."""

import json
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.traces import Trace, replay

EXAMPLE = Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace"
# sums over 2,048 tokens and 68 cycles in another order
ROUNDING = 1e-12
ALPHA, DELTA = 0.3, 0.1
LARGEST = 3_000_000  # bytes that may be committed
numpy_files = pytest.importorskip("safetensors.numpy")


@pytest.fixture(scope="module")
def cycles() -> list[tuple[int, list[int], np.ndarray, np.ndarray]]:
    """Return (text, ids, q (K + 1, V), p (K, V)) of each cycle, read without the library."""
    found = []
    for text, entry in enumerate(json.loads((EXAMPLE / "manifest.json").read_text())["shards"]):
        held = numpy_files.load_file(EXAMPLE / entry["file"])
        offsets = held["token_offsets"]
        rows = [
            np.exp(held[f"{name}_log_probs"].astype(np.float64)) for name in ("target", "draft")
        ]
        q, p = (own / own.sum(-1, keepdims=True) for own in rows)
        for number in range(len(offsets) - 1):
            first, last = offsets[number], offsets[number + 1]
            ids = held["draft_token_ids"][first:last].tolist()
            found.append((text, ids, q[first + number : last + number + 1], p[first:last]))
    return found


def kl(h: np.ndarray, q: np.ndarray) -> float:
    kept = h > 0
    return float((h[kept] * np.log(h[kept] / q[kept])).sum())


def lossless(q, p):
    return q


def mixed(q, p):
    return ALPHA * p + (1 - ALPHA) * q


def published(q, p):
    """Return a row in which every drafted token has its raised probability."""
    return np.minimum(1, q + np.sqrt(2 * DELTA * q * (1 - q)))


def chain(ids, q, p, target):
    """Return P_1..P_K of a cycle, and the KL of the rows 0..K−1: one coin a token."""
    alive, found, spent = 1.0, [], []
    for place, token in enumerate(ids):
        h = target(q[place], p[place])
        spent.append(kl(h, q[place]))
        alive *= min(1.0, h[token] / p[place][token])
        found.append(alive)
    return found, spent


def block(ids, q, p, target):
    """Return P_1..P_K by the recursion P_i = min(1, P_{i−1} h(x_i)/p(x_i)), and the KL."""
    alive, found, spent = 1.0, [], []
    for place, token in enumerate(ids):
        h = target(q[place], p[place])
        spent.append(kl(h, q[place]))
        alive = min(1.0, alive * h[token] / p[place][token])
        found.append(alive)
    return found, spent


@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize(
    ("policy", "target"), [("speculative", lossless), (f"mixture:alpha={ALPHA}", mixed)]
)
@pytest.mark.parametrize("verifier", [chain, block])
def test_the_example_by_hand(cycles, policy: str, target, verifier, width: int) -> None:
    found = replay(EXAMPLE, policy, verifier.__name__, num_draft_tokens=width)
    texts = cycles[-1][0] + 1
    tokens, spent, count = np.zeros(texts), np.zeros(texts), np.zeros(texts)
    for text, ids, q, p in cycles:
        alive, own = verifier(ids[:width], q, p, target)
        count[text] += 1
        tokens[text] += 1 + sum(alive)
        spent[text] += sum(a * d for a, d in zip([1.0, *alive], own, strict=False))
    np.testing.assert_array_equal(found.cycles, count)
    np.testing.assert_allclose(found.tokens, tokens, rtol=ROUNDING)
    np.testing.assert_allclose(found.accepted, tokens - count, rtol=ROUNDING)
    np.testing.assert_allclose(found.spent["kl"], spent, rtol=ROUNDING, atol=ROUNDING)
    value = found.tokens_per_call.value, found.divergence_per_token().value
    assert value == pytest.approx(
        (tokens.sum() / count.sum(), spent.sum() / tokens.sum()), rel=ROUNDING, abs=ROUNDING
    )


def test_cactus_by_hand(cycles) -> None:
    found = replay(EXAMPLE, f"cactus:delta={DELTA}")
    tokens = [1 + sum(chain(ids, q, p, published)[0]) for _, ids, q, p in cycles]
    assert found.tokens_per_call.value == pytest.approx(np.mean(tokens), rel=ROUNDING)


def test_acceptance_by_position_by_hand(cycles) -> None:
    found = replay(EXAMPLE, "speculative").acceptance_by_position
    alive = np.array([[1.0, *chain(ids, q, p, lossless)[0]] for _, ids, q, p in cycles])
    assert not any(0 in ids for _, ids, _, _ in cycles)  # nothing after an end of text
    by_hand = alive[:, 1:].sum(0) / alive[:, :-1].sum(0)
    assert [own.value for own in found] == pytest.approx(by_hand, rel=ROUNDING)


def test_the_example_is_small_and_holds_what_it_says() -> None:
    trace = Trace.open(EXAMPLE)
    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) < LARGEST
    assert trace.header.vocab_size == 2048 and trace.header.num_draft_tokens == 4
    assert all(len(cycle.draft_token_ids) == 4 for cycle in trace)
