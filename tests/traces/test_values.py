"""Learned values: as good as the block program where they can be, and what traces make of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("cvxpy")

from cactus_theory.divergences import FDivergence, divergence  # noqa: E402
from cactus_theory.optimum.soft import Worth  # noqa: E402
from cactus_theory.policies._knobs import read_values  # noqa: E402
from cactus_theory.traces import Cycle, Trace, learn_values, save_trace  # noqa: E402
from cactus_theory.traces.values import _value  # noqa: E402
from simulations.block_gap import value_of  # noqa: E402
from solvers import block  # noqa: E402
from solvers.paths import PathTree  # noqa: E402
from tests.amounts import THOROUGH, amount  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace"
FINE = tuple((place + 1) / 40 for place in range(40))
# relative; forty knots leave at most 2e-5 of the value on these trees, two 4e-4
NEAR = 1e-4
# what float32 log-probabilities leave of a value of a few tokens
STORED = 1e-6
ROUNDING = 1e-12
# of a maximum, between points 5e-5 apart: of the second order, at a knot of the first
GRID = 1e-4
V = 3


def rows(depth: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a target and a draft row for each depth."""
    noise = np.random.default_rng(seed)
    logits = 1.2 * noise.standard_normal((depth, V))
    moved = logits + noise.standard_normal((depth, V))
    q, p = (np.exp(own) / np.exp(own).sum(-1, keepdims=True) for own in (logits, moved))
    return q, p


def tree_of(q: np.ndarray, p: np.ndarray) -> PathTree:
    """Return the tree whose rows depend on the depth alone."""
    level = np.repeat(np.arange(len(q)), [V**place for place in range(len(q))])
    return PathTree(q[level], p[level])


def cycle_of(q: np.ndarray, p: np.ndarray, ids: list[int] | None = None) -> Cycle:
    """Return a cycle along these rows; the bonus row is of no account."""
    drafted = torch.tensor(ids or [0] * len(q))
    target = torch.from_numpy(np.vstack([q, q[-1:]]))
    return Cycle(0, 0, drafted, target, torch.from_numpy(p))


def trace_of(folder: Path, *cycles: Cycle, ends: tuple[int, ...] = ()) -> Trace:
    width = max(len(own.draft_token_ids) for own in cycles)
    return save_trace(
        folder, [[own] for own in cycles], vocab_size=V, num_draft_tokens=width, eos_token_ids=ends
    )


def cases() -> list[tuple[str, int, int, float]]:
    """Return divergence, K, seed and price; in the plain suite some that accept not everything."""
    if THOROUGH:
        return [
            (kind, width, seed, price)
            for kind in ("kl", "reverse_kl", "pearson_chi2")
            for width in (2, 3, 4)
            for seed in (1, 2, 3)
            for price in (1.0, 3.0)
        ]
    return [("kl", 2, 1, 1.0), ("kl", 3, 2, 1.0), ("kl", 4, 2, 3.0), ("pearson_chi2", 2, 1, 1.0)]


