"""Every mistake of ``make mutate`` can still be made in the package as it reads now."""

import pytest

from tests.mutation.__main__ import applies
from tests.mutation.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda own: own.new.strip()[:60])
def test_it_applies(mutation):
    assert mutation.old != mutation.new
    assert applies(mutation)


def test_there_are_enough():
    assert len(set(MUTATIONS)) == len(MUTATIONS) >= 30
