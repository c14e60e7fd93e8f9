"""The closed forms against stored answers of the convex programs; no solver is needed here."""

from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.formulas import TEN

FILE = Path(__file__).parent / "data" / "reference.npz"
# interior-point answers are good to about 1e-9 in value; the row is flat around the optimum
VALUE = 1e-6
ROW = 2e-3
PRICE = 1e-3
SMALLEST_PRICE = 1e-3
# beyond this h/q some generators are all but straight, and any split among such tokens is as good
STRAIGHT = 100
LINEAR = ("total_variation", "max_divergence")
LARGEST_FILE = 1_000_000


@pytest.fixture(scope="module")
def stored():
    with np.load(FILE, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def cases(stored, spec):
    """Return one dict a case, rows cut to the tokens that count."""
    fields = [name for name, values in stored.items() if values.ndim]
    for index in np.flatnonzero(stored["divergence"] == spec):
        case = {name: stored[name][index] for name in fields}
        for name in ("target_probs", "draft_probs", "target"):
            assert not case[name][case["vocabulary"] :].any()
            case[name] = case[name][: case["vocabulary"]]
        yield case


def solved(case, kind):
    rows = [kind(case[name]) for name in ("target_probs", "draft_probs")]
    knobs = {"delta": float(case["delta"]), "support": str(case["support"])}
    return ct.optimal_acceptance(*rows, divergence=str(case["divergence"]), **knobs)


def clearly_binding(case, closed):
    smooth = case["divergence"] not in LINEAR
    return smooth and closed.price > SMALLEST_PRICE and closed.divergence > case["delta"] - 1e-9


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("spec", TEN)
def test_the_optimum_is_the_stored_one(stored, spec, kind):
    bound_rows = 0
    for case in cases(stored, spec):
        closed = solved(case, kind)
        assert float(closed.acceptance) == pytest.approx(case["acceptance"], abs=VALUE)
        assert abs(float(closed.gap)) <= 1e-8
        assert closed.divergence <= case["delta"] + 1e-9
        if clearly_binding(case, closed):
            bound_rows += 1
            assert float(closed.price) == pytest.approx(case["price"], rel=PRICE)
            inside = (case["target_probs"] > 0) & (float(closed.upper) <= STRAIGHT)
            np.testing.assert_allclose(
                np.asarray(closed.target)[inside], case["target"][inside], atol=ROW
            )
    assert bound_rows >= 8 or spec in LINEAR


@pytest.mark.parametrize("spec", TEN)
def test_the_raised_token_is_the_stored_one(stored, spec):
    for case in cases(stored, spec):
        rule = ct.policy("cactus_exact", delta=float(case["delta"]), divergence=spec)
        q_n = torch.tensor(case["target_probs"][case["token"]])
        assert float(rule.gamma(q_n)) == pytest.approx(case["raised"], abs=VALUE)


def test_what_the_file_holds(stored):
    assert FILE.stat().st_size <= LARGEST_FILE
    assert all((stored["divergence"] == spec).sum() == 20 for spec in TEN)
    assert len(stored["delta"]) == 200 and stored["vocabulary"].max() <= 64
    assert (stored["gap"] <= VALUE).all() and (stored["delta"] > 0).all()
    assert set(stored["support"]) == {"target", "free"}
    q, p = stored["target_probs"], stored["draft_probs"]
    real = np.arange(q.shape[1]) < stored["vocabulary"][:, None]
    assert ((q == 0) & (p > 0)).any() and ((p == 0) & (q > 0)).any()
    assert ((p == 1).sum(-1) > 0).any(), "a one-hot draft"
    assert not (q + p)[~real].any()
    assert "cvxpy 1." in str(stored["versions"]) and len(str(stored["date"])) == 10
    assert set(stored["solver"]) == {"CLARABEL", "HIGHS"}
