"""Every registered divergence has every property; every planted fault is seen by its own."""

import pytest

from cactus_theory.divergences.classical import KL
from cactus_theory.divergences.definition import examples
from tests.amounts import amount
from tests.formulas import ALL
from tests.kits.divergences import (
    GENERATOR_PROPERTIES,
    VALUE_PROPERTIES,
    assert_divergence_properties,
)
from tests.kits.faulty_divergences import FAULTS

EXAMPLES_EACH = amount(40, 250)


@pytest.mark.parametrize("spec", dict.fromkeys((*ALL, *examples())))
def test_registered_divergences_have_every_property(spec):
    assert assert_divergence_properties(spec, examples=EXAMPLES_EACH) == EXAMPLES_EACH


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault.divergence).__name__)
def test_planted_faults_are_seen(fault):
    with pytest.raises(AssertionError, match=f"breaks the property {fault.prop}\n") as found:
        assert_divergence_properties(fault.divergence, properties=[fault.prop], examples=150)
    assert "\n  expected  " in str(found.value)


def test_every_property_sees_something():
    assert {fault.prop for fault in FAULTS} == {*GENERATOR_PROPERTIES, *VALUE_PROPERTIES}


def test_what_cannot_be_checked_raises():
    with pytest.raises(ValueError, match="divergence: must be one of"):
        assert_divergence_properties("nothing")
    with pytest.raises(ValueError, match="examples"):
        assert_divergence_properties("kl", examples=0)

    with pytest.raises(ValueError, match="properties: must be one of .*; got 'speed'"):
        assert_divergence_properties("kl", properties=["speed"])

    class Summed(KL):
        def value(self, emitted, target):
            return super().value(emitted, target).sum()

    with pytest.raises(ValueError, match=r"value: must return shape \("):
        assert_divergence_properties(Summed())
