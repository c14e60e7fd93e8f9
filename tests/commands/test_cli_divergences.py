"""A divergence of one's own file, registered there or not, wherever a command names one."""

import json
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.cli import main
from cactus_theory.divergences import definition
from tests.amounts import THOROUGH
from tests.commands.test_bad_input import NAMES, PAIR, called

FILE = '''
from dataclasses import dataclass

import cactus_theory as ct
from cactus_theory.divergences.classical import KL
from solvers._perspective import _FORMS


@dataclass(frozen=True)
class Plain(KL):
    """KL under the name of its file."""


@ct.register_divergence
@dataclass(frozen=True)
class Named(KL):
    """KL under a name of its own."""

    name = "nats"


_FORMS[Plain] = _FORMS[Named] = _FORMS[KL]


@ct.rule(budget="nats <= 5 emitted")
def kept(q, p, n):
    return min(1, q[n] / p[n])
'''
# of a generator that is written down twice, through solvers that stop at about 1e-9
SAME = 1e-6
AMOUNTS = ("acceptance", "total_acceptance", "raised", "tokens", "tokens_per_call")
# what words in capitals of a command stand for, beside those of the bad commands
WORDS = NAMES | {
    "ROWS": "q.npy p.npy",
    "KNOB": "band:price=1,divergence={}",
    "NAMED": "--divergence {}",
    "TUNE": "tune --cost-ratio 0.1 --divergence-per-token 0.05 --num-draft-tokens 1",
    "DECODE": f"generate {PAIR} --prompt def --max-new-tokens 4 --seed 1",
}
# every command that names a divergence, each with kl in the place of {}
COMMANDS = """
cactus solve ROWS --delta 0.1 NAMED
cactus solve ROWS --pooled --delta 0.1 NAMED
cactus solve ROWS --frontier 3 NAMED
cactus audit ROWS --policy typical NAMED
cactus audit ROWS --policy KNOB
cactus audit ROWS --policy speculative --policy KNOB NAMED --plot x.png
cactus TUNE --trace TRACE --policies band:price NAMED
cactus expect --trace TRACE --policy KNOB
cactus DECODE --policy KNOB
sim replay TRACE --policy KNOB NAMED
solvers optimal q.npy --token 1 --delta 0.1 NAMED
solvers optimal ROWS --delta 0.1 NAMED
solvers design ROWS --delta 0.1 NAMED
solvers optimal ROWS --sequence --delta 0.1 NAMED
solvers decode v.npy v.npy --num-draft-tokens 1 --divergence-per-token 0.1 NAMED
""".strip().splitlines()
QUICK = [words for words in COMMANDS if "DECODE" not in words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    known = definition.DIVERGENCES.known
    monkeypatch.setattr(definition.DIVERGENCES, "known", dict(known))
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = ("q", [[0.2, 0.2, 0.6], [0.3, 0.3, 0.4]]), ("p", [[0.45, 0.45, 0.1], [0.1, 0.1, 0.8]])
    for name, values in (*rows, ("v", [[0.5, 0.5], [0.2, 0.8]])):
        np.save(tmp_path / f"{name}.npy", np.array(values))
    return tmp_path


def amounts(value):
    """Return what is accepted, decoded or raised, wherever a JSON object says it."""
    if isinstance(value, dict):
        own = [value[key] for key in value if key in AMOUNTS]
        return own + [number for part in value.values() for number in amounts(part)]
    return [number for part in value for number in amounts(part)] if type(value) is list else []


@pytest.mark.parametrize("words", COMMANDS if THOROUGH else QUICK)
def test_every_command_that_names_one_takes_it(folder, capsys, words) -> None:
    command, asked = called(words, WORDS)

    def said(spec):
        assert command([*(word.replace("{}", spec) for word in asked), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    expected = np.hstack(amounts(said("kl")))
    assert expected.size
    for own in ("own.py:Plain", "own.py:Named"):
        np.testing.assert_allclose(np.hstack(amounts(said(own))), expected, rtol=SAME)


def test_a_rule_that_keeps_a_budget_of_it_is_checked(folder, capfd) -> None:
    pytest.importorskip("hypothesis")
    assert main(["check", "own.py:kept", "--examples", "5"]) == 0
    assert "no property is broken" in capfd.readouterr().out
