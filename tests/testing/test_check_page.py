"""The page CHECK shows the shipped rows and rule; the call that ``check`` prints fails and passes.

tests/test_pages.py runs the blocks of the page.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.cli import main
from cactus_theory.testing import assert_policy_properties  # noqa: F401  (is called)
from cactus_theory.testing.properties import PROPERTIES

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "simulations" / "data"
PAGE = (ROOT / "cactus_theory" / "CHECK.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
SOURCE = (DATA / "wrong_rule.py").read_text(encoding="utf-8")
CODE = "# wrong_rule.py\n" + SOURCE.partition('"""\n\n')[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(DATA / "wrong_rule.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_rule_is_the_shipped_one_and_short():
    assert CODE in BLOCKS
    assert len([line for line in CODE.splitlines() if line and not line.startswith("#")]) <= 10


def test_the_rows_are_the_shipped_ones(folder):
    exec(BLOCKS[0], {})
    mine, shipped = (dict(np.load(path / "rows.npz")) for path in (folder, DATA))
    assert mine.keys() == shipped.keys()
    for name, rows in shipped.items():
        np.testing.assert_array_equal(mine[name], rows)


def test_the_call_that_is_printed_fails_until_the_rule_is_mended(folder, capfd):
    assert main(["check", "wrong_rule.py:wrong_rule", "--examples", "200"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert f"{len(PROPERTIES)}/{len(PROPERTIES)}" in err and out.count("\n") > 30
    again = re.search(r"(?m)^  again +(.*)$", out)[1]
    with pytest.raises(AssertionError, match="breaks the property budget_holds"):
        eval(again)
    mended = CODE.replace("return min(1, raised", "return min(1, q[n]")
    (folder / "wrong_rule.py").write_text(mended + "\n# mended\n", encoding="utf-8")
    assert eval(again).passed
