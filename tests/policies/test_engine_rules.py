"""Laws of the rules that engines ship: enumerated, drawn from their documentation, and by hand."""

import numpy as np
import pytest

import cactus_theory as ct
from tests.amounts import amount
from tests.rows import numpy_pairs

EXACT = 1e-12
RULES = (
    "relaxed:k=1,delta=0",
    "relaxed:k=1,delta=0,recover=argmax",
    "relaxed:k=10,delta=0.01",
    "relaxed:k=3,delta=0.2",
    "relaxed:k=2,delta=0.6,recover=argmax",
    "relaxed:k=3,delta=inf",
    "thresholds",
    "thresholds:acc=0.5",
    "thresholds:single=0.3,acc=0.3",
    "thresholds:single=0.2,acc=0.9",
    "thresholds:single=0,acc=0",
)


def documented(spec, q, p, n, u):
    """Return whether one drafted token is accepted and the row that replaces it, by plain loops."""
    name, _, rest = spec.partition(":")
    knobs = dict(item.split("=") for item in rest.split(",") if item)
    order = sorted(range(len(q)), key=lambda i: (-q[i], i))
    best = [1.0 if i == order[0] else 0.0 for i in range(len(q))]
    if name == "thresholds":
        single, acc = (float(knobs.get(own, 1)) for own in ("single", "acc"))
        accepted = q[n] > 0 and (q[n] >= single or u * acc < q[n])
        left = [0.0 if i == n else x for i, x in enumerate(q)]
        return accepted, left if sum(left) else list(q)
    k, delta = int(knobs.get("k", 10)), float(knobs.get("delta", 0.6))
    least = sorted(q, reverse=True)[min(k, len(q)) - 1]
    accepted = q[n] > 0 and q[n] >= least and q[n] >= max(q) * (1 - 1e-12) - delta
    return accepted, best if knobs.get("recover") == "argmax" else list(q)


def chances(spec, q, p, n):
    """Return φ(n) and g(·|n), the coin integrated over its only threshold."""
    accepted, rest = documented(spec, q, p, n, 0.0)
    if not accepted:
        return 0.0, rest
    if documented(spec, q, p, n, 1 - 1e-15)[0]:
        return 1.0, rest
    acc = spec.partition("acc=")[2].partition(",")[0] or 1
    return q[n] / float(acc), rest


@pytest.mark.parametrize("spec", RULES)
def test_the_law_is_enumerated(spec):
    rule = ct.policy(spec)
    q, p = numpy_pairs(amount(24, 400), 5, 1)
    law = ct.emitted_law(rule, q, p)
    for row in range(len(q)):
        expected = np.zeros(5)
        for n in range(5):
            phi, rest = chances(spec, q[row].tolist(), p[row].tolist(), n)
            replaced = np.array(rest) / sum(rest)
            expected += p[row, n] * (phi * np.eye(5)[n] + (1 - phi) * replaced)
        np.testing.assert_allclose(law[row], expected, atol=EXACT)


def test_sglangs_defaults_are_lossless_and_below_them_the_price_is_bounded():
    q, p = numpy_pairs(200, 6, 3)
    np.testing.assert_allclose(ct.emitted_law(ct.policy("thresholds"), q, p), q, atol=EXACT)
    accepted = ct.audit(ct.policy("thresholds"), q, p).acceptance
    np.testing.assert_allclose(accepted, (p * q).sum(-1), atol=EXACT)
    for single, acc in ((1, 0.4), (0.2, 0.7), (0.3, 0.3)):
        law = ct.emitted_law(ct.policy("thresholds", single=single, acc=acc), q, p)
        assert (law <= q / min(single, acc) + EXACT).all()
    law = ct.emitted_law(ct.policy("thresholds:acc=0.4"), [0.2, 0.8], [1.0, 0.0])
    np.testing.assert_allclose(law, [0.5, 0.5])  # min(1, 0.2/0.4); the bound is 0.5 itself
