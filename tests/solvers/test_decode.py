"""The decode program: proven, never exceeded by a policy, and known where a grid knows it."""

import json

import numpy as np
import pytest
import torch

import cactus_theory as ct
from solvers import decode
from solvers.__main__ import main
from solvers._dual_bounds import price_bound
from solvers.path_tree import state_tree
from tests.amounts import amount, some
from tests.markov.pair import Setting, markov_pair
from tests.markov.rounds import drafted_rounds

PROOF = 1e-6
ROUNDING = 1e-9
# two tokens a call times what the nearest rows of a grid of 1/STEPS lose: half a step of mass
STEPS = 400
GRID = 0.5 / STEPS
MODELS = [{"vocab": 3}, {"vocab": 2}, {"vocab": 3, "zeros": 0.4}]
POLICIES = [
    ("band:price=1", "chain"),
    ("cactus:delta=0.1", "chain"),
    ("band:price=1", "block"),
    ("mixture:alpha=0.5", "block"),
    ("lenience:lenience=0.7", "chain"),
    ("band:price=3,per_row=True", "block"),
]


# lazy steps of the chain of rounds, after which its law has settled to rounding
LONG = 4000


def long_run_rates(pair, spec, verifier):
    """Return tokens a call and metered nats a token, which long texts of K = 3 tend to."""
    states, setting = torch.arange(len(pair.target)), Setting(spec, 3, 2, verifier)
    rounds = drafted_rounds(pair, states, 3, setting.policies, setting.judge)
    moves = torch.zeros(len(states), len(states), dtype=torch.float64)
    ended = states[:, None]
    for chance in rounds.ends:
        ended = pair.following[ended].flatten(1)
        moves.scatter_add_(1, ended, chance)
    weight = torch.zeros(len(states), dtype=torch.float64)
    weight[pair.start] = 1.0
    for _ in range(LONG):
        weight = (weight + weight @ moves) / 2
    tokens = sum(float(weight @ mass.sum(1)) for mass in rounds.alive)
    nats = sum(
        float(weight @ torch.where(mass > 0, mass * charge, 0.0).sum(1))
        for mass, charge in zip(rounds.alive, rounds.charges, strict=False)
    )
    return tokens, nats / tokens


def most(pair, width, per_token, **options):
    return decode.solve(pair.target, pair.draft, width, per_token=per_token, **options)


@pytest.mark.parametrize("dials", MODELS, ids=str)
def test_lossless_it_is_the_block(dials):
    pair = markov_pair(**dials, seed=3)
    tokens, _ = long_run_rates(pair, "speculative", "block")
    solved = most(pair, 3, 0.0)
    assert solved.divergence == pytest.approx(0, abs=ROUNDING)
    assert solved.tokens == pytest.approx(tokens, abs=PROOF)
    assert abs(solved.gap) <= PROOF


@pytest.mark.parametrize(("spec", "verifier"), some(POLICIES, 3))
@pytest.mark.parametrize("dials", some(MODELS, 2), ids=str)
def test_no_policy_exceeds_it(spec, verifier, dials):
    pair = markov_pair(**dials, seed=1)
    tokens, metered = long_run_rates(pair, spec, verifier)
    if not np.isfinite(metered):
        return
    solved = most(pair, 3, metered)
    assert tokens <= solved.bound + ROUNDING
    assert tokens >= 0.85 * solved.bound  # it is no empty bound
    assert abs(solved.gap) <= PROOF and solved.divergence <= metered + 1e-7


