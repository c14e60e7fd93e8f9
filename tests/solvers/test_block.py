"""The block program: its answers are proven, and known where theory or enumeration knows them."""

import itertools
import math

import numpy as np
import pytest

from cactus_theory.divergences import read_divergence
from solvers import _perspective, block
from solvers._dual_bounds import price_bound
from solvers.path_tree import PathTree, follow
from tests.amounts import amount, some
from tests.solvers.cases import DIVERGENCES, random_tree
from tests.solvers.joint import joint_optimum

# what the program proves of itself
PROOF = 1e-6
# a solver's answer in a second program of another shape
SOLVED = 1e-6
# theory: equal within 2e-8; both solvers stop near 1e-9
JOINT = 2e-8
ROUNDING = 1e-10
SUMMED = tuple(s for s in DIVERGENCES if not s.startswith(("renyi", "max")))
GOALS = ({"price": 1.5}, {"per_token": 0.03})
TREES = [
    {"vocabulary": 3, "depth": depth, "seed": seed, "zeros": zeros}
    for depth in (2, 3, 4)
    for seed in (1, 2, 3)
    for zeros in (0.0, 0.3)
]


def check(tree, program, spec, goal):
    """Raise unless a program's answer is what its fields say, and proven."""
    kind = read_divergence(spec)
    followed = follow(tree, program.target, kind)
    np.testing.assert_allclose(program.target.sum(-1), 1, atol=ROUNDING)
    assert not program.target[tree.target == 0].any()
    assert program.tokens == pytest.approx(followed.tokens, abs=ROUNDING)
    assert program.divergence == pytest.approx(followed.divergence, abs=ROUNDING)
    np.testing.assert_allclose(program.reached, program.alive * tree.drafted, atol=ROUNDING)
    value = program.tokens
    if "price" in goal:
        value -= goal["price"] * program.divergence
    assert program.value == pytest.approx(value, abs=ROUNDING)
    assert abs(program.gap) <= PROOF
    assert program.divergence <= goal.get("per_token", math.inf) * program.tokens + 1e-7
    assert program.tokens >= program.lossless - PROOF


@pytest.mark.parametrize("dials", some(TREES, 2), ids=str)
@pytest.mark.parametrize("spec", SUMMED)
def test_every_divergence_has_a_proven_optimum(spec, dials):
    tree = random_tree(**dials)
    for goal in some(GOALS, 1) if not dials["zeros"] else GOALS[1:]:
        check(tree, block.solve(tree, spec, **goal), spec, goal)


@pytest.mark.parametrize("spec", some(SUMMED, 2))
def test_a_budget_is_a_price(spec):
    tree = random_tree(3, 2, seed=3)
    priced = block.solve(tree, spec, price=2.5)
    within = block.solve(tree, spec, per_token=priced.per_token)
    assert within.tokens == pytest.approx(priced.tokens, abs=SOLVED)
    if read_divergence(spec).smooth:
        assert within.price == pytest.approx(2.5, rel=1e-3)


@pytest.mark.parametrize("seed", range(amount(1, 5)))
@pytest.mark.parametrize("spec", ("kl", "pearson_chi2", "squared_hellinger")[: amount(1, 3)])
def test_no_joint_law_of_path_count_and_token_does_better(spec, seed):
    """Whatever coins are shared: every law of (path, accepted count, next token) is allowed."""
    tree = random_tree(2, 2, seed=seed, zeros=0.2 * (seed % 2))
    value = block.solve(tree, spec, price=1.5).value
    assert value == pytest.approx(joint_optimum(tree, spec, 1.5), abs=JOINT)


