"""``cactus-theory check`` on strangers' files: whatever they do, the answer is a report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cactus_theory.cli import main

RULES = '''
import os
import time

import cactus_theory as ct

print("the file talks while it is read")


@ct.rule
def good(q, p, n):
    print("and the rule while it is asked")
    return min(1, q[n] / p[n])


@ct.rule
def false(q, p, n):
    return q[n] / p[n]


@ct.rule
def hangs(q, p, n):
    while q[n] == 0:
        time.sleep(0.01)
    return min(1, q[n] / p[n])


@ct.rule
def dies(q, p, n):
    if q[n] == 0:
        os._exit(7)
    return min(1, q[n] / p[n])


class Draft(ct.Policy):
    """Not finished: both methods are missing."""


not_a_rule = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rules.py").write_text(RULES, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import cactus_theory\n\nrule = 1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> int:
    return main(["check", *arguments])


def test_a_good_rule_passes_and_json_is_all_there_is(folder, capfd) -> None:
    assert check("rules.py:good", "--examples", "40", "--json") == 0
    out, err = capfd.readouterr()
    assert err == "" and len(out.splitlines()) == 1
    found = json.loads(out)
    assert found["passed"] and found["rule"] == "good" and len(found["laws"]) == 19
    assert found["laws"][0]["examples"] == 40


def test_a_false_rule_fails_with_a_page_and_a_test(folder, capfd) -> None:
    laws = "answers,acceptance_is_a_probability,float32_agrees"
    options = ("--examples", "60", "--laws", laws, "--html", "page.html")
    assert check("rules.py:false", *options) == 1
    out, err = capfd.readouterr()
    assert "1/3 answers" in err and "Traceback" not in out + err
    assert re.search(r"acceptance_is_a_probability +fails +60 +-", out)
    assert "def test_false_acceptance_is_a_probability():" in out and out.endswith("1 broken law\n")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1 and "acceptance of token" in page and "1 broken law" in page
    assert not re.search(r"(src|href)=.?(https?:|//)|<script|@import|url\(", page)
    for value in re.findall(r'(?:width|height|x|y)="(-?[\d.]+)"', page):
        assert 0 <= float(value) <= 700


def test_a_hang_is_a_finding(folder, capfd) -> None:
    laws = "answers,acceptance_is_a_probability"
    assert check("rules.py:hangs", "--examples", "30", "--timeout", "1", "--laws", laws) == 1
    out, _ = capfd.readouterr()
    assert "no answer within" in out and "target q  [0.0, 1.0]" in out
    assert re.search(r"acceptance_is_a_probability +holds", out)


def test_a_death_is_a_finding_with_its_rows(folder, capfd) -> None:
    assert check("rules.py:dies", "--examples", "30", "--json") == 1
    found = json.loads(capfd.readouterr().out)
    assert [v["verdict"] for v in found["laws"]] == ["fails"] + ["not checked"] * 18
    finding = found["laws"][0]["finding"]
    assert finding["found"].startswith("the process ended with exit code 7")
    assert any(q == 0 and p > 0 for q, p in zip(finding["target"], finding["draft"], strict=True))
    assert finding["margin"] == "-inf" and "def test_dies_answers" in finding["test"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("broken.py:rule", "broken.py: ZeroDivisionError"), ("rules.py:Draft", "abstract")],
)
def test_a_file_that_raises_is_a_finding(folder, capfd, source: str, said: str) -> None:
    assert check(source, "--examples", "5") == 1
    out, err = capfd.readouterr()
    assert said in out and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rules.py:nope",), "rules.py must define nope"),
        (("rules.py:not_a_rule",), "must be a Policy"),
        (("missing.py:rule",), "no such file"),
        (("rules.py",), "must read file.py:name"),
        (("rules.py:good", "--examples", "0"), "--examples: must lie in [1"),
        (("rules.py:good", "--laws", "gravity"), "--laws: must be one of"),
        (("rules.py:good", "--timeout", "0"), "--timeout: must lie in (0"),
    ],
)
def test_bad_requests_are_one_line_and_exit_code_2(folder, capfd, arguments, said: str) -> None:
    assert check(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and said in err


def test_without_hypothesis_the_extra_is_named() -> None:
    hide = "import sys; sys.modules['hypothesis'] = None; from cactus_theory.cli import main; "
    call = "sys.exit(main(['check', 'rules.py:good']))"
    done = subprocess.run([sys.executable, "-c", hide + call], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cactus-theory[testing]" in done.stderr and "Traceback" not in done.stderr
