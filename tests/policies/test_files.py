"""``FILE.py:NAME`` means a policy wherever a policy is named."""

import os
from pathlib import Path

import pytest

import cactus_theory as ct
from cactus_theory.policies.registry import POLICIES
from tests.rows import pair

FILE = '''
from dataclasses import dataclass

import cactus_theory as ct
from cactus_theory.policies import FixedTarget


@ct.rule
def scaled(q, p, n, *, alpha: float = 1.0):
    return min(1, alpha * q[n] / p[n])


@dataclass(frozen=True)
class Halfway(FixedTarget):
    share: float = 0.5
    steps: int = 1

    def target(self, q, p, path=None):
        return q + self.share * (p - q)


@ct.register("known")
@dataclass(frozen=True)
class Known(Halfway):
    """Registered while the file is read."""


class Draft(ct.Policy):
    """Not finished: both methods are missing."""


quarter = Halfway(0.25)
priced = ct.policy("band", price=2.0)
number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(POLICIES, "known", dict(POLICIES.known))
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "spec"),
    [
        ("mine.py:scaled", "mine.py:scaled:alpha=1.0"),
        ("mine.py:scaled:alpha=.5", "mine.py:scaled:alpha=0.5"),
        ("mine.py:Halfway", "mine.py:Halfway"),
        ("mine.py:Halfway:share=0.1,steps=2", "mine.py:Halfway:share=0.1,steps=2"),
        ("mine.py:quarter", "mine.py:Halfway:share=0.25"),
        ("mine.py:quarter:steps=3", "mine.py:Halfway:share=0.25,steps=3"),
        ("mine.py:Known:share=0.2", "known:share=0.2"),
        ("mine.py:priced", "band:price=2.0"),
    ],
)
def test_its_spec_rebuilds_it(folder: Path, source: str, spec: str) -> None:
    made = ct.policy(source)
    assert made.spec == spec and ct.policy(spec) == made
    q, p = pair(2, 5, seed=1)
    assert ct.emitted_law(made, q, p).sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_knobs_beside_the_file(folder: Path) -> None:
    assert ct.policy("mine.py:scaled", alpha="0.5").alpha == 0.5
    full = folder / "mine.py"
    assert ct.policy(f"{full}:scaled").spec == f"{full}:scaled:alpha=1.0"
    with pytest.raises(ValueError, match="alpha: must be given once"):
        ct.policy("mine.py:scaled:alpha=1", alpha=2)


def test_a_file_that_changed_is_read_again(folder: Path) -> None:
    before = ct.policy("mine.py:scaled")
    assert ct.policy("mine.py:scaled") == before
    (folder / "mine.py").write_text(FILE.replace("= 1.0", "= 0.75"), encoding="utf-8")
    os.utime("mine.py", ns=(1, 1))
    assert ct.policy("mine.py:scaled").spec == "mine.py:scaled:alpha=0.75"


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("mine.py:nope", ValueError, "mine.py must define nope; got no such name"),
        ("mine.py:number", TypeError, "mine.py:number must be a Policy, .*; got 3"),
        ("mine.py", ValueError, "must read file.py:name; got 'mine.py'"),
        ("mine.py:1x", ValueError, "must read file.py:name; got 'mine.py:1x'"),
        ("nowhere.py:x", OSError, "no such file; got 'nowhere.py'"),
        ("broken.py:x", ValueError, r"broken.py, line 2 \(1 / 0\): ZeroDivisionError: division"),
        ("mine.py:Draft", TypeError, "mine.py:Draft is abstract; it lacks acceptance, residual"),
        (
            "typo.py:x",
            ValueError,
            r"line 3 \(@ct.rule\(contnuous=False\)\): TypeError: rule: decl",
        ),
        ("torn.py:x", ValueError, "torn.py, line 1: SyntaxError"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, source: str, kind: type, said: str) -> None:
    (folder / "broken.py").write_text("x = 1\n1 / 0\n", encoding="utf-8")
    typo = "import cactus_theory as ct\n\n@ct.rule(contnuous=False)\ndef x(q, p, n): ...\n"
    (folder / "typo.py").write_text(typo, encoding="utf-8")
    (folder / "torn.py").write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(kind, match=said):
        ct.policy(source)
