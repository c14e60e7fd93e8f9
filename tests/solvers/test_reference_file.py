"""The stored programs are those that the writer would store again."""

import numpy as np
import pytest

from cactus_theory.divergences.definition import examples
from tests.amounts import some
from tests.solvers import reference
from tests.test_reference import FILE

# answers of another solver version may differ in digits that no test relies on
AGAIN = 1e-7


@pytest.mark.parametrize("spec", some(examples(), 3))
def test_the_stored_cases_are_reproduced(spec):
    fresh = list(reference.cases(spec))
    with np.load(FILE) as stored:
        of_spec = stored["divergence"] == spec
        assert len(fresh) == of_spec.sum()
        for name in ("target_probs", "draft_probs", "delta"):
            rows = np.array([getattr(case, name) for case in fresh])
            np.testing.assert_allclose(rows, stored[name][of_spec], rtol=1e-12, atol=1e-15)
        for name in ("acceptance", "raised"):
            values = [getattr(case, name) for case in fresh]
            np.testing.assert_allclose(values, stored[name][of_spec], rtol=0, atol=AGAIN)
        for name in ("family", "support", "vocabulary", "token"):
            assert [getattr(case, name) for case in fresh] == stored[name][of_spec].tolist()
