"""The command: its table, its CSV, what it refuses, and its check of itself."""

import pytest

from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.markov import Setting, command, enumerate_texts, markov_pair
from simulations.markov.texts import Places

SMALL = ["--length", "4", "--num-draft-tokens", "1", "2"]
WIDEST = 100


def test_the_table_and_the_csv(tmp_path, capsys):
    path = tmp_path / "texts.csv"
    given = [
        *SMALL,
        "--policy",
        "speculative",
        "typical",
        "mixture:alpha=0.5,support=free",
        "--zeros",
        "0.3",
    ]
    assert main(["markov", *given, "--seed", "2", "--out", str(path)]) == 0
    rows, notes = read_csv(path)
    assert notes["command"].startswith("python -m simulations markov --length 4 --num-draft-tokens")
    assert [(row["policy"], row["verifier"], row["num_draft_tokens"]) for row in rows[2:6]] == [
        ("speculative", "block", "1"),
        ("speculative", "block", "2"),
        ("typical", "chain", "1"),
        ("typical", "chain", "2"),
    ]
    exact = enumerate_texts(markov_pair(3, seed=2, zeros=0.3), Setting("typical", 2, 4))
    shown = rows[5]
    for name in ("kl", "tokens_per_call", "slack", "total_variation", "tokens"):
        assert float(shown[name]) == pytest.approx(getattr(exact, name), rel=1e-9)
    assert float(shown["meter"]) == pytest.approx(exact.meter.mean, rel=1e-9)
    assert (rows[-1]["kl"], rows[-1]["slack"]) == ("inf", "")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDEST
    assert "verifier: block needs a policy with a row of its own" in printed
    assert f"{exact.kl:.4g}" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "typical", "--verifier", "block"], "--policy: must fit one of the verifiers"),
        (["--num-draft-tokens", "0"], "num_draft_tokens: must be at least 1; got 0"),
        (["--vocab", "9", "--length", "9"], "length: at most 2^21 texts"),
        (["--policy", "nonsense"], "nonsense"),
    ],
)
def test_bad_flags_are_named(flags, message, tmp_path, capsys):
    path = tmp_path / "texts.csv"
    assert main(["markov", *flags, "--out", str(path)]) == 2
    assert message in capsys.readouterr().err and not path.exists()


def test_two_ways_that_disagree_are_an_error(monkeypatch):
    monkeypatch.setattr(command, "follow_places", lambda *_: Places([0.1], [0.2], [0.1]))
    with pytest.raises(RuntimeError, match="kl: must be the sum over tokens 0.1; got"):
        command.measured(markov_pair(3), Setting("cactus:delta=0.1", 1, 3))
