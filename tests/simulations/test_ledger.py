"""The table of capped and free answers, and the run that makes it."""

import numpy as np
import pytest

from cactus_theory.answer_bounds import event_bounds  # noqa: E402
from simulations.__main__ import main  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from simulations.ledger import Answers, Line, along, rows_of  # noqa: E402

pytest.importorskip("transformers")

SMALL = ["--price", "2", "0.5", "--cap", "0.05", "--verifier", "chain", "--repeats", "1"]


def answers(costs, calls):
    return Answers([np.array(own) for own in costs], np.array(calls))


def made_up():
    """Bands of 0.02 and 0.2 nats and 2 and 3 tokens a call; a ledger between them."""
    low = answers([[0.02, 0.02], [0.0, 0.04]] * 2, [1, 1] * 2)
    high = answers([[0.2, 0.2, 0.2], [0.0, 0.3, 0.3]] * 2, [1, 1] * 2)
    own = answers([[0.1, 0.1], [0.12, 0.12]] * 2, [1, 1] * 2)
    lines = [Line("chain", "band", 2.0), Line("chain", "band", 0.5), Line("chain", "ledger", 0.11)]
    return dict(zip(lines, (low, high, own), strict=True))


def test_tokens_are_compared_at_equal_kl():
    low, high, own = rows_of(made_up(), prompts=4)
    assert (low["kl_per_token"], low["tokens_per_call"]) == pytest.approx((0.02, 2.0))
    assert own["kl_per_token"] == pytest.approx(0.11)
    assert own["ratio"] == pytest.approx(2.0 / 2.5) and low["ratio"] is None
    assert own["used"] == pytest.approx(1.0) and own["over"] == 0.5
    assert own["largest_answer"] == pytest.approx(0.12)
    assert high["tokens_per_call"] == pytest.approx(3.0) and own["ratio_se"] is not None


def test_books_along_the_answers():
    last = [row for row in along(made_up()) if row["kind"] == "ledger"][-1]
    assert last["tokens"] == 2
    assert (last["median"], last["largest"]) == pytest.approx((0.22, 0.24))


def test_a_small_run_is_capped_and_resumes(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt": "def {name}(a):"}}\n' for name in ("add", "sum", "go"))
    )
    asked = ["table", "ledger", *SMALL, "--max-new-tokens", "12", "--prompts", str(prompts)]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main([*asked, *folders]) == 0
    rows, notes = read_csv(tmp_path / "out" / "ledger.csv")
    assert "table ledger --prompts prompts.jsonl --price 2 0.5 --cap 0.05" in notes["command"]
    ledger = rows[-1]
    assert ledger["kind"] == "ledger" and float(ledger["over"]) == 0
    assert 0.2 < float(ledger["used"]) <= 1
    books, _ = read_csv(tmp_path / "out" / "ledger_answers.csv")
    for row in books:
        if row["kind"] == "ledger":
            assert float(row["largest"]) <= 0.05 * float(row["tokens"])
    before = (tmp_path / "work" / "journal.jsonl").read_text()
    assert main([*asked, *folders]) == 0
    assert (tmp_path / "work" / "journal.jsonl").read_text() == before
    said = capsys.readouterr().out
    bounds = f"cap 0.05 a token, 12 tokens: {event_bounds(0.9, per_token=0.05, tokens=12).sentence}"
    assert bounds in said and "at most 0.6 nats an answer: 90 % of the target becomes" in bounds