@pytest.mark.parametrize(("kind", "width", "seed", "price"), cases())
def test_values_by_depth_reach_the_optimum(tmp_path: Path, kind, width, seed, price) -> None:
    q, p = rows(width, seed)
    tree, file = tree_of(q, p), tmp_path / "values.json"
    logged = trace_of(tmp_path / "t", cycle_of(q, p))
    table = learn_values(logged, prices=[price], knots=FINE, divergence=kind)
    file.write_text(json.dumps(table.as_json()))
    best = block.solve(tree, kind, price=price).value
    spec = f"soft_band:price={price},divergence={kind}"
    own, plain = (
        found.tokens - price * found.divergence
        for found in (
            value_of(f"{spec},values={file}", "block", tree, kind),
            value_of(spec, "block", tree, kind),
        )
    )
    assert best * (1 - NEAR) <= own <= best + STORED
    if not THOROUGH:  # in others all may be accepted, whatever follows
        assert plain < best * (1 - 20 * NEAR)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_the_value_is_concave_and_its_slopes_are_what_is_written(tmp_path: Path, kind) -> None:
    found = divergence(kind)
    assert isinstance(found, FDivergence)
    q, p = rows(amount(4, 30), 3)
    logged = torch.from_numpy(q), torch.from_numpy(p), torch.ones(len(q), dtype=torch.float64)
    worth = Worth((0.3, 0.6, 1.0), (2.5, 1.8, 1.3))
    grid = [place / 10 for place in range(11)]
    values = [0.0, *(_value(logged, alive, worth, 0.7, found) for alive in grid[1:])]
    slopes = np.diff(values) / np.diff(grid)
    assert (np.diff(slopes) <= 1e-9).all() and slopes[0] > slopes[-1] + 0.01 and slopes[-1] > 0


@pytest.mark.parametrize("alive", [1.0, 0.4])
def test_the_value_is_the_best_of_all_splits(alive: float) -> None:
    """Try every split of the mass between two tokens."""
    q, p, price = np.array([0.7, 0.3]), np.array([0.2, 0.8]), 0.7
    worth = Worth((0.3, 0.6, 1.0), (2.5, 1.8, 1.3))
    first = np.linspace(0, alive, 20_001)
    g = np.stack([first, alive - first], -1)
    gain = (p * worth.of(torch.from_numpy(g / p)).numpy()).sum(-1)
    cost = np.where(g > 0, g * np.log(np.where(g > 0, g, 1.0) / (alive * q)), 0.0).sum(-1)
    kl = divergence("kl")
    assert isinstance(kl, FDivergence)
    logged = torch.from_numpy(q[None]), torch.from_numpy(p[None]), torch.ones(1).double()
    assert _value(logged, alive, worth, price, kl) == pytest.approx(
        (gain - price * cost).max(), abs=GRID
    )


def test_what_follows_is_learned_from_the_last_rows(tmp_path: Path) -> None:
    q, p = rows(3, 5)
    options: dict[str, Any] = {"prices": [0.7], "knots": (0.5, 1.0)}
    whole = learn_values(trace_of(tmp_path / "a", cycle_of(q, p)), **options)
    last = learn_values(trace_of(tmp_path / "b", cycle_of(q[1:], p[1:])), **options)
    for own, expected in zip(whole.slopes[0][:2], last.slopes[0], strict=True):
        assert own == pytest.approx(expected, abs=STORED)
    middle = torch.from_numpy(q[1:2]), torch.from_numpy(p[1:2]), torch.ones(1).double()
    kl = divergence("kl")
    assert isinstance(kl, FDivergence)
    following = Worth((0.5, 1.0), whole.slopes[0][1])
    half = _value(middle, 0.5, following, 0.7, kl)
    assert whole.slopes[0][2][0] == pytest.approx(1 + half / 0.5, abs=STORED)


def test_slopes_are_one_and_those_of_the_value(tmp_path: Path) -> None:
    q, p = rows(2, 5)
    table = learn_values(trace_of(tmp_path / "t", cycle_of(q, p)), prices=[0.7], knots=(0.5, 1.0))
    last, first = table.slopes[0]
    assert last == (1.0, 1.0)
    following = (torch.from_numpy(q[1:]), torch.from_numpy(p[1:]), torch.ones(1).double())
    kl = divergence("kl")
    assert isinstance(kl, FDivergence)
    one = Worth((0.5, 1.0), last)
    half, whole = (_value(following, alive, one, 0.7, kl) for alive in (0.5, 1.0))
    assert first[0] == pytest.approx(1 + half / 0.5, abs=STORED)
    assert first[1] == pytest.approx(1 + (whole - half) / 0.5, abs=STORED)


