"""The tilted band: by program, by certificate, at its corners, and where no row exists."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.optimum import tilted
from cactus_theory.optimum.batch_edges import solve_edges
from cactus_theory.optimum.tilted import tilted_rows
from solvers.design import Design, Infeasible
from tests.amounts import amount

# of the acceptance: the solver's own accuracy, whose rows are good to its square root
VALUE, ROW = 1e-7, 2e-4
# of worth, nats and gap, in float64 sums over a row
ROUNDING = 1e-9
WORTHS = ("log", "probability", "reward", "rare")


def case(seed: int, vocab: int, kind: str):
    """Return q, p and a worth: rows with zeros, worths of a large range and with ties."""
    source = np.random.default_rng(seed)
    q, p = source.dirichlet(np.full(vocab, 0.6), 2)
    if seed % 2:
        q[source.random(vocab) < 0.2] = 0
        p[source.random(vocab) < 0.2] = 0
        q[0], p[-1] = q[0] + 0.01, p[-1] + 0.01
    q, p = q / q.sum(), p / p.sum()
    worth = {
        "log": np.log(np.where(q > 0, q, 1.0)),
        "probability": q,
        "reward": source.normal(size=vocab) * 10.0 ** source.integers(-2, 3),
        "rare": -(source.random(vocab) < 0.3).astype(float),
    }[kind]
    return q, p, worth


def limits(seed: int, q, worth):
    """Return nats, and a worth around the target's."""
    spread = float(np.abs(worth[q > 0]).mean())
    return (0.01, 0.1, 0.5, 3.0)[seed % 4], float(q @ worth) + (0.0, 0.1, -0.1)[seed % 3] * spread


def test_the_gap_covers_nats_that_the_edges_leave_unspent(monkeypatch) -> None:
    q, p, worth = case(0, 40, "log")
    given = {"delta": 0.1, "at_least": float(worth.min())}  # nats alone bind
    best = ct.tilted_acceptance(q, p, worth, **given)
    half = lambda geometry, kind, nats: solve_edges(geometry, kind, nats / 2)  # noqa: E731
    monkeypatch.setattr(tilted, "solve_edges", half)
    less = ct.tilted_acceptance(q, p, worth, **given)
    assert less.acceptance < best.acceptance - 0.01
    assert less.acceptance + less.gap >= best.acceptance


@pytest.mark.parametrize("kind", WORTHS)
def test_it_is_the_program_s_optimum_and_its_certificate_holds(kind: str) -> None:
    bound_by = set()
    for seed in range(amount(8, 60)):
        q, p, worth = case(seed, (2, 3, 7, 40, 400)[seed % 5], kind)
        delta, least = limits(seed, q, worth)
        program = Design(q, p).budget("kl", delta).expect(worth, at_least=least)
        try:
            best = ct.tilted_acceptance(q, p, worth, delta=delta, at_least=least)
        except ValueError as error:
            assert "a row must exist within both" in str(error)
            with pytest.raises(Infeasible):
                program.solve()
            continue
        due = program.solve()
        assert best.acceptance == pytest.approx(due.acceptance, abs=VALUE)
        if 0 < best.price < math.inf and math.isfinite(best.tilt):  # else other rows are as good
            assert np.abs(best.target - due.target).max() < ROW
        assert best.divergence <= delta + ROUNDING and best.worth >= least - ROUNDING
        assert best.target.sum() == pytest.approx(1, abs=ROUNDING)
        assert best.target[q == 0].sum() == 0
        assert abs(best.gap) < ROUNDING
        bound_by.add("nats" if best.tilt == 0 else "worth" if math.isinf(best.tilt) else "both")
    assert len(bound_by) >= 2


def test_what_neither_limit_binds_is_the_plain_optimum() -> None:
    q, p, worth = case(0, 30, "reward")
    plain = ct.optimal_acceptance(q, p, delta=0.05)
    best = ct.tilted_acceptance(q, p, worth, delta=0.05, at_least=float(worth.min()))
    assert best.tilt == 0 and np.array_equal(best.target, plain.target)
    assert best.price == plain.price and abs(best.gap - plain.gap) < ROUNDING