@pytest.mark.parametrize("price", some((0.4, 1.0, 5.0), 2))
def test_a_deterministic_draft_gives_the_closed_value(price):
    """Theory: ν ln E_q e^{N/ν}, N the tokens emitted if the target alone had drawn the block."""
    tree, drafted = random_tree(3, 4, seed=2), (2, 0, 1, 1)
    rows = np.zeros_like(tree.draft)
    for place, level in enumerate(tree.levels):
        rows[level, drafted[place]] = 1.0
    tree = PathTree(tree.target, rows)
    nodes = list(itertools.accumulate(drafted[:-1], lambda u, x: 3 * u + x + 1, initial=0))
    q = [tree.target[node, token] for node, token in zip(nodes, drafted, strict=True)]
    stops = [math.prod(q[:n]) * (1 - q[n]) for n in range(4)] + [math.prod(q)]
    closed = price * math.log(sum(s * math.exp((n + 1) / price) for n, s in enumerate(stops)))
    program = block.solve(tree, price=price)
    assert program.value == pytest.approx(closed, abs=PROOF)
    worth = math.exp(1 / price)
    for place in reversed(range(4)):
        raised = q[place] * worth / (1 - q[place] + q[place] * worth)
        assert program.target[nodes[place], drafted[place]] == pytest.approx(raised, abs=1e-4)
        worth = math.exp(1 / price) * (1 - q[place] + q[place] * worth)


def test_the_ends_need_no_solver():
    tree = random_tree(3, 3, seed=2, zeros=0.3)
    for goal in ({"price": math.inf}, {"per_token": 0.0}):
        strict = block.solve(tree, **goal)
        np.testing.assert_allclose(strict.target, tree.target)
        assert strict.tokens == pytest.approx(strict.lossless)
        assert (strict.solver, strict.divergence, strict.price) == ("identity", 0, math.inf)
        assert abs(strict.gap) < ROUNDING
    for goal in ({"price": 0}, {"per_token": 9.0}, {"per_token": math.inf}):
        whole = block.solve(tree, **goal)
        assert whole.tokens == pytest.approx(tree.possible.sum())
        np.testing.assert_allclose(whole.target.sum(-1), 1, atol=ROUNDING)
        assert (whole.solver, whole.price) == ("identity", 0)
        assert abs(whole.gap) < ROUNDING


def test_the_ends_are_limits():
    tree = random_tree(3, 3, seed=2, zeros=0.3)
    near = block.solve(tree, price=200.0)
    assert near.lossless < near.tokens < near.lossless + 1e-2
    far = block.solve(tree, price=1e-3)
    assert far.tokens == pytest.approx(tree.possible.sum(), abs=1e-4)
    least = follow(tree, block.accepting_rows(tree), read_divergence("kl"))
    assert far.divergence <= least.divergence + 1e-6
    almost = block.solve(tree, per_token=0.999 * least.divergence / tree.possible.sum())
    assert tree.possible.sum() - 1e-3 < almost.tokens < tree.possible.sum()


def test_nothing_can_be_accepted_where_target_and_draft_are_apart():
    q, p = np.array([[1.0, 0.0]] * 3), np.array([[0.0, 1.0]] * 3)
    program = block.solve(PathTree(q, p), price=1)
    assert program.tokens == 1 and program.divergence == 0
    same = block.solve(PathTree(q, q), per_token=0.1)
    assert same.tokens == pytest.approx(3) and same.divergence == 0


@pytest.mark.parametrize("spec", SUMMED)
def test_no_row_beats_a_bound_at_any_multipliers(spec):
    tree, noise = random_tree(3, 3, seed=3, zeros=0.3), np.random.default_rng(0)
    kind = read_divergence(spec)
    for _ in range(amount(4, 60)):
        price = float(np.exp(noise.uniform(-3, 3)))
        alpha = noise.uniform(-0.5, 4.5, size=tree.target.shape)
        mixed = noise.dirichlet(np.full(3, 0.5), size=len(tree.target)) * (tree.target > 0)
        rows = noise.uniform() * tree.target + mixed
        followed = follow(tree, rows / rows.sum(-1, keepdims=True), kind)
        value = followed.tokens - price * followed.divergence
        assert value <= price_bound(tree, alpha, kind, price) + ROUNDING


def test_a_divergence_without_a_perspective_is_named(monkeypatch):
    monkeypatch.delitem(_perspective._FORMS, type(read_divergence("kl")))
    with pytest.raises(ValueError, match=r"@perspective_of\(KL\)"):
        block.solve(random_tree(2, 1, seed=1), price=1)