def test_a_token_after_the_end_of_a_text_is_worth_nothing(tmp_path: Path) -> None:
    whole, ended = rows(3, 5), rows(3, 6)
    alone = trace_of(tmp_path / "a", cycle_of(*whole), ends=(2,))
    beside = cycle_of(*ended, ids=[2, 0, 0])
    both = trace_of(tmp_path / "b", cycle_of(*whole), beside, ends=(2,))
    options: dict[str, Any] = {"prices": [0.7], "knots": (0.5, 1.0)}
    first, second = (learn_values(own, **options).slopes[0] for own in (alone, both))
    for one, mean in zip(first[1], second[1], strict=True):
        assert mean - 1 == pytest.approx((one - 1) / 2, abs=STORED)
    unended = trace_of(tmp_path / "c", cycle_of(*whole), beside)
    assert learn_values(unended, **options).slopes[0] != second
    last = trace_of(tmp_path / "d", cycle_of(*whole, ids=[0, 0, 2]), ends=(2,))
    assert learn_values(last, **options).slopes[0] == first  # the end itself counts


def test_learning_is_the_same_every_time_and_round_trips(tmp_path: Path) -> None:
    trace = Trace.open(EXAMPLE)
    seen: list[float] = []
    options: dict[str, Any] = {
        "num_draft_tokens": 3,
        "prices": [1.0, 2.0],
        "knots": (0.4, 1.0),
        "cycles": 6,
    }
    table = learn_values(trace, **options, on_price=seen.append)
    assert table == learn_values(trace, **options)
    assert seen == [1.0, 2.0] and table.prices == (1.0, 2.0) and table.knots == (0.4, 1.0)
    assert [len(own) for own in table.slopes] == [3, 3]
    (tmp_path / "v.json").write_text(json.dumps(table.as_json()))
    assert read_values(str(tmp_path / "v.json")) == table
    # the more tokens follow the more one is worth, and the less it is at a higher price
    for cheap, dear in zip(*table.slopes, strict=True):
        assert all(a >= b for a, b in zip(cheap, dear, strict=True))
    options["cycles"] = 12
    assert learn_values(trace, **options) != table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "total_variation"}, "divergence: must be .* smooth generator"),
        ({"divergence": "renyi:a=2"}, "divergence: must be an f-divergence"),
        ({"prices": [2.0, 1.0]}, "prices that do not rise"),
        ({"prices": [0.0]}, r"prices: must lie in \(0, inf\]; got 0"),
        ({"prices": []}, "prices that do not rise"),
        ({"prices": [float("inf")]}, "prices that do not rise"),
        ({"prices": [float("nan")]}, "prices: must lie in"),
        ({"knots": (0.5, 0.4, 1.0)}, "knots that do not rise"),
        ({"knots": (0.5,)}, "knots that do not rise from above 0 to 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: must be"),
        ({"cycles": 0}, "drafts of 2 tokens"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, options: dict, message: str) -> None:
    trace = trace_of(tmp_path / "t", cycle_of(*rows(2, 1)))
    given: dict[str, Any] = {"prices": [1.0]} | options
    with pytest.raises(ValueError, match=message):
        learn_values(trace, **given, on_price=lambda _: pytest.fail("learned"))


def test_a_trace_of_certain_drafts_has_no_values(tmp_path: Path) -> None:
    own = cycle_of(*rows(2, 1))
    certain = Cycle(0, 0, own.draft_token_ids, own.target_probs, None)
    with pytest.raises(ValueError, match="trace: must hold drafts of 2 tokens with rows"):
        learn_values(trace_of(tmp_path / "t", certain), prices=[1.0])


def test_fewer_tokens_are_learned_than_were_asked_for_if_fewer_were_drafted(tmp_path) -> None:
    trace = trace_of(tmp_path / "t", cycle_of(*rows(2, 1)))
    assert len(learn_values(trace, num_draft_tokens=9, prices=[1.0]).slopes[0]) == 2
