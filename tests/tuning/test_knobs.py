"""A knob is solved on any rows, and a rule whose knob cannot be solved says why."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import replay
from cactus_theory.tuning.knobs import CLOSE, EXACT, Unsolved

DRAWN = np.random.default_rng(5)
ROWS = tuple(DRAWN.dirichlet(np.full(24, 0.3), 60) for _ in range(2))
# knobs of this package whose policies declare that nothing jumps
CONTINUOUS = ("lenience", "mixture", "cactus", "cactus_exact", "band", "band:delta",
              "band:hold=3", "thresholds", "speculative:tilt")  # fmt: skip


def spent(policy: ct.Policy) -> tuple[float, float]:
    """Return mean nats and acceptance on ROWS, by the audit."""
    seen = ct.audit(policy, *ROWS)
    return seen.divergences["kl"].mean(), seen.acceptance.mean()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_every_continuous_knob_is_solved(name: str) -> None:
    for level in (0.01, 0.2):
        found, _ = spent(ct.solve_knob(name, ROWS, nats=level))
        assert found == pytest.approx(level, rel=EXACT)
    if name not in (
        "speculative:tilt",
        "thresholds",
    ):  # which accept less than lossless sampling may
        level = 0.5 * (spent(ct.policy("speculative"))[1] + 0.9)
        _, accepted = spent(ct.solve_knob(name, ROWS, acceptance=level))
        assert accepted == pytest.approx(level, rel=CLOSE)


def entry(row, n):
    return row.gather(-1, n[..., None])[..., 0]


@ct.rule(vectorised=True, direction=1, knob_range=(0.0, 1.0))
def there_and_back(q, p, n, *, share=0.0):
    """Most is spent at a half of the range, nothing at both ends."""
    return ((1 + 8 * share * (1 - share)) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, knob_range=(0.0, 1.0))
def hidden(q, p, n, *, share=0.0):
    """Nothing is spent but near 0.7, which neither end of the range shows."""
    return ((1 + 8 * max(0, 1 - 20 * abs(share - 0.7))) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, strict=0.0, knob_range=(0.0, 0.01))
def timid(q, p, n, *, delta=0.0):
    return ((1 + delta) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, direction=-1, strict=1.0, knob_range=(0.1, 1.0))
def declared(q, p, n, *, leniency=1.0):
    return (entry(q, n) / (leniency * entry(p, n))).clamp(max=1)


@ct.rule(vectorised=True, strict=0.0)
def undeclared(q, p, n, *, delta=0.3):
    return ((1 + delta) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, direction=1, strict=0.0)
def jumping(q, p, n, *, delta=0.3):
    return ((1 + 3 * (delta > 0.5)) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, strict=0.0)
def wild(q, p, n, *, delta=0.3):
    raise RuntimeError("no such rows")


@ct.rule(vectorised=True, direction=1, strict=0.0)
def limited(q, p, n, *, delta=0.3):
    if delta > 0.5:
        raise RuntimeError("too far")
    return ((1 + delta) * entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule
def plain(q, p, n):
    return min(1, q[n] / p[n])


@pytest.mark.parametrize("rule", [there_and_back, hidden, declared, undeclared, limited])
def test_rules_are_solved_by_what_they_declare_monotone_or_not(rule) -> None:
    solved = ct.solve_knob(rule, ROWS, nats=0.01)
    assert spent(solved)[0] == pytest.approx(0.01, rel=EXACT)
    assert type(solved) is type(rule)


@pytest.mark.parametrize(
    ("rule", "nats", "said"),
    [
        (there_and_back, 5.0, r"there_and_back:share: reaches at most 0\.\d+ nats at share=0.\d+"),
        (timid, 0.05, r"timid:delta: reaches at most 8\.\d+e-06 nats at delta=0.01"),
        (jumping, 0.02, r"jumping:delta: jumps past 0.02 nats, from \S+ at delta=0.5 to 0.\d+"),
        (limited, 0.05, r"reaches at most 0.01\d+ nats at delta=0.5, elsewhere raises Runtime"),
        (wild, 0.05, "wild:delta: raises RuntimeError: no such rows"),
        (plain, 0.05, "plain: has no knob"),
        ("top_k", 1e-6, r"top_k:k: reaches at least 0.\d+ nats"),
        ("lenience:lenience=0.3", 0.1, "lenience:lenience=0.3: has no knob that is free"),
    ],
)
def test_a_rule_that_cannot_be_solved_says_why(rule, nats: float, said: str) -> None:
    with pytest.raises(Unsolved, match=said):
        ct.solve_knob(rule, ROWS, nats=nats)


@pytest.mark.parametrize(("steps", "solved"), [(3000, True), (20, False)])
def test_a_rule_whose_nats_rise_in_steps_is_solved_within_a_hundredth(steps, solved) -> None:
    @ct.rule(vectorised=True, direction=+1, strict=0.0, knob_range=(0, 1))
    def stepped(q, p, *, share=0.1):
        rounded = math.floor(steps * share) / steps
        return (1 - rounded) * q + rounded * p

    if solved:
        nats = spent(ct.solve_knob(stepped, ROWS, nats=0.02))[0]
        assert 0.99 * 0.02 <= nats <= 0.02 * (1 + EXACT)
    else:
        with pytest.raises(Unsolved, match="jumps past 0.02 nats"):
            ct.solve_knob(stepped, ROWS, nats=0.02)


def test_solving_a_slow_rule_says_how_it_could_be_faster(monkeypatch) -> None:
    monkeypatch.setattr("cactus_theory.tuning.knobs.SLOW_SECONDS", 0.0)

    @ct.rule(direction=+1, strict=0.0)
    def slow(q, p, n, *, delta=0.1):
        return min(1, (1 + delta) * q[n] / p[n])

    with pytest.warns(UserWarning, match=r"slow: took \d s at one value .* f\(q, p\), which"):
        ct.solve_knob(slow, ROWS, nats=0.01)


def test_a_rule_that_jumps_at_its_lossless_end_is_given_up_after_few_passes() -> None:
    passes = []

    @ct.rule(vectorised=True, direction=+1, strict=0.0, knob_range=(0, 1))
    def between(q, p, *, share=0.1):
        passes.append(share)
        h = q ** (1 - share) * p**share
        return h / h.sum(-1, keepdim=True)

    q, p = torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.9, 0.1, 0.0])
    with pytest.raises(Unsolved, match="between:share: reaches at least 0.3"):
        ct.solve_knob(between, (q, p), nats=0.05)
    assert 1e-9 in passes and len(set(passes)) < 20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nats, acceptance, regret: exactly one must be given; got none of them"),
        ({"nats": 0.1, "acceptance": 0.9}, "got nats and acceptance"),
        ({"nats": 0.0}, r"nats: must lie in \(0, inf\]; got 0.0"),
        ({"acceptance": 1.5}, r"acceptance: must lie in \(0, 1\]; got 1.5"),
    ],
)
def test_bad_requests_are_named(given, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ct.solve_knob("band", ROWS, **given)


def test_on_a_trace_the_meter_is_solved_for_a_verifier_and_k(trace) -> None:
    solved = ct.solve_knob("band", trace, nats=0.05, verifier="block", num_draft_tokens=2)
    again = replay(trace, solved, "block", num_draft_tokens=2)
    assert again.divergence_per_token().value == pytest.approx(0.05, rel=EXACT)
    solved = ct.solve_knob("lenience", trace.folder, acceptance=0.9)
    assert replay(trace, solved).acceptance.value == pytest.approx(0.9, rel=CLOSE)


def test_knobs_are_solved_for_an_engine_that_draws_undrafted_tokens_itself(trace) -> None:
    """It emits some of the tokens at no cost: the same nats a token leave more for the others."""
    knobs, given = {}, {"nats": 0.05, "num_draft_tokens": 2}
    for undrafted in ("policy", "target"):
        solved = ct.solve_knob("speculative:tilt", trace, undrafted=undrafted, **given)
        again = replay(trace, solved, num_draft_tokens=2, undrafted=undrafted)
        assert again.divergence_per_token().value == pytest.approx(0.05, rel=EXACT)
        seen = ct.compare(["speculative:tilt"], trace, nats=0.05, widths=[2], undrafted=undrafted)
        (line,) = seen.lines[1:]
        assert line["policy"] == solved.spec
        knobs[undrafted] = solved.tilt
    assert knobs["target"] > knobs["policy"] > 0


def test_a_file_of_rows(tmp_path) -> None:
    np.savez(tmp_path / "rows.npz", target=ROWS[0], draft=ROWS[1])
    solved = ct.solve_knob("mixture", tmp_path / "rows.npz", nats=0.05)
    assert solved == ct.solve_knob("mixture", ROWS, nats=0.05)
    with pytest.raises(TypeError, match="rows: must be two arrays"):
        ct.solve_knob("mixture", 3, nats=0.05)
