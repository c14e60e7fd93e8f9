"""``FILE.py:NAME`` wherever a name does: divergence, verifier, schedule; data runs none of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.decoding import Schedule
from cactus_theory.decoding.schedule import read_rule
from cactus_theory.divergences import definition as divergences
from cactus_theory.divergences.definition import known_divergence
from cactus_theory.policies.registry import policy_of_data
from cactus_theory.verify import contract as verifiers
from simulations.common.grid import checked_policy, followers
from tests.commands.test_bad_input import NAMES, called

FILE = '''
from dataclasses import dataclass

import torch

import cactus_theory as ct
from cactus_theory.decoding import Schedule
from cactus_theory.divergences.classical import KL
from cactus_theory.verify import Chain
from solvers._perspective import _FORMS

RAN = True


@dataclass(frozen=True)
class Nats(KL):
    """KL under the name of its file."""


@ct.register_divergence
@dataclass(frozen=True)
class Named(KL):
    """KL under a name of its own."""

    name = "nats"


_FORMS[Nats] = _FORMS[Named] = _FORMS[KL]


@ct.rule(budget="nats <= 5 emitted")
def kept(q, p, n):
    return min(1, q[n] / p[n])


class Early(Schedule):
    """Loose for the first tokens."""

    def __init__(self, tokens: int, price: float = 1.0):
        self.tokens = tokens
        self.policies = ct.policy("band", price=price), ct.policy("speculative")

    def begin(self, prompt):
        return 0

    def advance(self, state, new_ids):
        return state + len(new_ids)

    def choose(self, state, drafted):
        return (state + torch.arange(len(drafted)) >= self.tokens).long()


class Mine(Chain):
    """The chain under another name."""


early = Early(3)
number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for registry in (divergences.DIVERGENCES, verifiers.VERIFIERS):
        monkeypatch.setattr(registry, "known", dict(registry.known))
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_divergence_of_a_file_is_one_everywhere(folder: Path) -> None:
    kind = ct.divergence("own.py:Nats")
    assert kind.spec == "own.py:Nats" and ct.divergence(kind.spec) == kind
    assert known_divergence("own.py:Nats") == kind  # which has been read
    q, p = torch.tensor([[0.2, 0.8], [0.9, 0.1]], dtype=torch.float64)
    found = ct.optimal_acceptance(q, p, divergence="own.py:Nats", delta=0.1)
    assert found.acceptance == ct.optimal_acceptance(q, p, divergence="kl", delta=0.1).acceptance
    rule = ct.policy("band:price=1,divergence=own.py:Nats")
    assert rule.spec == "band:price=1.0,divergence=own.py:Nats"
    laws = (ct.emitted_law(own, q, p) for own in (rule, ct.policy("band:price=1")))
    assert torch.allclose(*laws, rtol=0, atol=1e-12)  # solved in torch and by a compiled loop
    for refused in ("own.py:number", "own.py:Nats:a=1"):
        with pytest.raises((TypeError, ValueError), match="divergence: "):
            ct.divergence(refused)


# of every program and of every way in which its commands read a divergence
COMMANDS = """
cactus solve q.npy q.npy --delta 0.1 --divergence {}
cactus audit q.npy q.npy --policy band:price=1,divergence={} --divergence {}
cactus TUNE --trace TRACE --cost-ratio 1 --num-draft-tokens 1 --policy band:price --divergence {}
cactus expect --trace TRACE --policy band:price=1,divergence={}
cactus compare TRACE --policy typical:epsilon=0.1 --num-draft-tokens 1 --divergence {}
solvers optimal q.npy q.npy --delta 0.1 --divergence {}
solvers design q.npy q.npy --delta 0.1 --divergence {}
solvers decode q.npy q.npy --num-draft-tokens 1 --nats 0.1 --divergence {}
"""


@pytest.mark.parametrize("words", COMMANDS.strip().splitlines())
def test_every_command_that_names_a_divergence_takes_it(folder: Path, words: str) -> None:
    np.save("q.npy", np.array([[0.2, 0.8], [0.9, 0.1]]))
    for spec in ("own.py:Nats", "own.py:Named"):
        command, asked = called(words, NAMES)
        assert command([word.replace("{}", spec) for word in asked]) == 0


def test_a_rule_that_keeps_a_budget_of_it_is_checked(folder: Path, capfd) -> None:
    assert main(["check", "own.py:kept", "--examples", "5"]) == 0
    assert "no property is broken" in capfd.readouterr().out


def test_a_file_that_names_itself_is_told_so(folder: Path) -> None:
    looped = (
        "import cactus_theory as ct\n\nrule = ct.policy('band:price=1,divergence=me.py:Mine')\n"
    )
    (folder / "me.py").write_text(looped, encoding="utf-8")
    with pytest.raises(ValueError, match="me.py, line 3 .*: must not be named while it is read"):
        ct.policy("me.py:rule")


def test_a_verifier_of_a_file(folder: Path) -> None:
    assert verifiers.find_verifier("own.py:Mine").spec == "own.py:Mine"
    with pytest.raises(TypeError, match="verifier: own.py:number must be a Verifier; got 3"):
        verifiers.find_verifier("own.py:number")


def test_a_schedule_of_a_file(folder: Path) -> None:
    found = read_rule("own.py:Early:tokens=2,price=3")
    assert isinstance(found, Schedule) and vars(found)["tokens"] == 2
    assert [policy.spec for policy in found.policies] == ["band:price=3.0", "speculative"]
    assert vars(read_rule("own.py:early"))["tokens"] == 3
    spec = str(folder / "own.py:Early:tokens=2")
    assert checked_policy(spec) == spec and followers(spec, ["chain", "block"]) == [
        "chain",
        "block",
    ]
    for wrong, said in {
        "own.py:Early": "needs the knob tokens",
        "own.py:Early:tokens=2,tokens=3": "tokens must be given once",
        "own.py:Early:token=2": "takes the knobs tokens, price; got 'token'",
        "own.py:Early:tokens=x": "tokens: must be a whole number; got 'x'",
        "own.py:early:tokens=2": "takes the knobs none",
    }.items():
        with pytest.raises(ValueError, match=said):
            read_rule(wrong)
    with pytest.raises(TypeError, match="rule: own.py:Early must be a Policy"):
        ct.policy("own.py:Early:tokens=2")


@pytest.mark.parametrize(
    "spec", ["band:price=1,divergence=own.py:Nats", "own.py:Early:tokens=2", "own.py:Nats"]
)
def test_data_names_no_code(folder: Path, spec: str) -> None:
    (folder / "own.py").write_text("raise SystemExit('this ran')", encoding="utf-8")
    with pytest.raises(ValueError, match=r"policy: must .* in a data file|no code in a data file"):
        policy_of_data(spec, folder / "tuned.json")
    best = {"policy": "speculative", "verifier": "own.py:Mine", "num_draft_tokens": 2}
    content = {"format": "cactus-theory tuned", "version": 2, "level": 0.1, "divergence": "kl",
               "source": {}, "recommended": best}  # fmt: skip
    (folder / "tuned.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="verifier: must be one of"):
        ct.load_tuned(folder / "tuned.json")
    with pytest.raises(ValueError, match="divergence: must be one of"):
        known_divergence("own.py:Nats")