@pytest.mark.parametrize("per_token", [0.005, 0.05])
def test_two_tokens_and_one_draft_on_a_grid(per_token):
    """Every pair of rows, one for each state, by the flow between two states."""
    q, p = np.array([[0.7, 0.3], [0.2, 0.8]]), np.array([[0.3, 0.7], [0.5, 0.5]])
    steps = np.linspace(0, 1, STEPS + 1)
    rows = np.stack([steps, 1 - steps], -1)
    accepted, spent, ends = [], [], []
    for state in range(2):
        alive = np.minimum(rows, p[state])
        accepted.append(alive.sum(-1))
        whole = torch.from_numpy(rows), torch.from_numpy(q[state])
        spent.append(ct.divergence("kl").value(*whole).numpy())
        ends.append((rows - alive) + alive @ q)
    away, back = np.meshgrid(ends[0][:, 1], ends[1][:, 0], indexing="ij")
    first = back / (away + back)
    tokens = 1 + first * accepted[0][:, None] + (1 - first) * accepted[1][None]
    cost = (first * spent[0][:, None] + (1 - first) * spent[1][None]) / tokens
    best = tokens[cost <= per_token].max()
    solved = decode.solve(q, p, 1, per_token=per_token)
    assert best <= solved.bound + ROUNDING
    assert best >= solved.tokens - GRID


@pytest.mark.parametrize("seed", range(amount(2, 40)))
def test_any_potentials_and_multipliers_bound_it(seed):
    noise = np.random.default_rng(seed)
    pair = markov_pair(3, seed=seed)
    q, p = pair.target.numpy(), pair.draft.numpy()
    solved = most(pair, 2, 0.03)
    price, potentials = noise.uniform(0.5, 4), noise.normal(size=3)
    unit, bounds = 1 + price * 0.03, []
    for state in range(3):
        tree, at = state_tree(q, p, 2, state)
        bound = price_bound(
            tree,
            noise.uniform(0, 2, tree.target.shape),
            ct.divergence("kl"),
            price,
            unit=unit,
            ends=potentials,
            after=q[at[len(tree.target) :]] @ potentials,
        )
        bounds.append(bound - potentials[state])
    assert max(bounds) >= solved.tokens


def test_anything_may_be_spent():
    pair = markov_pair(3, seed=0)
    free = most(pair, 3, np.inf)
    assert free.tokens == pytest.approx(4, abs=PROOF) and free.price == 0


def test_a_draft_that_is_never_emitted_leaves_one_token_a_call():
    target, draft = np.tile([0.5, 0.5, 0.0], (3, 1)), np.tile([0.0, 0.0, 1.0], (3, 1))
    assert decode.solve(target, draft, 1, per_token=0.1).tokens == pytest.approx(1, abs=PROOF)


@pytest.mark.parametrize("spec", ["pearson_chi2", "total_variation", "alpha:a=0.5"])
def test_other_divergences(spec):
    pair = markov_pair(3, seed=5)
    amounts = [most(pair, 2, budget, divergence=spec) for budget in (0.0, 0.01, 0.05)]
    tokens = [one.tokens for one in amounts]
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0] + 0.01
    assert all(abs(one.gap) <= PROOF for one in amounts)


@pytest.mark.parametrize(
    ("states", "width", "message"),
    [
        (600, 1, r"at most 8,388,608 states x prefixes of .* have 216,000,000"),
        (30, 3, r"at most 20,000 prefixes of all states; .* have 27,930"),
        (2, 60, "depth: must leave at most 5000 prefixes"),
    ],
)
def test_what_is_too_large_is_refused_before_memory_is_taken(states, width, message, monkeypatch):
    monkeypatch.setattr(decode, "state_tree", lambda *arguments: pytest.fail("a tree was built"))
    rows = np.full((states, states), 1 / states)
    with pytest.raises(ValueError, match=message):
        decode.solve(rows, rows, width, per_token=0.1)


def test_the_commands(tmp_path, capsys):
    pair = markov_pair(3, seed=0)
    files = [str(tmp_path / name) for name in ("target.npy", "draft.npy")]
    for file, rows in zip(files, (pair.target, pair.draft), strict=True):
        np.save(file, rows.numpy())
    flags = "--num-draft-tokens 2 --nats 0.02 --json"
    assert main(["decode", *files, *flags.split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["tokens"] == pytest.approx(most(pair, 2, 0.02).tokens, abs=PROOF)
