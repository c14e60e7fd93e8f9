"""``python -m simulations simulate``: costs, the best K, what is said about independence."""

import pytest

from cactus_theory.traces import Trace, replay
from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.simulate import call_cost

SMALL = "--vocab 30 --texts 4 --cycles 3 --distance 0.4 --num-draft-tokens 1 2 4".split()
POLICIES = ("--policy", "speculative", "band:price=1", "sample_and_match")


@pytest.fixture
def made(tmp_path, capsys):
    def run(*flags: str):
        out = tmp_path / "x.csv"
        assert main(["simulate", *SMALL, *POLICIES, *flags, "--out", str(out)]) == 0
        return *read_csv(out), capsys.readouterr().out

    return run


def test_every_case_has_its_speed_and_one_best_k(made) -> None:
    flags = ("--cost-ratio", "0.05", "0.5", "--verify-cost", "0.02", "--fixed-cost", "0.1")
    rows, notes, _ = made(*flags)
    assert len(rows) == (2 + 2 + 1) * 2 * 3  # sample_and_match has no row for blocks
    for row in rows:
        ratio, width = float(row["cost_ratio"]), int(row["num_draft_tokens"])
        cost = 1 + width * (ratio + 0.02) + 0.1
        assert cost == pytest.approx(call_cost(width, ratio, 0.02, 0.1))
        assert float(row["speedup"]) == pytest.approx(float(row["tokens_per_call"]) / cost)
        assert float(row["speedup_se"]) == pytest.approx(float(row["tokens_per_call_se"]) / cost)
    for spec, verifier in {(row["policy"], row["verifier"]) for row in rows}:
        for ratio in ("0.05", "0.5"):
            own = [r for r in rows if (r["policy"], r["verifier"], r["cost_ratio"])
                   == (spec, verifier, ratio)]  # fmt: skip
            (best,) = [row for row in own if row["best"] == "True"]
            assert float(best["speedup"]) == max(float(row["speedup"]) for row in own)
    assert "--verify-cost 0.02" in notes["command"] and "replay" in notes["caveat"]


def test_dear_drafts_want_a_small_k_and_lossless_costs_nothing(made) -> None:
    rows, _, shown = made("--cost-ratio", "0.01", "2")
    best = {(r["policy"], r["verifier"], r["cost_ratio"]): r for r in rows if r["best"] == "True"}
    for policy, verifier in {key[:2] for key in best}:
        cheap, dear = (best[policy, verifier, c] for c in ("0.01", "2"))
        assert int(dear["num_draft_tokens"]) == 1 <= int(cheap["num_draft_tokens"])
        assert float(dear["speedup"]) < 1
    assert int(best["band:price=1.0", "chain", "0.01"]["num_draft_tokens"]) == 4
    for row in rows:
        lossless = row["policy"] in ("speculative", "sample_and_match")
        assert (
            abs(float(row["kl_per_token"])) < 1e-9 if lossless else float(row["kl_per_token"]) > 0
        )
    assert "independent of the drafted tokens" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_the_texts_can_be_kept_and_replayed(made, tmp_path) -> None:
    rows, notes, _ = made("--save-trace", str(tmp_path / "t"), "--seed", "5")
    trace = Trace.open(tmp_path / "t")
    found = replay(trace, "band:price=1", "block", num_draft_tokens=2)
    (row,) = [r for r in rows if (r["policy"], r["verifier"], r["num_draft_tokens"])
              == ("band:price=1.0", "block", "2")]  # fmt: skip
    assert float(row["tokens_per_call"]) == pytest.approx(found.tokens_per_call.value)
    assert float(row["kl_per_token"]) == pytest.approx(found.divergence_per_token().value)
    assert "save-trace" not in notes["command"] and "--seed 5" in notes["command"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cost-ratio", "-1"), "--cost-ratio: must be at least 0; got -1.0"),
        (("--fixed-cost", "nan"), "--fixed-cost: must be at least 0; got nan"),
        (("--distance", "2"), "distance: must lie in [0, 1]; got 2.0"),
        (("--num-draft-tokens", "0", "2"), "--num-draft-tokens: must be at least 1; got 0"),
        (("--policy", "cactuss"), "'cactuss'"),
        (("--verifier", "knot"), "--verifier: must be among"),
    ],
)
def test_wrong_flags_are_named(tmp_path, capsys, flags, said) -> None:
    assert main(["simulate", *SMALL, *flags, "--out", str(tmp_path / "x.csv")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "x.csv").exists()
