"""What a failed check tells: a fault once, its likely cause, and a call that fails again."""

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cactus_theory as ct
from cactus_theory.policies.registry import policy_of_data
from cactus_theory.testing import assert_policy_properties


@ct.rule
def lavish(q, p, n, *, times=1.5):
    return times * min(1, q[n] / p[n])


@ct.rule
def short(q, p, n):
    if len(q) > 2:
        raise ValueError("q is too long")
    return min(1, q[n] / p[n])


@ct.rule
def beyond(q, p, n):
    return min(1, q[n] / p[n]) * (q[2] >= 0)


@ct.rule(direction=1)
def humped(q, p, n, *, a=0.5):
    return min(1, q[n] / p[n]) * (1 - (a - 0.5) ** 2)


@ct.rule(direction=1)
def falling(q, p, n, *, a=0.5):
    return min(1, q[n] / p[n]) / (1 + a)


@ct.rule
def cactus(q, p, n, *, delta=1.5):
    return delta * min(1, q[n] / p[n])


@dataclass(frozen=True)
class Unnamed(ct.PerProposal):
    """A class that is not registered, with a declaration that does not hold."""

    delta: float = 0.5

    @property
    def declares(self):
        return ct.Declaration(budget=ct.Budget("kl", 0.0, "emitted"))

    def raised(self, q_n):
        return q_n * (1 + self.delta)


class Child(Unnamed):
    """A class that is not registered, with the name of one that is."""

    name = "cactus"


def told(policy, **options) -> str:
    with pytest.raises(AssertionError) as found:
        assert_policy_properties(policy, **{"examples": 20} | options)
    return str(found.value)


def test_a_fault_is_told_once_and_what_else_is_broken_by_name() -> None:
    text = told(lavish, properties=["acceptance_is_a_probability", "emitted_law_sums_to_one"])
    assert text.count(" breaks the property ") == 1 == text.count("  again ")
    assert text.endswith("\nalso broken, often by the same fault: emitted_law_sums_to_one")


def test_only_errors_of_numbers_and_places_have_a_likely_cause() -> None:
    text = told(short, properties=["answers"])
    assert "ValueError: q is too long" in text and "perhaps" not in text
    text = told(beyond, properties=["answers"])
    assert "IndexError" in text and "an index that some row does not have" in text


def test_a_knob_that_rises_and_falls_is_not_monotone() -> None:
    name = ["acceptance_follows_the_knob"]
    text = told(humped, properties=name)
    assert "other steps have one: the knob is not monotone" in text and "declare none" in text
    text = told(falling, properties=name)
    assert "the knob is not monotone" not in text and "-1 if it falls on all" in text


@pytest.mark.parametrize("policy", [lavish, cactus, Unnamed(), Child()], ids=lambda own: own.spec)
def test_the_call_that_is_printed_fails_again(policy) -> None:
    """Also of a function whose name is that of another policy, and of a class without one."""
    names = ["acceptance_is_a_probability", "budget_holds"]
    again = re.search(r"(?m)^  again +(.*)$", told(policy, properties=names))
    assert again is not None
    with pytest.raises(AssertionError, match="breaks the property"):
        eval(again[1])


@given(st.floats(0.5, 2.0))
@settings(max_examples=2, deadline=None, database=None)
def test_a_check_runs_inside_of_a_test_of_hypothesis(price: float) -> None:
    assert assert_policy_properties(f"band:price={price}", properties=["answers"], examples=3)


def test_a_function_is_named_in_its_process() -> None:
    assert ct.policy("lavish:times=1.25") == ct.policy(lavish, times=1.25)
    assert ct.policy("cactus:delta=1") != ct.policy(cactus, delta=1.0)  # registered ones come first
    first, last = ct.rule(_one()), ct.rule(_one())
    assert ct.policy("same") == last != first  # a function that is defined again is the last one
    ct.rule(_other())
    with pytest.raises(ValueError, match=r"one function under @ct.rule; 'same' names .*_one"):
        ct.policy("same")
    with pytest.raises(ValueError, match="policy: must be one of"):  # data name no code
        policy_of_data("lavish", "a file")


def _one():
    def same(q, p, n):
        return 0.5

    return same


def _other():
    def same(q, p, n):
        return 0.25

    return same