def test_a_batch_is_its_rows_in_every_kind_and_precision() -> None:
    rows = [case(seed, 9, "log") for seed in (0, 2, 4)]
    q, p, worth = (np.stack(part) for part in zip(*rows, strict=True))
    least = (q * worth).sum(-1)
    best = ct.tilted_acceptance(q, p, worth, delta=0.02, at_least=least)
    for row in range(3):
        own = q[row], p[row], worth[row]
        one = ct.tilted_acceptance(*own, delta=0.02, at_least=least[row])
        assert np.array_equal(best.target[row], one.target) and best.tilt[row] == one.tilt
    single = (torch.from_numpy(part).float() for part in (q, p))
    half = ct.tilted_acceptance(*single, worth, delta=0.02, at_least=least - 1e-6)
    assert half.target.dtype == torch.float32 and half.acceptance.dtype == torch.float64
    assert np.allclose(half.target.numpy(), best.target, atol=1e-5)


@pytest.mark.parametrize("kind", ["log", "reward"])
def test_the_certificate_at_a_real_vocabulary(kind: str) -> None:
    source = np.random.default_rng(1)
    q = source.dirichlet(np.full(151_936, 0.05))
    p = q * source.lognormal(size=q.size)
    p /= p.sum()
    worth = np.log(np.where(q > 0, q, 1.0)) if kind == "log" else source.normal(size=q.size)
    least = float(q @ worth) + 0.02
    best = ct.tilted_acceptance(q, p, worth, delta=0.05, at_least=least)
    assert abs(best.gap) < ROUNDING and best.divergence == pytest.approx(0.05, abs=ROUNDING)
    assert best.worth == pytest.approx(least, abs=ROUNDING) and best.tilt > 0


def test_one_hot_rows_no_nats_and_all_nats() -> None:
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 0.0])
    worth = np.array([2.0, 0.0, 1.0])
    strict = ct.tilted_acceptance(q, p, worth, delta=0.0, at_least=1.2)
    assert np.array_equal(strict.target, q) and strict.tilt == 0
    free = ct.tilted_acceptance(q, p, worth, delta=math.inf, at_least=1.2)
    assert np.allclose(free.target, [0.6, 0.4, 0.0]) and free.acceptance == pytest.approx(0.4)
    sure = ct.tilted_acceptance(np.array([0.0, 1.0, 0.0]), q, worth, delta=0.1, at_least=0.0)
    assert np.array_equal(sure.target, [0.0, 1.0, 0.0])


@pytest.mark.parametrize(("unit", "shift"), [(1e-30, 0.0), (1e200, 0.0), (1.0, 1e6)])
def test_a_worth_may_have_any_unit_and_any_zero(unit: float, shift: float) -> None:
    q, p, worth = case(0, 30, "log")
    least = float(q @ worth) + 0.02
    due = ct.tilted_acceptance(q, p, worth, delta=0.05, at_least=least)
    own = worth * unit + shift, {"delta": 0.05, "at_least": least * unit + shift}
    best = ct.tilted_acceptance(q, p, own[0], **own[1])
    assert due.tilt > 0 and best.tilt * unit == pytest.approx(due.tilt, rel=1e-6)
    assert np.allclose(best.target, due.target, atol=1e-8)


