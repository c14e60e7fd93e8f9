"""CONTRIBUTING.md: its worked example works, and every path it names exists."""

import re
from pathlib import Path

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.divergences.definition import DIVERGENCES
from cactus_theory.policies.registry import POLICIES
from cactus_theory.testing import assert_policy_properties
from cactus_theory.testing.properties import PROPERTIES
from tests.amounts import THOROUGH
from tests.kits.divergences import assert_divergence_properties
from tests.test_pages import commands, run
from tests.testing.faulty_verifiers import TokenWise

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
POLICY, PROPERTY, VERIFIER = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
DIVERGENCE = (ROOT / "tests/kits/lecam.py").read_text(encoding="utf-8")


@pytest.fixture
def boosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(POLICIES, "known", dict(POLICIES.known))
    monkeypatch.chdir(tmp_path)
    Path("boosted.py").write_text(POLICY, encoding="utf-8")
    return "boosted.py:Boosted"


def test_the_policy_of_one_file_has_every_property(boosted: str) -> None:
    report = assert_policy_properties(boosted, examples=60)
    assert report.passed and report.policy == "boosted"
    wrong = Path("wrong.py")
    wrong.write_text(POLICY.replace('"boosted"', '"wrong"').replace("q_n * (1", "q_n * (1.1"))
    with pytest.raises(AssertionError, match="breaks the property budget_holds"):
        assert_policy_properties("wrong.py:Boosted", examples=60)


def test_it_is_picked_up_everywhere(boosted: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ct.policy(boosted, delta="0.5")
    assert found == ct.policy("boosted:delta=0.5") == ct.policy(f"{boosted}:delta=0.5")
    entry = ct.list_policies()["boosted"]
    assert entry["knobs"] == {"delta": 0.25} and "1 + delta times" in entry["summary"]
    assert entry["declares"] == "the max-divergence of every proposal within ln(1 + delta)."
    np.save("q.npy", np.array([0.2, 0.8]))
    np.save("p.npy", np.array([0.7, 0.3]))
    assert main(["audit", "q.npy", "p.npy", "--policy", f"{boosted}:delta=0.5"]) == 0
    assert "boosted:delta=0.5 declares: max_divergence <= 0.405465 per" in capsys.readouterr().out
    assert main(["audit", "q.npy", "p.npy", "--policy", f"{boosted}:delta=-1"]) == 2
    assert capsys.readouterr().err == "cactus-theory audit: delta: must be at least 0; got -1.0\n"


def test_every_command_runs(boosted: str) -> None:
    Path("simulations").symlink_to(ROOT / "simulations")
    asked, _ = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    assert [run(words) for words, _ in commands(asked)] == [0, 0, 0]


def test_the_divergence_of_one_file_is_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(DIVERGENCES, "known", dict(DIVERGENCES.known))
    monkeypatch.chdir(ROOT)
    _, asked = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    assert run(next(words for words, _ in commands(asked))) == 0
    exec(re.search(r'-c "(.*)"', asked, flags=re.S)[1], {})
    wrong = tmp_path / "wrong.py"
    wrong.write_text(DIVERGENCE.replace('"le_cam"', '"wrong"').replace("(2 /", "(1 /"))
    with pytest.raises(AssertionError, match="breaks the property slope_inverse_undoes_slope"):
        assert_divergence_properties(f"{wrong}:LeCam")


def test_the_property_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(PROPERTIES)
    try:
        exec(compile(PROPERTY, "property.py", "exec"), {"__name__": "property"})
        assert_policy_properties("speculative", properties=["accepts_the_likeliest"], examples=60)
        with pytest.raises(AssertionError, match="perhaps   the acceptance is cut off below 1"):
            timid = ct.rule(lambda q, p, n: min(0.9, q[n] / p[n]))
            assert_policy_properties(timid, properties=["accepts_the_likeliest"], examples=60)
    finally:
        PROPERTIES.clear()
        PROPERTIES.update(before)


def test_a_verifier_is_checked_by_one_line() -> None:
    few = VERIFIER.replace('"block"', 'judge, policies=["speculative"], examples=6')
    exec(VERIFIER if THOROUGH else few, {"judge": "block"})
    with pytest.raises(AssertionError, match="breaks the property next_token_has_the_law"):
        exec(few, {"judge": TokenWise()})
