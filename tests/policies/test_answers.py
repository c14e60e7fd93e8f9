"""What rules of one's own answer is checked where it enters, under the rule's name."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Cycle, replay, save_trace
from cactus_theory.verify import Draft
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment

Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
P = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)
IDS = torch.tensor([[2, 2]])
ROWS = Q.expand(1, 3, 3), P.expand(1, 2, 3)
COINS = torch.full((1, 2), 0.9, dtype=torch.float64), torch.full((1, 3), 0.5, dtype=torch.float64)
ANSWERS = {
    "nan": lambda row: row * math.nan,
    "none": lambda row: None,
    "empty": lambda row: row * 0,
    "infinite": lambda row: row * math.inf,
}


class Refilled(ct.Policy):
    """Lossless but for what replaces a rejected token."""

    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def acceptance(self, q, p, n):
        return (q.double().gather(-1, n) / p.double().gather(-1, n)).clamp(max=1)

    def residual(self, q, p, n):
        return self.answer(q.double())


class Aimed(ct.policies.FixedTarget):
    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def target(self, q, p, path=None):
        return self.answer(q)


def function_rule(name, answer):
    def written(q, p, n):
        return min(1, q[n] / p[n])

    written.__name__ = name
    return ct.rule(residual=lambda q, p: answer(q))(written)


def function_row(name, answer):
    def written(q, p):
        return answer(q)

    written.__name__ = name
    return ct.rule(written)


def cycle():
    return [[Cycle(0, 0, IDS[0], ROWS[0][0], ROWS[1][0])]]


def chain_law(rule):
    return find_verifier("chain").law(Assignment((rule,)), ROWS[0], Draft(IDS, [2], ROWS[1]))


CALLS = {
    "emitted_law": lambda rule, _: ct.emitted_law(rule, Q, P),
    "audit": lambda rule, _: ct.audit(rule, Q, P),
    "chain": lambda rule, _: ct.verify_chain(rule, *ROWS, IDS, coins=(COINS[0], COINS[1][:, 0])),
    "unchecked": lambda rule, _: ct.verify_chain(
        rule, *ROWS, IDS, coins=(COINS[0], COINS[1][:, 0]), validate=False
    ),
    "block": lambda rule, _: ct.verify_block(rule, *ROWS, IDS, coins=(COINS[0], COINS[1][:, 0])),
    "tree": lambda rule, _: ct.verify_tree(rule, *ROWS, IDS, torch.tensor([[-1, 0]]), coins=COINS),
    "law": lambda rule, _: chain_law(rule),
    "replay": lambda rule, folder: replay(
        save_trace(folder / "t", cycle(), vocab_size=3, num_draft_tokens=2), rule, "chain"
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [Refilled, Aimed, function_rule, function_row])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_row_without_a_law_is_refused_by_the_name_of_its_rule(answer, kind, call, tmp_path):
    rule = kind("mine", ANSWERS[answer])
    if kind in (Refilled, function_rule) and call in ("block", "tree"):
        return  # refused: they have no row
    with pytest.raises(ValueError, match="mine|rows that decide a token"):
        CALLS[call](rule, tmp_path)


def test_an_acceptance_that_is_no_number_is_refused_where_the_token_can_be_drafted():
    class Lost(Refilled):
        def acceptance(self, q, p, n):
            return q.double().gather(-1, n) * math.nan

    @ct.rule
    def lost(q, p, n):
        return math.nan

    for rule in (Lost("lost", lambda row: row), lost):
        for call in ("emitted_law", "audit", "chain", "unchecked"):
            with pytest.raises(ValueError, match="lost.*must return numbers; got nan"):
                CALLS[call](rule, None)


def test_a_residual_that_nothing_needs_may_be_anything():
    class Quotient(Refilled):
        def residual(self, q, p, n):
            left = (q.double() - p).clamp(min=0)
            return left / left.sum(-1, keepdim=True)  # 0/0 where p = q

    rule = Quotient("quotient", None)
    assert ct.emitted_law(rule, Q, Q).equal(Q)
    step = ct.verify_chain(rule, ROWS[0], ROWS[0][:, :2], IDS, coins=(COINS[0], COINS[1][:, 0]))
    assert step.num_accepted.tolist() == [2]


@pytest.mark.parametrize("entries", [1, 12, 10**6])
def test_a_vectorised_rule_asked_in_parts_answers_as_if_asked_once(monkeypatch, entries):
    @ct.rule(vectorised=True)
    def half(q, p):
        return (q + p) / 2

    weights = torch.arange(30, dtype=torch.float64).view(10, 3)
    q, p = (((weights * own) % 7 + 1) for own in (3, 5))
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    monkeypatch.setattr("cactus_theory.policies.rule.ENTRIES", entries)
    torch.testing.assert_close(ct.emitted_law(half, q, p), (q + p) / 2, atol=1e-15, rtol=0)
