"""The README's rule of one's own: what it says is printed, and so is the test it pastes."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from cactus_theory.cli import main
from cactus_theory.testing.properties import PROPERTIES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Bring your own rule")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", SECTION, flags=re.S)
CODE, COMMAND, REPORT = BLOCKS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rule.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_example_is_short():
    lines = [line for line in CODE.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10


def test_it_prints_what_the_readme_says_and_a_test_that_fails_until_it_is_mended(folder, capfd):
    program, *arguments = shlex.split(COMMAND)
    assert program == "cactus-theory" and main(arguments) == 1
    out, err = capfd.readouterr()
    assert REPORT in out and "Traceback" not in err
    assert f"{len(PROPERTIES)}/{len(PROPERTIES)}" in err and out.count("\n") > 30
    pasted = out.split("# paste into a test file beside the rule\n")[1].split("\n\nthe knob")[0]

    def run():
        sys.modules.pop("my_rule", None)
        space = {}
        exec(compile(pasted, "test_pasted.py", "exec"), space)
        space["test_my_rule_budget_holds"]()

    with pytest.raises(AssertionError, match="breaks the property budget_holds"):
        run()
    mended = CODE.replace("return min(1, raised", "return min(1, q[n]")
    (folder / "my_rule.py").write_text(mended + "\n# mended\n", encoding="utf-8")
    run()
