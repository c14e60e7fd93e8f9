"""Each program of the gallery finds what its page says; pictures and page are complete."""

import importlib
import re

import numpy as np
import pytest
import torch

import cactus_theory as ct
from simulations.__main__ import main
from simulations.gallery import HERE, PROGRAMS
from tests.amounts import THOROUGH

# interpolation between 257 points of a concave curve, and rounding
BETWEEN_POINTS = 1e-4
# the optimum of the block program is proven this well
PROVEN = 1e-6
# the meter adds up the same numbers in another order
ROUNDING = 1e-9

slow = pytest.mark.skipif(
    not THOROUGH, reason="takes seconds; in the thorough suite; run by make test-thorough"
)
PAGE = (HERE / "README.md").read_text(encoding="utf-8")


def measured(name: str):
    return importlib.import_module(f"simulations.gallery.{name}").measure(quick=True)


@pytest.mark.parametrize("name", PROGRAMS if THOROUGH else ["reused_noise"])
def test_a_program_says_something_and_draws_a_picture(name: str, tmp_path, capsys) -> None:
    assert main(["gallery", name, "--quick", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(name)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_every_program_with_its_committed_picture() -> None:
    assert re.findall(r"!\[.+\]\((\w+)\.png\)", PAGE) == list(PROGRAMS)
    assert {path.stem for path in HERE.glob("*.png")} == set(PROGRAMS)


def test_an_unknown_name_runs_nothing(tmp_path, capsys) -> None:
    assert main(["gallery", "reused_noise", "nothing", "--out", str(tmp_path)]) == 2
    assert "'nothing'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_noise_that_is_used_again_is_seen_and_new_noise_is_not() -> None:
    from simulations.gallery.reused_noise import LEVEL, TARGET

    found = measured("reused_noise")
    assert found.p_values(found.reused)[-1] < LEVEL
    assert found.p_values(found.fresh).min() > LEVEL  # false alarm: 1e-6 a line, ten lines
    assert found.reused[-1, 0] / found.rounds[-1] > TARGET[0] + 0.02
    np.testing.assert_allclose(found.law, TARGET, atol=1e-15)


@slow
def test_no_policy_passes_the_frontier_and_a_priced_band_reaches_it() -> None:
    from simulations.gallery.all_rules import highest

    found = measured("all_rules")
    assert {name.partition(":")[0] for name in found.points} == {
        name for name in ct.list_policies() if name != "soft_band"  # which is for blocks
    }  # fmt: skip
    for name, own in found.points.items():
        inside = own[np.isfinite(own[:, 0])]
        assert (inside[:, 1] <= highest(found, inside[:, 0]) + BETWEEN_POINTS).all(), name
    band = found.points["band:price"]
    np.testing.assert_allclose(band[:, 1], highest(found, band[:, 0]), atol=BETWEEN_POINTS)


@slow
def test_the_counterexample_is_one() -> None:
    from cactus_theory.testing import load_rule
    from simulations.gallery.foreign_rule import CLAIM, RULE

    (broken,) = measured("foreign_rule").report.findings
    q, p = (torch.tensor(row, dtype=torch.float64) for row in (broken.target, broken.draft))
    emitted = ct.emitted_law(load_rule(f"{RULE}:agreement"), q, p)
    assert float(ct.divergence("kl").value(emitted, q)) > 2 * CLAIM


@slow
def test_policies_stay_under_the_optimum_and_whole_paths_are_nearer_to_it() -> None:
    from simulations.gallery.block_ceiling import gaps

    found = measured("block_ceiling")
    for own in found.tokens.values():
        assert (own <= found.optimum + PROVEN * found.optimum).all()
    assert gaps(found, "soft band, whole path") < gaps(found, "band, token by token")


@slow
def test_no_answer_of_a_ledger_is_above_its_cap_at_any_length() -> None:
    from simulations.gallery.metered_text import CAP, COLOURS

    found = measured("metered_text")
    ledger = found.spent[list(COLOURS)[-1]]
    places = torch.arange(1, ledger.shape[1] + 1)
    assert bool(((ledger <= CAP * places + ROUNDING) | ledger.isnan()).all())
    assert float(ledger.nan_to_num().amax()) > 0.8 * CAP * len(places)  # and it is made use of


@slow
def test_biases_are_policies_and_the_blocks_law_is_worth_most() -> None:
    from simulations.gallery.engine_bias import PRICES

    found = measured("engine_bias")
    price = torch.tensor(PRICES)
    worth = {
        name: own[:, 1] * (1 - price * own[:, 0])  # tokens a call less price times KL a call
        for name, own in found.curves.items()
    }
    assert (worth["soft band"] >= worth["band"] - ROUNDING).all()
    assert (worth["band"] > found.lossless[1]).all() and found.lossless[0] == 0
    assert torch.allclose(found.biases["band"], torch.ones_like(found.biases["band"]))
    assert found.biases["soft band"][-1] == pytest.approx(1.0)
