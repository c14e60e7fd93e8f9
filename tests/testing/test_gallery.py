"""Every planted fault is caught by the property it breaks; the same rules without it pass."""

import time

import pytest

from cactus_theory.testing import assert_policy_properties
from tests.amounts import amount, some
from tests.testing.gallery import FAULTS, Fault, caught

SECONDS = 60
RIGHT = list({id(own.right): own.right for own in FAULTS if own.right is not None}.values())


def name(fault: Fault) -> str:
    return fault.title.replace(" ", "-")


@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_it_is_caught_by_its_law(fault):
    start = time.perf_counter()
    report, count = caught(fault)
    assert report is not None, f"{fault.law} holds on {count} examples"
    finding = report.findings[0]
    assert finding.margin < 0 and finding.about and finding.expected != finding.found
    assert len(finding.target) <= fault.tokens, "a counterexample should fit on a line"
    assert time.perf_counter() - start < SECONDS


@pytest.mark.parametrize("rule", some(RIGHT, 5), ids=lambda rule: rule.spec)
def test_the_same_rule_without_the_fault_passes(rule):
    assert_policy_properties(rule, examples=amount(16, 500))


def test_there_are_enough_and_every_law_catches_something():
    from cactus_theory.testing.properties import PROPERTIES

    assert len({fault.title for fault in FAULTS}) == len(FAULTS)
    assert {fault.law for fault in FAULTS} == set(PROPERTIES)
