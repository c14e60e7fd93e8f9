"""Every registered divergence has every property; every planted fault is seen by its own."""

import pytest

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
    assert_divergence_properties(spec, examples=EXAMPLES_EACH)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault.divergence).__name__)
def test_planted_faults_are_seen(fault):
    with pytest.raises(AssertionError, match=f"breaks the property {fault.prop}\n") as found:
        assert_divergence_properties(fault.divergence, properties=[fault.prop], examples=150)
    assert "\n  expected  " in str(found.value)


def test_every_property_sees_something():
    assert {fault.prop for fault in FAULTS} == {*GENERATOR_PROPERTIES, *VALUE_PROPERTIES}
