"""The command line as a user meets it: real files, real output, one line for bad input."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.cli import main
from tests.amounts import some

Q, P = [0.2, 0.2, 0.6], [0.45, 0.45, 0.1]
PAIR = Path(__file__).parents[2] / "simulations" / "pair"
DRAFT = ("--draft", str(PAIR / "draft"))
GENERATE = ("generate", "--target", str(PAIR / "target"), "--prompt", "def", "--seed", "1")
PRINTED = 1e-12  # JSON carries shortest round-trip floats: nothing is lost


def saved(folder: Path, q, p) -> list[str]:
    """Write rows of both models; return their files."""
    for name, rows in (("q", q), ("p", p)):
        np.save(folder / f"{name}.npy", np.array(rows))
    return [str(folder / "q.npy"), str(folder / "p.npy")]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return saved(tmp_path, Q, P)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.strip().splitlines()) == 1
    return json.loads(out)


def test_solve_says_what_the_library_says(files, capsys) -> None:
    found = run_json(capsys, "solve", *files, "--delta", "0.1")
    best = ct.optimal_acceptance(np.array(Q), np.array(P), delta=0.1)
    for name in ("acceptance", "divergence", "lower", "upper", "price", "gap"):
        assert found[name] == pytest.approx(float(getattr(best, name)), abs=PRINTED)
    assert found["speculative"] == pytest.approx(0.5, abs=PRINTED)
    assert found["asked"] == {"divergence": "kl", "delta": 0.1}


@pytest.mark.parametrize("names", [("target_probs", "draft_probs"), ("target", "draft")])
@pytest.mark.parametrize("command", [("solve", "--delta", "0.1"), ("audit", "--policy", "typical")])
def test_one_file_holds_both_models(files, tmp_path: Path, capsys, command, names) -> None:
    both = str(tmp_path / "both.npz")
    np.savez(both, **dict(zip(names, (np.array(Q), np.array(P)), strict=True)))
    one, two = (run_json(capsys, command[0], *rows, *command[1:]) for rows in ((both,), files))
    assert one == two


def test_solve_reads_logits_and_saves_rows(tmp_path: Path, files, capsys) -> None:
    shifted, draft, out = (tmp_path / name for name in ("q.json", "p.json", "h.npy"))
    shifted.write_text(json.dumps((np.log(Q) + 3).tolist()))
    draft.write_text(json.dumps(np.log(P).tolist()))
    main(["solve", str(shifted), str(draft), "--logits", "--delta", "0.1", "--out", str(out)])
    best = ct.optimal_acceptance(np.array(Q), np.array(P), delta=0.1)
    np.testing.assert_allclose(np.load(out), best.target, atol=1e-12)


def test_rows_with_seven_digits_are_normalised_when_asked(tmp_path: Path, capsys) -> None:
    paths = [str(tmp_path / name) for name in ("q.json", "p.json")]
    for path, row in zip(paths, (np.array(Q) / 3, np.array(P) / 7), strict=True):
        Path(path).write_text(f"[{','.join(f'{x:.7f}' for x in row)}]")
    found = run_json(capsys, "solve", *paths, "--delta", "0.1", "--normalise")
    best = ct.optimal_acceptance(np.array(Q), np.array(P), delta=0.1)
    assert found["acceptance"] == pytest.approx(float(best.acceptance), abs=1e-5)
    seen = run_json(capsys, "audit", *paths, "--normalise", "--policy", "speculative")
    assert seen["acceptance"] == pytest.approx(0.5, abs=1e-5)


def test_audit_reports_the_overspend(files, capsys) -> None:
    found = run_json(capsys, "audit", *files, "--policy", "cactus:delta=0.25")
    assert found["policy"] == "cactus:delta=0.25"
    assert found["divergences"]["kl"] == pytest.approx(0.5507, abs=5e-5)
    assert found["within"] is False
    assert found["declares"]["budget"]["scope"] == "per proposal"


def test_audit_says_the_worst_row_of_a_policy_without_a_budget(tmp_path: Path, capsys) -> None:
    paths = saved(tmp_path, [Q, Q], [P, Q])
    assert main(["audit", *paths, "--policy", "top_k:k=2"]) == 0
    spent = ct.audit(ct.policy("top_k:k=2"), np.array(Q), np.array(P))
    worst = f"{float(spent.divergences['kl'].max()):.6g}"
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(f"declares: no budget; the most it spends on a row here: kl {worst}")
    assert main(["audit", *paths, "--policy", "cactus:delta=0.1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("declares: kl <= 0.1 per proposal")
    assert "spent: kl of the proposal of a token" in out


def test_csv_holds_every_row_to_the_last_digit(tmp_path: Path, capsys) -> None:
    paths = saved(tmp_path, [Q, Q[::-1]], [P, P[::-1]])
    out = tmp_path / "rows.csv"
    assert main(["audit", *paths, "--policy", "cactus:delta=0.25", "--csv", str(out)]) == 0
    notes, *lines = out.read_text().splitlines()
    assert notes == "# policy: cactus:delta=0.25"
    table = list(csv.DictReader(lines))
    report = ct.audit(
        ct.policy("cactus:delta=0.25"), np.array([Q, Q[::-1]]), np.array([P, P[::-1]])
    )
    assert [float(row["acceptance"]) for row in table] == report.acceptance.tolist()
    assert [row["within"] for row in table] == [str(value) for value in report.within.tolist()]


@pytest.mark.parametrize(("suffix", "start"), some([("svg", b"<?xm"), ("pdf", b"%PDF")], 1))
def test_equal_rows_give_equal_pictures(tmp_path: Path, files, suffix: str, start: bytes) -> None:
    out = [tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"]
    for file in out:
        assert (
            main(["compare", *files, "--policy", "typical:epsilon=0.1", "--plot", str(file)]) == 0
        )
    assert out[0].read_bytes() == out[1].read_bytes() and out[0].read_bytes()[:4] == start


def test_generate_decodes_by_the_verifier_it_is_told(capsys) -> None:
    asked = (*GENERATE, *DRAFT, "--max-new-tokens", "8")
    chain = run_json(capsys, *asked, "--policy", "speculative")
    block = run_json(capsys, *asked, "--policy", "band:price=1", "--verifier", "block")
    assert [chain["verifier"], block["verifier"]] == ["chain", "block"]
    assert chain["emitted_kl_per_token"] < PRINTED < block["emitted_kl_per_token"]


def test_generate_prints_the_text_while_it_is_decoded(capsys, monkeypatch) -> None:
    asked = [*GENERATE, "--prompt", "def é(", *DRAFT, "--max-new-tokens", "16"]
    asked += ["--policy", "band:price=1"]
    assert main(asked) == 0
    text, pieces = capsys.readouterr().out, []
    streamer = pytest.importorskip("transformers").TextStreamer
    show = streamer.on_finalized_text

    def seen(self, piece: str, stream_end: bool = False) -> None:
        pieces.append(piece)
        show(self, piece, stream_end)

    monkeypatch.setattr(streamer, "on_finalized_text", seen)
    assert main([*asked, "--stream"]) == 0
    assert capsys.readouterr().out == text and len(pieces) > 4
    with pytest.raises(SystemExit):
        main([*asked, "--stream", "--json"])
    assert "not allowed with" in capsys.readouterr().err


def test_generate_without_the_meter_is_the_same_text(capsys, tmp_path) -> None:
    """A rule whose residual depends on the token is asked V × V questions by the meter alone."""
    asked = (*GENERATE, *DRAFT, "--max-new-tokens", "6")
    (tmp_path / "unmetered.py").write_text(
        "import cactus_theory as ct\nasked = []\n"
        "def rest(q, p, n):\n    asked.append(n)\n    return q\n"
        "@ct.rule(residual=rest)\ndef mine(q, p, n):\n    return 0.5\n"
    )
    found = run_json(capsys, *asked, "--policy", f"{tmp_path}/unmetered.py:mine", "--meter", "off")
    assert found["text"] and not {name for name in found if name.startswith("emitted_kl")}
    assert len(sys.modules["unmetered"].asked) <= found["target_calls"]


def test_generate_says_nothing_of_drafts_where_nothing_is_drafted(capsys) -> None:
    asked = [*GENERATE, "--max-new-tokens", "4"]
    assert main(asked) == 0
    said = capsys.readouterr().err
    assert "calls of the target" in said and "draft" not in said and "accept" not in said
    assert main([*asked, "--prompt", "def f(", *DRAFT]) == 0
    rates = re.search("by position, of those reached: (.*)", capsys.readouterr().err)
    assert rates is not None and rates[1].endswith(", –")  # a place that no draft reached


def test_generate_keeps_a_cap(capsys) -> None:
    asked = (*GENERATE, *DRAFT, "--max-new-tokens", "16")
    rule = ("--policy", "band:price=0.4")
    free, capped = (run_json(capsys, *asked, *rule, *more) for more in ((), ("--cap", "0.02")))
    assert free["emitted_kl_per_token"] > 0.02 >= capped["emitted_kl_per_token"] > PRINTED
    assert capped["policy"] == "band:price=0.4, at most 0.02 nats a token"
    assert main([*asked, *rule]) == 0
    said = capsys.readouterr().err
    assert f"({free['tokens_per_call']:.3g} a call)" in said
    assert f" nats, {free['emitted_kl_per_token']:.4g} a token" in said
    assert f", {free['largest_row_kl']:.4g} at the largest row" in said


def test_a_missing_optional_package_names_its_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    models = ("--target", "a", "--draft", "b", "--prompt", "x")
    assert main(["generate", *models, "--policy", "speculative"]) == 2
    assert "cactus-theory[llm]" in capsys.readouterr().err
