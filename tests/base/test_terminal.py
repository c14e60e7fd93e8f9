"""Tables keep to their width, and progress is a line now and then."""

import pytest

from cactus_theory.base import terminal
from cactus_theory.base.tables import fitted, text_table
from cactus_theory.base.terminal import Progress


def test_cells_are_never_cut_and_heads_stand_at_the_bottom() -> None:
    made = text_table(("policy", "tokens\n/call"), [("band:price=2", "3.1"), ("x", "12.05")])
    assert made.split("\n") == [
        "              tokens",
        "policy         /call",
        "────────────────────",
        "band:price=2     3.1",
        "x              12.05",
    ]


@pytest.mark.parametrize(("width", "columns"), [(30, 3), (22, 3), (21, 2), (14, 2), (13, 1)])
def test_the_last_columns_give_way(width: int, columns: int) -> None:
    rows = [("abcd", "123456", "123456")]
    made = fitted(("policy", "b", "c"), rows, width)
    assert made == text_table(("policy", "b", "c")[:columns], [rows[0][:columns]])


def test_progress_says_a_line_now_and_then(monkeypatch, capsys) -> None:
    clock = iter([0.0, 1.0, 16.0, 17.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    shown_progress = Progress("decoding", 3)
    for note in ("", "b", "c"):
        shown_progress.advance(note)
    assert capsys.readouterr().err == "decoding 2/3 b\ndecoding 3/3 c\n"
