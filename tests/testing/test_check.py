"""``cactus-theory check`` on strangers' files: a report, or one line that says what is wrong."""

import json
import re
import sys
from pathlib import Path

import pytest

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.testing.check_process import declaration
from cactus_theory.testing.properties import PROPERTIES
from tests.amounts import some, thorough

RULES = '''
import os
import time
from dataclasses import dataclass

import cactus_theory as ct

print("the file talks while it is read")


@ct.rule
def good(q, p, n):
    print("and the rule while it is asked")
    return min(1, q[n] / p[n])


@ct.rule
def hangs(q, p, n):
    while q[n] == 0:
        time.sleep(0.01)
    return min(1, q[n] / p[n])


@ct.rule
def jumps(q, p, n):
    return float(q[n] > 0.3)


@ct.rule
def dies(q, p, n):
    if q[n] == 0:
        os._exit(7)
    return min(1, q[n] / p[n])


@dataclass(frozen=True)
class Wrong(ct.PerProposal):
    """Its declaration has a typing mistake."""

    delta: float = 0.5

    @property
    def declares(self):
        return ct.Declaration(contnuous=False)

    def raised(self, q_n):
        return q_n


class FarBudget(Wrong):
    """Its budget is in a divergence that does not exist."""

    @property
    def declares(self):
        return ct.Declaration(budget=ct.Budget("kll", 0.5, "emitted"))


@ct.rule(budget="kl <= 0 emitted")
def writes(q, p, n):
    q[:] = p
    return min(1, q[n] / p[n])


@ct.rule
def shadowed(q, p, n):
    import helper, json, random

    assert helper.here
    return min(1, q[n] / p[n])
'''
PROPERTY = '''
import cactus_theory as ct
from cactus_theory.testing import Bounds, policy_property


@policy_property(hint="the least likely token is favoured")
def keeps_the_likeliest(seen):
    """The token that the target likes best is always accepted."""
    best = seen.q.argmax(-1, keepdim=True)
    yield Bounds(seen.phi.gather(-1, best), 1, 1, "acceptance of the likeliest token")


@ct.rule
def half(q, p, n):
    return min(1, q[n] / p[n])
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rules.py").write_text(RULES, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import cactus_theory\n\nrule = 1 / 0\n", encoding="utf-8")
    (tmp_path / "own.py").write_text(PROPERTY, encoding="utf-8")
    (tmp_path / "exits.py").write_text("import os\n\nos._exit(4)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> int:
    return main(["check", *arguments])


def test_a_good_rule_passes_and_json_is_all_there_is(folder, capfd) -> None:
    assert check("rules.py:good", "--examples", "40", "--json") == 0
    out, err = capfd.readouterr()
    assert err == "" and len(out.splitlines()) == 1
    found = json.loads(out)
    assert found["passed"] and found["policy"] == "rules.py:good"
    assert {entry["property"] for entry in found["properties"]} == set(PROPERTIES)
    assert found["properties"][0]["examples"] == 40


REPORTS = {  # rule → its exit code, examples and property, and what the report matches
    "rules.py:jumps": (1, 300, "float32_agrees", ["declare continuous=False"]),
    "own.py:half": (1, 40, "keeps_the_likeliest", [
        "half breaks the property keeps_the_likeliest",
        "perhaps   the least likely token is favoured",
    ]),
    "rules.py:writes": (1, 20, "answers", ["writes"]),
    "rules.py:shadowed": (0, 20, "answers", ["no property is broken"]),
}  # fmt: skip


@thorough
@pytest.mark.parametrize("rule", REPORTS)
def test_jumps_and_writers_are_told_of_and_nothing_is_shadowed(folder, capfd, rule: str) -> None:
    (folder / "helper.py").write_text("here = True\n", encoding="utf-8")
    for name in ("json", "random", "numpy", "signal"):
        (folder / f"{name}.py").write_text("raise RuntimeError\n", encoding="utf-8")
    status, examples, name, said = REPORTS[rule]
    assert check(rule, "--examples", str(examples), "--properties", name) == status
    out = capfd.readouterr().out
    for text in said:
        assert re.search(text, out), text


@pytest.mark.parametrize(
    ("rule", "status", "said"),
    some(
        [
            ("hangs", 3, "rules.py:hangs: no answer within 10 s while answers was checked"),
            ("dies", 2, "rules.py:dies: its process ended with exit code 7 while answers was"),
        ],
        1,
    ),
)
def test_a_hang_and_a_death_are_one_line(folder, capfd, rule: str, status: int, said: str) -> None:
    asked = (f"rules.py:{rule}", "--examples", "30", "--timeout", "10", "--json")
    assert check(*asked) == status
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    some(
        [
            (("missing.py:rule",), "no such file"),
            (("rules.py",), "must read file.py:name; got 'rules.py'"),
            (("broken.py:rule",), "broken.py, line 3 (rule = 1 / 0): ZeroDivisionError"),
            (("rules.py:good", "--examples", "0"), "--examples: must lie in [1"),
            (("rules.py:FarBudget",), "divergence: must be one of"),
            (("exits.py:rule",), "its process ended with exit code 4 while the file was read"),
            (("rules.py:good", "--properties", "gravity"), "--properties: must be one of"),
            (("rules.py:good", "--timeout", "0"), "--timeout: must lie in (0"),
            (("rules.py:good", "--timeout", "inf"), "--timeout: must lie in (0"),
            (("rules.py:good", "--seed", "-1"), "--seed: must lie in [0"),
        ],
        4,
    ),
)
def test_bad_requests_are_one_line_and_exit_code_2(folder, capfd, arguments, said: str) -> None:
    assert check(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and said in err


def test_the_files_beside_a_rule_replace_no_library(folder, monkeypatch) -> None:
    """What stands there can be imported, unless a library has that name."""
    (folder / "colorsys.py").write_text("raise RuntimeError('executed')\n", encoding="utf-8")
    (folder / "own_helper.py").write_text("here = True\n", encoding="utf-8")
    text = "import colorsys, own_helper\nimport cactus_theory as ct\n"
    (folder / "wave.py").write_text(
        f"{text}lossless = ct.policy('speculative')\n", encoding="utf-8"
    )
    for name in ("colorsys", "wave"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert ct.policy("wave.py:lossless").spec == "speculative"
    assert "wave" not in sys.modules and sys.modules["own_helper"].here
    del sys.modules["own_helper"]


def test_a_declaration_that_cannot_be_read_is_named(folder) -> None:
    with pytest.raises(ValueError, match="rules.py:Wrong: what it declares cannot be read: TypeE"):
        declaration(ct.policy("rules.py:Wrong"), "rules.py:Wrong")
