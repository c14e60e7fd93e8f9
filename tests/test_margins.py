"""Every named tolerance of closed forms, decisions and laws has room on any machine."""

import pytest

from tests.amounts import THOROUGH
from tests.margins import SEEDS, TABLE, claims, measured


def test_the_table_lists_every_claim_with_its_margin():
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert [line.split(",")[0] for line in lines[1:]] == [claim.name for claim in claims()]


@pytest.mark.skipif(
    not THOROUGH, reason="40 seeds of every claim take minutes; run by make test-thorough"
)
def test_every_tolerance_is_three_times_the_worst_error():
    for row in measured(SEEDS):
        assert float(str(row["margin"])) >= float(str(row["at least"])), row
