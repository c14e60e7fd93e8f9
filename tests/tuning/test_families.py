"""The solved knob is where a replay meters the level, for every family, K and divergence."""

import math
from dataclasses import replace

import pytest

import cactus_theory as ct
from cactus_theory.traces import replay
from cactus_theory.tuning.families import families
from cactus_theory.tuning.knobs import TOLERANCE, Knobs, trace_knobs
from tests.amounts import some

# of the trace, for two widths; a pass takes seconds
MOST_PASSES = 12
NAMES = ["cactus:delta", "band:price", "band:delta", "lenience:lenience", "mixture:alpha"]
KL = ct.divergence("kl")
TUNED = [own for own in families(KL, NAMES) if own.least < own.most]


@pytest.mark.parametrize("family", some(TUNED, 3), ids=lambda own: own.key)
@pytest.mark.parametrize("level", some([0.01, 0.05, 0.1], 1))
def test_the_meter_reads_the_level_at_every_k(trace, family, level: float) -> None:
    solver = trace_knobs(trace, family, [1, 2, 4], KL)
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
    found = trace_knobs(trace, band, [2], ct.divergence(spec)).at(2, 0.03)
    assert found is not None and found.policy.endswith(f"divergence={spec}")
    again = replay(trace, found.policy, num_draft_tokens=2, divergences=(spec,))
    assert again.divergence_per_token(spec).value == pytest.approx(0.03, rel=TOLERANCE)


def test_a_family_that_cannot_spend_the_level_is_at_its_loosest(trace) -> None:
    band = next(own for own in TUNED if own.key == "band:price@chain")
    found = trace_knobs(trace, band, [1], KL).within(1, 50.0)
    assert found is not None and found.policy == band.policy(band.most).spec
    kept = found.accepted_at.sum() / found.cycles.sum()
    assert kept == pytest.approx(1, abs=0.02)  # the draft has tokens that float16 rows lack


def test_a_family_that_always_spends_more_is_left_out(trace) -> None:
    band = next(own for own in TUNED if own.key == "band:price@chain")
    assert trace_knobs(trace, replace(band, least=0.5), [1], KL).within(1, 1e-4) is None
    fixed = families(KL, ["mixture:alpha=0.5"])[-1]
    assert trace_knobs(trace, fixed, [1], KL).within(1, 1e-3) is None
    assert trace_knobs(trace, fixed, [1], KL).within(1, 10) is not None
    lossless = families(KL)[0]
    assert trace_knobs(trace, lossless, [1], KL).within(1, 0.0) is not None


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

    family = replace(TUNED[0], least=1e-9, most=1e2, first=1.0)
    monkeypatch.setattr(type(family), "policy", lambda self, looseness: looseness)
    monkeypatch.setattr(type(family), "value", lambda self, looseness: looseness)
    for level in (0.02, 0.1, 0.15):
        solver = Knobs(family, [1], lambda x, width: {width: curve(x)}, float)
        spent = solver.within(1, level)
        assert spent is not None and solver.passes < 40
        jumps = (
            curve(0.0999) * 1.01 < level < curve(0.1) * 0.99
        )  # over the level: the last one below it
        assert spent == pytest.approx(1e-3 if jumps else level, rel=TOLERANCE)


def test_the_free_knob_is_the_one_without_a_value() -> None:
    """A band has a budget in a divergence without a price; what has a value stays there."""
    keys = lambda names, kind="kl": [own.key for own in families(ct.divergence(kind), names)][2:]  # noqa: E731
    both = ["band:price,hold=eos@chain", "band:price,hold=eos@block"]
    assert keys(["band:hold=eos"]) == keys(["band:price,hold=eos"]) == both
    assert keys(["band"]) == keys(["band:price"]) == ["band:price@chain", "band:price@block"]
    assert keys(["lenience"]) == keys(["lenience:lenience"]) == ["lenience:lenience@chain"]
    assert keys(["cactus"]) == ["cactus:delta@chain"]
    assert keys(["cactus@block", "speculative"]) == ["cactus:delta@block"]
    assert keys(["typical", "typical:epsilon=0.3"]) == [
        "typical:epsilon@chain", "typical:epsilon=0.3@chain",
    ]  # fmt: skip
    assert keys(["band"], "renyi:a=2") == ["band:delta@chain", "band:delta@block"]
    with pytest.raises(ValueError, match="band:delta for the others; got renyi:a=2"):
        keys(["band:price"], "renyi:a=2")
    with pytest.raises(ValueError, match="knob: must be one of delta, price"):
        keys(["band:prize"])


def test_a_family_may_name_its_verifier():
    found = families(KL, ["cactus@block", "band:price"])
    assert [own.key for own in found] == [
        "speculative@chain", "speculative@block", "cactus:delta@block", "band:price@chain",
        "band:price@block",
    ]  # fmt: skip
    assert found[2].policy(0.01) == ct.policy("cactus", delta=0.01)
    with pytest.raises(ValueError, match="verifier"):
        families(KL, ["cactus@blok"])
