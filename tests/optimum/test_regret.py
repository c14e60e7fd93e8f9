"""The row of least regret: by program, by certificate, at its ends; the best path of a block."""

import itertools
import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences.regret import REGRET, regrets
from cactus_theory.optimum.regret import OneTokenRow, RegretPath
from cactus_theory.testing import assert_policy_properties
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.node import Nodes
from cactus_theory.verify.tree import declared_tree
from tests.amounts import amount

# of acceptance and regret, in float64 sums over a row
ROUNDING = 1e-9
DELTAS = (0.0, 0.01, 0.1, 0.5, 3.0, math.inf)


def case(seed: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return q and p: rows with zeros, with ties of q, one-hot."""
    source = np.random.default_rng(seed)
    q, p = source.dirichlet(np.full(vocab, 0.6), 2)
    if seed % 2:
        q[source.random(vocab) < 0.2] = 0
        p[source.random(vocab) < 0.2] = 0
        q[0], p[-1] = q[0] + 0.01, p[-1] + 0.01
    if seed % 3 == 1:
        q = np.ceil(q * 4)  # many tokens of the same regret, the largest too
    if seed % 7 == 3:
        p = np.eye(vocab)[seed % vocab]
    if seed % 11 == 5:
        q = np.eye(vocab)[seed % vocab]
    return q / q.sum(), p / p.sum()


def test_it_is_the_program_s_optimum_and_its_certificate_holds() -> None:
    pytest.importorskip("scipy")
    from solvers import regret

    for seed in range(amount(70, 200)):
        q, p = case(seed, (2, 3, 7, 40, 300)[seed % 5])
        delta = DELTAS[seed % len(DELTAS)]
        best, (row, due) = ct.optimal_regret(q, p, delta=delta), regret.solve(q, p, delta=delta)
        assert best.acceptance == pytest.approx(due, abs=ROUNDING), seed
        assert np.minimum(row, p).sum() == pytest.approx(due, abs=1e-8) and row[q == 0].sum() == 0
        assert best.regret <= min(delta, 1e9) + ROUNDING and abs(best.gap) < ROUNDING
        assert best.target.sum() == pytest.approx(1, abs=ROUNDING) and best.target.min() >= 0
        assert best.target[q == 0].sum() == 0
        again = ct.optimal_regret(q, p, acceptance=min(float(best.acceptance), 1.0))
        assert again.acceptance == pytest.approx(float(best.acceptance), abs=ROUNDING)
        assert again.regret <= best.regret + ROUNDING
        if delta < math.inf:  # a concave frontier, whose slope is the price
            more = ct.optimal_regret(q, p, delta=delta + 1e-7)
            assert more.acceptance - best.acceptance <= 1e-7 * best.price + ROUNDING


@pytest.mark.parametrize("price", [0.0, 0.3, 2.0, 30.0, math.inf])
def test_a_price_keeps_what_is_worth_it_and_any_price_bounds_any_budget(price: float) -> None:
    for seed in range(amount(30, 200)):
        q, p = case(seed, (2, 3, 7, 40)[seed % 4])
        best = ct.optimal_regret(q, p, price=price)
        lost = np.log(q.max()) - np.log(q, where=q > 0, out=np.full_like(q, -np.inf))
        row = np.array([p[n] if q[n] > 0 and price < math.inf and price * lost[n] <= 1 else 0.0
                        for n in range(len(q))])  # fmt: skip
        row[int(q.argmax())] += 1 - row.sum()
        np.testing.assert_allclose(best.target, row, atol=ROUNDING)
        ties = (q == q.max()) & (np.arange(len(q)) > q.argmax())
        assert best.gap == pytest.approx(p[ties].sum() if price == math.inf else 0, abs=ROUNDING)
        if not 0 < price < math.inf:
            continue
        kept = np.maximum(1 - price * np.minimum(lost, 1e9), 0)
        for delta in (0.0, 0.05, 0.7):
            bound = price * delta + (p * kept)[q > 0].sum()
            assert ct.optimal_regret(q, p, delta=delta).acceptance <= bound + ROUNDING


def test_a_whole_vocabulary_is_certified_in_every_precision() -> None:
    source = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, 2, 151_936, generator=source, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, p = logits.softmax(-1).to(dtype)
        for knob in ({"delta": 0.3}, {"price": 0.5}, {"acceptance": 0.2}, {"delta": math.inf}):
            best = ct.optimal_regret(q, p, normalise=True, **knob)
            assert (best.gap.abs() < ROUNDING).all() and (best.price >= 0).all()
            assert best.target.dtype == dtype and (best.acceptance > 0).all()
            if "acceptance" in knob:
                assert best.acceptance.tolist() == pytest.approx([0.2, 0.2])


def test_what_is_asked_in_vain_is_refused() -> None:
    q, p = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    with pytest.raises(ValueError, match=r"^acceptance: must be at most .* 0\.5; got more"):
        ct.optimal_regret(q, p, acceptance=0.6)
    for knobs in ({}, {"delta": 1.0, "price": 1.0}):
        with pytest.raises(ValueError, match="exactly one must be given"):
            ct.optimal_regret(q, p, **knobs)
    with pytest.raises(ValueError, match="regret has a program of its own, ct.optimal_regret"):
        ct.optimal_acceptance(q, p, divergence=REGRET, delta=0.1)


def test_regret_is_the_limit_of_kl_times_temperature() -> None:
    source = torch.Generator().manual_seed(3)
    scores = torch.randn(20, 50, generator=source, dtype=torch.float64)
    q, h = scores.softmax(-1), torch.randn(20, 50, generator=source).double().softmax(-1)
    for temperature in (0.1, 0.01, 0.001):
        colder = (scores / temperature).log_softmax(-1)
        kl = (h * (h.log() - colder)).sum(-1)
        error = (temperature * kl - REGRET.value(h, q)).abs()
        assert (error <= temperature * math.log(50)).all() and (error > 0).all()
    excluded = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    one = torch.eye(3, dtype=torch.float64)
    assert REGRET.value(one, excluded.expand(3, 3)).tolist() == [0.0, math.inf, 0.0]
    assert regrets(excluded * math.nan).isnan().all()


def paths(count: int, width: int, dyadic: bool) -> tuple[torch.Tensor, ...]:
    """Return rows of two tokens (count, K, 2), drafted ids, their counts and the regrets."""
    source = torch.Generator().manual_seed(width + dyadic)
    lost = 2 * torch.rand(count, width, generator=source, dtype=torch.float64)
    if dyadic:  # sums without rounding, so that many stops are equally good
        lost = (4 * lost).round() / 4
    lost[torch.rand(count, width, generator=source) < 0.1] = math.inf
    lost[torch.rand(count, width, generator=source) < 0.3] = 0.0
    q = torch.stack([torch.ones_like(lost), (-lost).exp()], -1)
    counts = torch.randint(0, width + 1, (count,), generator=source)
    return q, torch.ones(count, width, dtype=torch.int64), counts, lost


@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("price", [0.0, 0.5, 1.0, 4.0])
def test_a_path_stops_where_no_other_stop_is_worth_more(price: float, dyadic: bool) -> None:
    count, width = 10_000, 6
    q, ids, counts, lost = paths(count, width, dyadic)
    kept = RegretPath(price).path(q, ids, counts)
    place = torch.arange(width)
    kept = torch.where(place < counts[:, None], kept, 0.0)
    stop = kept.cumprod(-1).sum(-1)
    spent = torch.nn.functional.pad(lost, (1, 0)).cumsum(-1)
    value = torch.arange(width + 1) - (price * spent).nan_to_num(nan=0.0, posinf=math.inf)
    banned = torch.nn.functional.pad(lost, (1, 0)).cummax(-1).values == math.inf
    value[banned | (torch.arange(width + 1) > counts[:, None])] = -math.inf
    best = value.amax(-1)
    close = value >= best[:, None] - 1e-12  # of equals the most tokens
    assert torch.equal(stop, (close * torch.arange(width + 1)).amax(-1).double())
    assert len(stop.unique()) > 3


def test_at_a_price_of_infinity_only_the_first_argmax_is_kept() -> None:
    q = torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64).expand(3, 1, 3)
    ids, one = torch.tensor([[0], [1], [2]]), torch.ones(3, dtype=torch.int64)
    assert RegretPath(math.inf).path(q, ids, one)[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert RegretPath(1e300).path(q, ids, one)[:, 0].tolist() == [1.0, 1.0, 0.0]
    hidden = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    assert RegretPath(0.0).path(hidden, ids[:1], one[:1]).item() == 0.0


def test_no_randomised_rule_for_a_path_does_better() -> None:
    """By the joint law of stop and last token, for sampled drafts, too, where p enters nowhere."""
    scipy = pytest.importorskip("scipy.optimize")
    source = np.random.default_rng(5)
    for _ in range(amount(8, 60)):
        vocab, width, price = 3, 2, float(source.choice([0.3, 1.0, 3.0]))
        rows = {prefix: source.dirichlet(np.full(vocab, 0.6)) for length in range(width + 1)
                for prefix in itertools.product(range(vocab), repeat=length)}  # fmt: skip
        lost = {prefix: np.log(row.max()) - np.log(row) for prefix, row in rows.items()}
        law = source.dirichlet(np.ones(vocab**width))
        paths = list(itertools.product(range(vocab), repeat=width))
        choices = [(stop, last) for stop in range(width + 1) for last in range(vocab)]
        gain = []
        for path, (stop, last) in itertools.product(paths, choices):
            cost = sum(lost[path[:at]][path[at]] for at in range(stop)) + lost[path[:stop]][last]
            gain.append(stop + 1 - price * cost)
        each = np.kron(np.eye(len(paths)), np.ones(len(choices)))
        program = scipy.linprog(-np.array(gain), A_eq=each, b_eq=law)
        total = 0.0
        for path, share in zip(paths, law, strict=True):
            q = torch.from_numpy(np.stack([rows[path[:at]] for at in range(width)]))[None]
            ids, counts = torch.tensor([path]), torch.tensor([width])
            stop = int(RegretPath(price).path(q, ids, counts)[0].cumprod(-1).sum())
            spent = sum(lost[path[:at]][path[at]] for at in range(stop))
            total += share * (stop + 1 - price * spent)
        assert total == pytest.approx(-program.fun, abs=ROUNDING)


@pytest.mark.parametrize("price", [0.0, 0.8, 3.0, math.inf])
@pytest.mark.parametrize("judge", [ct.verify_chain, ct.verify_block])
def test_rows_of_one_token_are_the_written_rows(price: float, judge, monkeypatch) -> None:
    """With ties and tokens of no probability; as verdicts, laws, charges and directions."""
    source = torch.Generator().manual_seed(int(price) if math.isfinite(price) else 9)
    q = (2 * torch.randn(60, 4, 7, generator=source, dtype=torch.float64)).softmax(-1)
    q[::5, 1, 2] = 0
    q[::4, 2, 3] = q[::4, 2].amax(-1)
    q /= q.sum(-1, keepdim=True)
    ids = torch.randint(7, (60, 3), generator=source)
    policy = ct.policy("regret", price=price)

    def told() -> tuple:
        out = judge(policy, q, None, ids, generator=torch.Generator().manual_seed(1))
        draft = Draft(ids, [3] * 60, None)
        nodes = Nodes(find_verifier(judge.__name__[7:]), Assignment((policy,)), q, draft)
        own = [nodes.at(row, place) for row in range(60) for place in range(3)]
        solved = {type(node.solved) for node in own}
        numbers = [(node.next_alive, *node.charge(), *node.directions, node.h(int(node.token)),
                    node.exceeds(0.5)) for node in own]  # fmt: skip
        laws = torch.stack([node.law for node in own])
        left = torch.stack([torch.from_numpy(node.residual().row) for node in own])
        return solved, out.output_token_ids, torch.tensor(numbers).double(), laws, left

    fast = told()
    monkeypatch.setattr(type(policy), "row", lambda *_: None)
    monkeypatch.setattr(RegretPath, "row", lambda *_: None)
    slow = told()
    assert (fast[0], slow[0]) == ({OneTokenRow}, {type(None)})
    assert fast[1].equal(slow[1])
    for own, due in zip(fast[2:], slow[2:], strict=True):
        torch.testing.assert_close(own, due, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("price", [0.0, 0.7, 2.0, math.inf])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_tree_goes_down_the_path_that_is_worth_most(price: float, compiled, monkeypatch) -> None:
    """By brute force over all nodes of trees of deterministic tokens; laws without numba, too."""
    if not compiled:
        monkeypatch.setattr("cactus_theory.verify.node.loops", lambda: None)
    source = torch.Generator().manual_seed(3)
    for _ in range(60):
        ids, parents, seen = [], [], set()
        for place in range(9):
            parent = int(torch.randint(-1, place, (1,), generator=source)) if place else -1
            token = int(torch.randint(6, (1,), generator=source))
            while (parent, token) in seen:
                token = (token + 1) % 6
            seen.add((parent, token))
            ids.append(token)
            parents.append(parent)
        q = (2 * torch.randn(10, 6, generator=source, dtype=torch.float64)).softmax(-1)
        paths, worth = [[]], [0.0]
        for place, parent in enumerate(parents):
            row = q[parent + 1]
            lost = float(row.max().log() - row[ids[place]].log())
            cost = 0.0 if lost == 0 else price * lost
            paths.append([*paths[parent + 1], ids[place]])
            worth.append(worth[parent + 1] + 1 - cost)
        given = q[None], None, torch.tensor([ids]), torch.tensor([parents])
        out = ct.verify_tree(
            f"regret:price={price}", *given, deterministic=torch.ones(1, 9, dtype=torch.bool)
        )
        count = int(out.num_accepted)
        kept = out.output_token_ids[0, :count].tolist()
        node = paths.index(kept)
        assert worth[node] == pytest.approx(max(worth), abs=1e-12)
        assert int(out.output_token_ids[0, count]) == int(q[node].argmax())
        draft = declared_tree(*given[2:4], None, None, torch.ones(1, 9, dtype=torch.bool), True)
        nodes = Nodes(find_verifier("tree"), Assignment((ct.policy(f"regret:price={price}"),)),
                      q[None], draft)  # fmt: skip
        root = nodes.at(0, 0)
        emitted = out.output_token_ids[0, 0]
        assert root.h(int(emitted)) == root.law[emitted] == root.law.sum() == 1


@pytest.mark.parametrize("price", [0.0, 2.0])
@pytest.mark.parametrize("tiny", [1e-307, 1e-20])
def test_a_draft_row_with_a_tiny_second_mass_is_sampled(price: float, tiny: float) -> None:
    """1 + 1e-307 is 1, so that a sum of 1 does not show that other tokens are never drafted."""
    rows = [1.0, 0.0], [1.0, tiny]
    laws = ["coins_decide_as_declared", "no_token_without_target_mass"]
    assert assert_policy_properties(f"regret:price={price}", properties=laws, rows=rows).passed
