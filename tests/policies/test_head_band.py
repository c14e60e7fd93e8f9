"""The band that keeps to the head: a bisection, the kit, every way to decide, ends and ties."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.optimum.batch_edges import edges
from cactus_theory.optimum.boxes import Boxes, cut_to_boxes
from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.policies.band import Band
from cactus_theory.verify import Assignment, Draft, find_verifier
from tests.amounts import amount
from tests.optimum.test_boxes import SEARCHED, by_bisection
from tests.rows import pair, two_tokens

ROUNDING = 1e-12
KNOBS = ({"price": 0.5}, {"price": 3.0}, {"delta": 0.02}, {"delta": 0.3})


def rows(count=6, vocab=7, seed=4):
    return pair(count, vocab, seed=seed, kinds=("zeros", "smooth"))


def on_head(q, head):
    return q >= head * q.amax(-1, keepdim=True) * (1 - 1e-12)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("spec", ["kl", "pearson_chi2"])
def test_no_row_that_keeps_to_the_head_is_better(spec, knob):
    check_best(ct.policy("band", **knob, divergence=spec, head=0.3), *rows(amount(4, 25)))


def check_best(rule, q, p):
    """Check that a row by the rule is the best that is at most q off the head."""
    knob, kind = {rule.knob: getattr(rule, rule.knob)}, ct.divergence(rule.divergence)
    h, ceiling = rule.target(q, p), torch.where(on_head(q, rule.head), math.inf, 1.0).double()
    best = by_bisection(q, p, 0 * q, ceiling, kind, **knob)
    assert (h.sum(-1) - 1).abs().max() < ROUNDING
    assert (h - best).abs().max() <= SEARCHED


class CapsByDraft(Band):
    """Off the head h ≤ p instead of h ≤ q."""

    def target(self, q, p, path=None):
        h = Band(price=self.price).target(q, p)
        h = torch.where(on_head(q, self.head), h, torch.minimum(h, p))
        return h / h.sum(-1, keepdim=True)


class HeadOfDraft(Band):
    """The head is that of p."""

    def highest(self, q, p):
        return p >= self.head * p.amax(-1, keepdim=True)

    def target(self, q, p, path=None):
        c = torch.where(self.highest(q, p), math.inf, 1.0)
        cut, lacking = cut_to_boxes(q, p, torch.ones_like(q[:, 0]), None, c)
        lower, upper = edges(q, cut, ct.divergence("kl"), "price", self.price, lacking)
        return torch.maximum(torch.minimum(cut, torch.where(q > 0, upper * q, 0.0)), lower * q)


class TiesOff(HeadOfDraft):
    """A token of exactly the head's least share is off it."""

    def highest(self, q, p):
        return q > self.head * q.amax(-1, keepdim=True)


@pytest.mark.parametrize("planted", [CapsByDraft, HeadOfDraft, TiesOff])
def test_planted_mistakes_are_caught(planted):
    q, p = rows(4)
    # two at exactly half of the largest, one of them worth raising
    q[0] = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    p[0] = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    check_best(Band(price=0.5, head=0.5), q, p)
    with pytest.raises(AssertionError):
        check_best(planted(price=0.5, head=0.5), q, p)


class RaisesDeterministic(Band):
    """A deterministic token is raised wherever it is."""

    @property
    def look_ahead(self):
        return LookAhead(self.price)


def test_a_planted_row_that_raises_deterministic_tokens_off_the_head_is_caught():
    q = torch.tensor([[[0.1, 0.9], [0.4, 0.6], [0.5, 0.5]]], dtype=torch.float64)
    draft = Draft(torch.tensor([[0, 0]]), [2], None)
    most, laws = {}, {}
    for rule in (Band(price=0.4, head=0.2), RaisesDeterministic(price=0.4, head=0.2)):
        law = find_verifier("block").law(Assignment((rule,)), q, draft).emitted
        laws[type(rule)] = law
        most[type(rule)] = float((law[:, :2] - q[:, :2])[~on_head(q[:, :2], 0.2)].max())
    assert most[Band] < ROUNDING and most[RaisesDeterministic] > 0.1
    grown = 0.4 * math.exp(1 / 0.4)
    assert float(laws[Band][0, 1, 0]) == pytest.approx(grown / (0.6 + grown))


@pytest.mark.parametrize("knob", KNOBS)
def test_the_whole_vocabulary_as_head_is_the_band(knob):
    q, p = rows()
    q = (q + 0.01) / (q + 0.01).sum(-1, keepdim=True)
    least = float((q / q.amax(-1, keepdim=True)).min())
    plain, head = (ct.policy("band", **knob, head=share) for share in (0.0, least))
    assert torch.allclose(plain.target(q, p), head.target(q, p), rtol=0, atol=1e-9)
    assert ct.policy("band", **knob).head == 0 and plain.declares.optimal == ("delta" in knob)
    assert not head.declares.optimal and not head.declares.continuous


def test_ends_ties_and_rows_where_nothing_may_rise():
    q = torch.tensor([[0.4, 0.4, 0.2], [0.6, 0.3, 0.1]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64)
    end = ct.policy("band:price=0,head=1").target(q, p)
    # both of the best tokens may rise, to the draft; the third one keeps what is left
    assert end[0].tolist() == pytest.approx([0.5, 0.4, 0.1], abs=ROUNDING)
    assert end[1].tolist() == pytest.approx([0.6, 0.3, 0.1], abs=ROUNDING)  # h = q
    assert ct.policy("band:delta=inf,head=1").target(q, p).sub(end).abs().max() < ROUNDING
    assert ct.policy("band:price=inf,head=0.2").target(q, p).sub(q).abs().max() < ROUNDING
    third = q / 3 * 3 * (1 + 1e-15)  # divided by its sum a tie stays one
    assert ct.policy("band:price=0,head=1").target(third, p).sub(end).abs().max() < 1e-9
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match="head: must lie in"):
            ct.policy("band", price=1, head=wrong)


def test_a_deterministic_path_looks_ahead_on_the_head():
    """The recursion by hand: q = 0.1 off the head, then 0.4 on it, ν = 0.4: F_1 = 0.168."""
    nu, q_n = 0.4, torch.tensor([[0.1, 0.4]], dtype=torch.float64)
    raised = LookAhead(nu, Boxes(0.2)).path(*two_tokens(q_n), torch.tensor([2]))
    grown = 0.4 * math.exp(1 / nu)
    assert raised[0].tolist() == pytest.approx([0.1, grown / (0.6 + grown)])
    gain = nu * math.log(0.6 + grown)
    assert 0.1 * (1 + gain) == pytest.approx(0.168, abs=5e-4)
    # F of q = 0.1 off the head is 0.1, so that e^{1.1/ν} raises q = 0.4 before it
    raised = LookAhead(nu, Boxes(0.2)).path(*two_tokens(q_n.flip(-1)), torch.tensor([2]))
    before = 0.4 * math.exp(1.1 / nu)
    assert raised[0].tolist() == pytest.approx([before / (0.6 + before), 0.1])
