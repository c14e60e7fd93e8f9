"""A divergence added by one class and one registration is taken everywhere one is named."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import Divergence, FDivergence, definition
from cactus_theory.divergences.classical import Alpha
from solvers import _divergence_budget, _perspective, block, optimal
from tests.rows import pair
from tests.solvers.cases import random_tree

CLOSE = 1e-9


@pytest.fixture
def registry(monkeypatch):
    """Forget what a test registers."""
    monkeypatch.setattr(definition.DIVERGENCES, "known", dict(definition.DIVERGENCES.known))
    for forms in (_perspective._FORMS, _divergence_budget._LEFT_SIDES):
        monkeypatch.delitem(forms, Jeffreys, raising=False)


@dataclass(frozen=True)
class Jeffreys(FDivergence):
    """w·KL(h‖q) + KL(q‖h): f = (w t − 1) ln t, which has no closed inverse slope at all w."""

    weight: float

    name = "jeffreys"
    example = {"weight": 1.0}
    at_zero = math.inf

    @property
    def slope_at_one(self):
        return self.weight - 1

    def f(self, t):
        return (self.weight * t - 1) * t.log()

    def slope(self, t):
        return self.weight * (t.log() + 1) - 1 / t

    def slope_inverse(self, y):
        low, high = torch.full_like(y, -700.0), torch.full_like(y, 700.0)
        for _ in range(80):
            middle = (low + high) / 2
            below = self.slope(middle.exp()) < y
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return low.exp()


def both_kl(weight, h, q):
    forward, backward = ct.divergence("kl"), ct.divergence("reverse_kl")
    return weight * forward.value(h, q) + backward.value(h, q)


def test_it_works_wherever_a_divergence_is_named(registry):
    ct.register_divergence(Jeffreys)
    q, p = pair(8, 60, seed=31)
    spec = "jeffreys:weight=0.5"
    best = ct.optimal_acceptance(q, p, divergence=spec, delta=0.05)
    assert (best.gap.abs() <= 1e-12).all() and (best.divergence <= 0.05 + 1e-12).all()
    torch.testing.assert_close(best.divergence, both_kl(0.5, best.target, q))
    assert ct.divergence(spec).weight == 0.5 and ct.divergence(spec).spec == spec
    priced = ct.optimal_acceptance(q, p, divergence=spec, price=best.price)
    torch.testing.assert_close(priced.target, best.target, rtol=0, atol=CLOSE)
    for knob in ({"delta": 0.05}, {"price": 1.0}):
        rule = ct.policy("band", **knob, divergence=spec)
        optimum = ct.optimal_acceptance(q, p, divergence=spec, **knob)
        torch.testing.assert_close(ct.emitted_law(rule, q, p), optimum.target, rtol=0, atol=CLOSE)
    curve = ct.pooled_frontier(q, p, divergence=spec, points=9)
    assert (curve.acceptance.diff() > 0).all() and (curve.price.diff() <= 0).all()


def test_audits_and_per_proposal_rules_take_it(registry):
    ct.register_divergence(Jeffreys)
    q, p = pair(4, 12, seed=31)
    rule = ct.policy("cactus_exact", delta=0.05, divergence="jeffreys:weight=2")
    report = ct.audit(rule, q, p, divergence="jeffreys:weight=2")
    assert report.within.all() and (report.acceptance <= report.optimum_acceptance + CLOSE).all()
    law = ct.emitted_law(rule, q, p)
    assert {"jeffreys:weight=1", "jeffreys:weight=2"} <= set(report.divergences)
    torch.testing.assert_close(report.divergences["jeffreys:weight=1"], both_kl(1.0, law, q))


def test_solvers_name_the_form_that_they_lack_and_take_it_once_entered(registry):
    ct.register_divergence(Jeffreys)
    q, p = (row[0].numpy() for row in pair(1, 6, seed=31))
    spec = "jeffreys:weight=0.5"
    with pytest.raises(ValueError, match=r"@perspective_of\(Jeffreys\) .*solvers/_perspective.py"):
        optimal.solve(q, p, spec, delta=0.05)

    @_perspective.perspective_of(Jeffreys)
    def both(terms, f):
        return f.weight * _perspective._kl(terms, f) + _perspective._reverse_kl(terms, f)

    solved = optimal.solve(q, p, spec, delta=0.05)
    best = ct.optimal_acceptance(q, p, divergence=spec, delta=0.05)
    assert solved.acceptance == pytest.approx(float(best.acceptance), abs=1e-7)
    assert solved.price == pytest.approx(float(best.price), rel=1e-4)
    assert abs(block.solve(random_tree(2, 2, seed=1), spec, price=1.0).gap) < 1e-6


def test_a_whole_sum_of_its_own_is_taken_in_place_of_the_table(registry):
    ct.register_divergence(Jeffreys)
    q, p = (row[0].numpy() for row in pair(1, 6, seed=31))

    @_divergence_budget.left_side_of(Jeffreys)
    def forward(row, f):
        return f.weight * _divergence_budget.left_side(row, ct.divergence("kl"))

    with pytest.raises(RuntimeError, match="exceeds"):  # half of it is missing
        optimal.solve(q, p, "jeffreys:weight=1", delta=0.05)


def test_an_increasing_function_of_a_generator_needs_no_form_of_its_own(registry):
    """√(χ²): its budget δ is χ²'s δ², and its price χ²'s times 2D."""

    @ct.register_divergence
    class Root(Divergence):
        name = "root_chi2"
        concave_frontier = False
        generator = ct.divergence("pearson_chi2")

        def to_generator(self, delta):
            return delta**2

        def from_generator(self, value):
            return value.sqrt()

        def price_from_generator(self, price, value):
            return 2 * value * price

        def value(self, emitted, target):
            return self.from_generator(self.generator.value(emitted, target))

    q, p = (row[0].numpy() for row in pair(1, 6, seed=31))
    one = ct.optimal_acceptance(q, p, divergence="root_chi2", delta=0.2)
    same = ct.optimal_acceptance(q, p, divergence="pearson_chi2", delta=0.04)
    np.testing.assert_allclose(one.target, same.target, atol=1e-12)
    assert float(one.price) == pytest.approx(0.4 * float(same.price))
    assert optimal.solve(q, p, "root_chi2", delta=0.2).price == pytest.approx(
        float(one.price), rel=1e-4
    )
    with pytest.raises(ValueError, match="price: root_chi2 has no one-to-one price"):
        ct.optimal_acceptance(q, p, divergence="root_chi2", price=1.0)


def refused(message, error=ValueError, base=FDivergence, **body):
    with pytest.raises(error, match=message):
        ct.register_divergence(type("Wrong", (base,), body))


def test_registration_looks_at_what_it_is_given(registry):
    name, one = {"name": "wrong"}, torch.ones_like
    refused("name: must be set .* got 'divergence'")
    refused("name: must be set and not registered already; got 'kl'", name="kl")
    refused("example: must name the knobs none of wrong; got", **name, example={"b": 1.0})
    refused("example: must name the knobs a of wrong; got {}", base=Alpha, **name, example={})
    refused(r"f: must be 0 at 1 \(wrong\); got 1", **name, f=lambda self, t: one(t))
    flat = {"f": lambda self, t: t - t, "slope": lambda self, t: one(t)}
    refused(r"slope_at_one: must equal slope\(1\) \(wrong\); got 0 and 1", **name, **flat)
    with pytest.raises(TypeError, match="divergence: must be a Divergence class; got 3"):
        ct.register_divergence(3)