def test_nats_are_not_monotone_in_the_price_at_a_fixed_tilt() -> None:
    """The example of THEORY.md, Theorem 28; KL(h‖q) − θ Σ h r rises as the price falls."""
    q, p = (torch.tensor([row], dtype=torch.float64) for row in ([0.6, 0.3, 0.1], [0.2, 0.4, 0.4]))
    about, log_z = tilted_rows(q, q.log(), torch.tensor([0.5], dtype=torch.float64))
    spent, budgets = [], []
    for price in (5.0, 2.0, 1.5):
        h = ct.optimal_acceptance(about, p, price=price).target
        spent.append(float(ct.divergence("kl").value(h, q)))
        budgets.append(spent[-1] - 0.5 * float((h * q.log()).sum()))
        same = float(ct.divergence("kl").value(h, about) - log_z)
        assert budgets[-1] == pytest.approx(same, abs=1e-14)  # part (1)
    assert [round(own, 4) for own in spent] == [0.0155, 0.0096, 0.0157]
    assert budgets == sorted(budgets)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"worth": [1.0, math.inf, 0.0]}, "worth: must be finite"),
        ({"delta": -1.0}, "delta: must"),
        ({"at_least": math.nan}, "at_least: must"),
        ({"worth": [1.0, 0.0]}, "worth: must be numbers that broadcast"),
        ({"worth": ["a", "b", "c"]}, "worth: must be numbers that broadcast"),
        (
            {"at_least": 1.1},
            "a row must exist within both; got a worth that is above that of every",
        ),
        ({"at_least": 1.1, "delta": 3.0}, "above that of every"),  # nats for any row
        ({"at_least": 0.9}, "takes 0.5"),
    ],
)
def test_bad_requests_are_named(changed, said: str) -> None:
    given = {"worth": [1.0, 0.0, 0.0], "delta": 0.1, "at_least": 0.5} | changed
    rows = np.array([0.4, 0.3, 0.3]), np.array([0.3, 0.3, 0.4])
    with pytest.raises(ValueError, match=said):
        ct.tilted_acceptance(*rows, given.pop("worth"), **given)


@pytest.mark.parametrize("boxes", ["head=0.3", "floor=1+2", "hold=0+3", "head=0.5,hold=1"])
def test_boxes_are_those_of_the_target_and_the_row_is_the_program_s(boxes: str) -> None:
    for seed in range(amount(6, 30)):
        q, p, _ = case(2 * seed, (4, 9, 40)[seed % 3], "log")
        tilt, price = (0.1, 0.6, -0.3)[seed % 3], (0.5, 1.0, 3.0)[seed // 3 % 3]
        rule = ct.policy(f"band:price={price},tilt={tilt},{boxes}")
        h, logs = ct.emitted_law(rule, q, p), np.log(q)
        own = rule.boxes
        off = [i for i in range(len(q)) if own.head and q[i] < own.head * q.max()]
        program = Design(q, p).budget("kl", float(h @ np.log(h / q)))
        least = {"at_least": float(h @ logs)} if tilt > 0 else {"at_most": float(h @ logs)}
        program = program.expect(logs, **least)
        if fixed := [*{*off, *own.held}]:
            program = program.protect(fixed)
        program = program.floor({i: float(q[i]) for i in own.ids})
        due, accepted = program.solve(), float(np.minimum(p, h).sum())
        assert accepted == pytest.approx(due.acceptance, abs=VALUE)
        assert np.allclose(h[list(own.held)], q[list(own.held)], rtol=0, atol=ROUNDING)
        assert (h[list(own.ids)] >= q[list(own.ids)] - ROUNDING).all()
        assert (h[off] <= q[off] + ROUNDING).all()


def test_the_best_token_s_worth_may_be_missed_by_rounding() -> None:
    rows = np.array([0.4, 0.3, 0.3]), np.array([0.3, 0.3, 0.4])
    for over in (0.0, 1e-15, 1e-10):
        best = ct.tilted_acceptance(*rows, [1.0, 0.0, 0.0], delta=3.0, at_least=1 + over)
        assert np.allclose(best.target, [1, 0, 0]) and abs(best.gap) < ROUNDING


def test_an_undrafted_row_keeps_its_boxes() -> None:
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    free = ct.policy("band:price=1,tilt=1,hold=0").undrafted(q)
    assert free.tolist() == pytest.approx([0.5, 9 / 26, 4 / 26], abs=ROUNDING)
