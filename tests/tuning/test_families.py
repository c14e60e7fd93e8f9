"""The solved knob is where a replay meters the level, for every family, K and divergence."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.traces import Replay, replay
from cactus_theory.tuning.families import TOLERANCE, Knobs, families
from tests.amounts import some

# of the trace, for two widths; a pass takes seconds
MOST_PASSES = 12
NAMES = ["cactus:delta", "band:price", "band:delta", "lenience:lenience", "mixture:alpha"]
TUNED = [own for own in families(ct.divergence("kl"), NAMES) if own.least < own.most]


@pytest.mark.parametrize("family", some(TUNED, 3), ids=lambda own: own.key)
@pytest.mark.parametrize("level", some([0.01, 0.05, 0.1], 1))
def test_the_meter_reads_the_level_at_every_k(trace, family, level: float) -> None:
    solver = Knobs(trace, family, [1, 2, 4], "kl")
    for width in (1, 4):
        found = solver.at(width, level)
        assert found is not None and found.num_draft_tokens == width
        again = replay(trace, found.policy, family.verifier, num_draft_tokens=width)
        assert again.divergence_per_token().value == pytest.approx(level, rel=TOLERANCE)
        assert again.tokens_per_call.value == found.tokens_per_call.value
    assert solver.passes <= MOST_PASSES


@pytest.mark.parametrize("spec", some(["reverse_kl", "alpha:a=0.5", "renyi:a=2"], 2))
def test_other_divergences_are_metered_as_themselves(trace, spec: str) -> None:
    known = families(ct.divergence(spec))
    names = {own.name for own in known}
    assert ("band:price" in names) == (spec != "renyi:a=2") != ("band:delta" in names)
    band = next(own for own in known if own.name.startswith("band:"))
    found = Knobs(trace, band, [2], spec).at(2, 0.03)
    assert found is not None and found.policy.endswith(f"divergence={spec}")
    again = replay(trace, found.policy, num_draft_tokens=2, divergences=(spec,))
    assert again.divergence_per_token(spec).value == pytest.approx(0.03, rel=TOLERANCE)


def test_a_family_that_cannot_spend_the_level_is_at_its_loosest(trace) -> None:
    band = next(own for own in TUNED if own.key == "band:price@chain")
    found = Knobs(trace, band, [1], "kl").at(1, 50.0)
    assert found is not None and found.policy == band.policy(band.most).spec
    kept = found.accepted_at.sum() / found.cycles.sum()
    assert kept == pytest.approx(1, abs=0.02)  # the draft has tokens that float16 rows lack


def test_a_family_that_always_spends_more_is_left_out(trace) -> None:
    band = next(own for own in TUNED if own.key == "band:price@chain")
    assert Knobs(trace, replace(band, least=0.5), [1], "kl").at(1, 1e-4) is None
    fixed = families(ct.divergence("kl"), ["mixture:alpha=0.5"])[-1]
    assert Knobs(trace, fixed, [1], "kl").at(1, 1e-3) is None
    assert Knobs(trace, fixed, [1], "kl").at(1, 10) is not None


@pytest.mark.parametrize(
    "curve",
    [
        lambda x: x**2,
        lambda x: 0.3 * x**0.2,
        lambda x: x**3 / (1 + x**3),
        lambda x: 0.0 if x < 0.3 else x - 0.3,  # lossless at first
        lambda x: math.inf if x > 2 else x / 10,  # infinite at last
        lambda x: 1e-3 if x < 0.1 else 5 * x,
    ],
)
def test_any_rising_curve_is_solved(monkeypatch, curve) -> None:
    """Replays are taken from a formula of the looseness x, in the place of a policy."""

    def made(source, spec, verifier, widths, divergences):
        x = spec
        names = ("cycles", "tokens", "drafts", "drafted")
        each = dict.fromkeys(names, np.ones(1))
        rows = {"reached": np.ones((1, 1)), "accepted_at": np.ones((1, 1))}
        spent = {"kl": np.array([curve(x)])}
        return {width: Replay(spec, verifier, width, "s", spent=spent, **each, **rows)
                for width in widths}  # fmt: skip

    monkeypatch.setattr(sys.modules[Knobs.__module__], "replay_widths", made)
    monkeypatch.setattr(sys.modules[Knobs.__module__], "shares_rows", lambda spec, verifier: True)
    family = replace(TUNED[0], least=1e-9, most=1e2, first=1.0)
    monkeypatch.setattr(type(family), "policy", lambda self, looseness: looseness)
    for level in (0.02, 0.1, 0.15):
        solver = Knobs(None, family, [1], "kl")
        found = solver.at(1, level)
        assert found is not None and solver.passes < 40
        spent = found.divergence_per_token().value
        jumps = (
            curve(0.0999) * 1.01 < level < curve(0.1) * 0.99
        )  # over the level: the last one below it
        assert spent == pytest.approx(1e-3 if jumps else level, rel=TOLERANCE)


def test_a_first_word_is_enough() -> None:
    """So is a band in a divergence without a price, which has a budget there."""
    keys = lambda names, kind="kl": [own.key for own in families(ct.divergence(kind), names)][2:]  # noqa: E731
    assert keys(["band,hold=eos"]) == ["band:price,hold=eos@chain", "band:price,hold=eos@block"]
    assert keys(["band"]) == keys(["band:price"]) == ["band:price@chain", "band:price@block"]
    assert keys(["lenience"]) == ["lenience:lenience@chain", "lenience:lenience@block"]
    assert keys(["lenience:lenience"]) == ["lenience:lenience@chain"]
    assert keys(["cactus"]) == ["cactus:delta@chain"]
    assert keys(["cactus:delta@block", "speculative"]) == ["cactus:delta@block"]
    assert keys(["typical", "typical:epsilon=0.3"])[0] == "typical@chain"
    assert keys(["band"], "renyi:a=2") == ["band:delta@chain", "band:delta@block"]
    with pytest.raises(ValueError, match="band:delta for the others; got renyi:a=2"):
        keys(["band:price"], "renyi:a=2")


def test_a_family_may_name_its_verifier():
    found = families(ct.divergence("kl"), ["cactus:delta@block", "band:price"])
    assert [own.key for own in found] == [
        "speculative@chain", "speculative@block", "cactus:delta@block", "band:price@chain",
        "band:price@block",
    ]  # fmt: skip
    assert found[2].policy(0.01) == ct.policy("cactus", delta=0.01)
    with pytest.raises(ValueError, match="verifier"):
        families(ct.divergence("kl"), ["cactus:delta@blok"])
