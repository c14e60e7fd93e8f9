"""The README's own rule, word for word: the file, the command, what it prints, what it pastes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Bring your own rule")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", SECTION, flags=re.S)
CODE, COMMAND, REPORT = BLOCKS


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rule")
    (folder / "my_rule.py").write_text(CODE, encoding="utf-8")
    program, *arguments = shlex.split(COMMAND)
    assert program == "cactus-theory"
    done = subprocess.run(
        [sys.executable, "-m", "cactus_theory.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return folder, done


def test_the_example_is_short():
    lines = [line for line in CODE.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10


def test_it_prints_what_the_readme_says(checked):
    _, done = checked
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert REPORT in done.stdout
    assert "19/19" in done.stderr and done.stdout.count("\n") > 30


def test_the_pasted_test_fails_until_the_rule_is_mended(checked):
    folder, done = checked
    pasted = done.stdout.split("# paste into a test file beside the rule\n")[1].split(
        "\n\n1 broken"
    )[0]
    (folder / "test_pasted.py").write_text(pasted, encoding="utf-8")

    def outcome():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pasted.py"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    broken = outcome()
    assert broken.returncode == 1 and "breaks the law budget_holds" in broken.stdout
    rule = folder / "my_rule.py"
    rule.write_text(CODE.replace("return min(1, raised", "return min(1, q[n]"), encoding="utf-8")
    assert outcome().returncode == 0
