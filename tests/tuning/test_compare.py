"""Every line of a comparison is a replay, or an audit, of its solved knob."""

import csv
import json
import math

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.base.significance import items_needed
from cactus_theory.cli import main
from cactus_theory.traces import replay
from cactus_theory.traces.estimate import ratio_of_sums
from cactus_theory.tuning.knobs import EXACT
from tests.tuning.test_knobs import ROWS, plain, timid, wild

RULES = """
import cactus_theory as ct

@ct.rule(direction=+1, strict=0.0, knob_range=(0, 1))
def between(q, p, *, share=0.3):
    h = q ** (1 - share) * p**share
    return h / h.sum()

@ct.rule(strict=0.0)
def wild(q, p, n, *, delta=0.3):
    raise RuntimeError("no such rows")
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Rows and rules in the folder of the test, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", target=ROWS[0], draft=ROWS[1])
    (tmp_path / "mine.py").write_text(RULES)
    return tmp_path


def test_lines_on_rows_are_what_the_audit_says() -> None:
    found = ct.compare(["mixture", "band", "band:price=0.9"], ROWS, nats=[0.02, 0.1])
    assert found.solved and found.notes == {"divergence": "kl", "rows": 60}
    policies = [line["policy"].partition("=")[0] for line in found.lines]
    assert policies == ["speculative", "band:price", *["mixture:alpha", "band:price"] * 2]
    accepted = {}
    for line in found.lines:
        own = ct.audit(line["policy"], *ROWS)
        spent = own.divergences["kl"]
        accepted[line["policy"]] = mean = ratio_of_sums(own.acceptance, np.ones(60), "rows")
        assert line["acceptance"] == pytest.approx(mean.value, abs=1e-12)
        assert line["nats_se"] == pytest.approx(spent.std(ddof=1) / np.sqrt(60), abs=1e-12)
        share = own.acceptance.sum() / own.optimum_acceptance.sum()
        assert line["share_of_row_optimum"] == pytest.approx(share, abs=1e-12)
        beside = mean / accepted["speculative"]
        assert line["over_lossless_se"] == pytest.approx(beside.standard_error, abs=1e-12)
        law = ct.emitted_law(line["policy"], *ROWS)
        assert line["entropy"] == pytest.approx(-np.nansum(law * np.log(law)) / 60, rel=1e-9)
        moved = law - ROWS[0]
        assert line["surprise"] == pytest.approx(-np.sum(moved * np.log(ROWS[0])) / 60, abs=1e-9)
        assert line["agreement"] == pytest.approx(np.sum(moved * ROWS[0]) / 60, abs=1e-12)
        worst = ct.divergence("kl").value(*map(torch_rows, (law, ROWS[0]))).max()
        assert line["largest_row"] == pytest.approx(float(worst), abs=1e-9)
        best = ct.pooled_acceptance(*ROWS, delta=max(line["nats"], 0.0)).mean_acceptance
        assert line["share_of_pooled_optimum"] == pytest.approx(line["acceptance"] / best, rel=1e-5)
    for first, second, level in ((2, 3, 0.02), (4, 5, 0.1)):
        first, second = found.lines[first], found.lines[second]
        assert first["asked"] == level and first["nats"] == pytest.approx(level, rel=EXACT)
        ratio = accepted[second["policy"]] / accepted[first["policy"]]
        assert second["over_first"] == pytest.approx(ratio.value, rel=1e-12)
        needed = items_needed(ratio.value - 1, ratio.standard_error, 60)
        assert second["texts_needed"] == needed and first["texts_needed"] is None
        assert ct.policy(second["policy"]).price == second["knob"]


def torch_rows(rows):
    import torch

    return torch.as_tensor(rows)


def test_lines_on_a_trace_are_replays_by_verifier_and_k(trace) -> None:
    asked = {"verifiers": ["chain", "block"], "widths": [1, 3]}
    found = ct.compare(["band", "typical"], trace, nats=0.05, acceptance=[0.9], **asked)
    ways = [(line["verifier"], line["num_draft_tokens"]) for line in found.lines]
    assert ways == [way for name in ("chain", "block") for k in (1, 3) for way in [(name, k)] * 5]
    for line in (line for line in found.lines if not line["why"]):
        way = {"verifier": line["verifier"], "num_draft_tokens": line["num_draft_tokens"]}
        own, lossless = (replay(trace, spec, **way) for spec in (line["policy"], "speculative"))
        assert line["tokens_per_call"] == own.tokens_per_call.value
        beside = own.tokens_per_call / lossless.tokens_per_call
        assert (line["over_lossless"], line["over_lossless_se"]) == (
            beside.value, beside.standard_error,
        )  # fmt: skip
        assert line["nats"] == own.divergence_per_token().value
        assert (line["entropy"] is None) == (line["verifier"] == "block")
    refused = [line for line in found.lines if line["verifier"] == "block" and line["why"]]
    assert len(refused) == 4 and not found.solved
    assert "block needs a policy with a row of its own" in refused[0]["why"]


def test_rules_that_cannot_be_solved_have_a_line_that_says_so() -> None:
    found = ct.compare([timid, wild, plain, "lenience"], ROWS, nats=0.05)
    why = {line["policy"].partition(":")[0]: line["why"] for line in found.lines}
    assert why["timid"].startswith("reaches at most 8.") and "no such rows" in why["wild"]
    assert why["plain"].startswith("has no knob") and not why["lenience"]
    numbers = {line["policy"].partition(":")[0]: line["nats"] for line in found.lines}
    assert numbers["timid"] is None and numbers["plain"] == pytest.approx(0, abs=1e-12)
    assert not found.solved and "wild:delta at 0.05 nats: raises RuntimeError" in str(found)


def test_the_field_s_own_set_is_compared_without_policies() -> None:
    found = ct.compare(None, [rows[:8] for rows in ROWS])
    named = [line["policy"].partition(":")[0] for line in found.lines]
    assert sorted(named) == sorted({*ct.list_policies()} - {"regret"})  # of temperature 0
    assert {line["asked"] for line in found.lines[1:]} == {0.05}


def test_only_columns_that_fit_are_told_of_below_the_table(monkeypatch) -> None:
    found = ct.compare(["band:price=1"], [rows[:8] for rows in ROWS])
    for width, fits in (("140", True), ("80", False)):
        monkeypatch.setenv("COLUMNS", width)
        assert ("of pooled:" in str(found)) == fits and "surprise:" in str(found)


def test_the_command_prints_writes_and_draws(files, capsys) -> None:
    pytest.importorskip("matplotlib")
    asked = ["compare", "rows.npz", "--policy", "mine.py:between", "--policy", "band", "--nats"]
    saved = ["--csv", "t.csv", "--latex", "t.tex", "--plot", "t.pdf", "--width", "column"]
    assert main([*asked, "0.02", "0.1", *saved]) == 0
    said = capsys.readouterr().out
    assert "mine.py:between:share=" in said and "texts needed" in said
    assert max(map(len, said.splitlines())) <= 140
    table = (files / "t.csv").read_text().splitlines()
    lines = list(csv.DictReader(line for line in table if line[0] != "#"))
    assert [line["asked"] for line in lines] == ["", "0.02", "0.02", "0.1", "0.1"]
    command = f"cactus-theory {' '.join([*asked, '0.02', '0.1'])}"
    assert {"# divergence: kl", f"# command: {command}"} < set(table)
    text = (files / "t.tex").read_text()
    assert f"% command: {command}\n" in text and "% machine: " in text and "% torch: " in text
    assert text.count("\\\\\n") == 6 and "\\toprule" in text and "mine.py" in text
    assert (files / "t.pdf").read_bytes().startswith(b"%PDF")
    assert main([*asked, "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["solved"] and found["provenance"]["command"].endswith("--policy band --nats 0.1")
    assert found["lines"][-1]["nats"] == pytest.approx(float(lines[-1]["nats"]), rel=2 * EXACT)


def test_exit_codes_and_errors_before_work(files, capsys) -> None:
    rows = ["compare", "rows.npz", "--policy", "mine.py:wild", "--policy", "band"]
    assert main(rows) == 1  # and the others have their lines
    said = capsys.readouterr().out
    assert "raises wild: mine.py, line 11" in said and "band:price=" in said
    for flags, error in (
        (["--nats", "0"], "nats: must lie in (0, inf]; got 0.0"),
        (["--verifier", "block"], "--verifier: must be given with a trace"),
        (["--num-draft-tokens", "2"], "--num-draft-tokens: must be given with a trace"),
        (["--plot", "t.gif"], "--plot: must end in .png, .pdf, .svg"),
        (["--latex", "none/t.tex"], "--latex: must be a writable file"),
        (["--policy", "bandd"], "'bandd'"),
    ):
        assert main([*rows, *flags, "--csv", "u.csv"]) == 2
        printed = capsys.readouterr()
        assert error in printed.err and not printed.out
    assert not (files / "u.csv").exists()


def test_lines_made_before_an_interrupt_are_kept(files, monkeypatch, capsys) -> None:
    module = __import__("cactus_theory.tuning.compare", fromlist=["compare"])
    means = module.row_means

    def stopped(policy, *given, **options):
        if policy.name == "cactus":
            raise KeyboardInterrupt
        return means(policy, *given, **options)

    monkeypatch.setattr(module, "row_means", stopped)
    asked = ["compare", "rows.npz", "--policy", "band", "--policy", "cactus", "--csv", "t.csv"]
    assert main(asked) == 130
    assert "lines made so far are in --csv" in capsys.readouterr().err
    table = (files / "t.csv").read_text().splitlines()
    kept = [line.partition(":")[0].partition(",")[0] for line in table if line[0] != "#"]
    assert kept == ["policy", "speculative", "band"]


def test_a_row_that_spends_without_end_is_no_number_of_the_picture(files) -> None:
    pytest.importorskip("matplotlib")
    q, p = (rows.copy() for rows in ROWS)
    q[:, 0], q[:, 1] = 0.0, q[:, 1] + q[:, 0]
    np.savez("holes.npz", target=q, draft=p)
    asked = ["compare", "holes.npz", "--policy", "mixture:alpha=0.3,support=free"]
    assert main([*asked, "--plot", "t.png", "--json"]) == 0
    found = ct.compare(["mixture:alpha=0.3,support=free"], (q, p)).lines[1]
    assert found["nats"] == math.inf and found["share_of_pooled_optimum"] is None
