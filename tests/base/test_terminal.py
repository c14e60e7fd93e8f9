"""Tables keep to their width, and progress is a line now and then."""

import sys

import pytest

from cactus_theory.base import terminal
from cactus_theory.base.tables import fitted, shown, text_table, width_of_terminal
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


def test_a_cost_is_never_left_out() -> None:
    heads, row = ("policy", "K", "KL/token", "accepted"), ["a_long_policy", "8", "0.0512", "2.1"]
    for width in (30, 10):
        made = fitted(heads, [row], width, needed=3)
        assert made == text_table(heads[:3], [row[:3]])


def test_a_terminal_narrower_than_the_most_decides(monkeypatch) -> None:
    for columns, width in (("80", 80), ("300", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert width_of_terminal(100) == width


def test_what_is_piped_is_as_wide_as_it_may_be(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)  # no terminal behind it
    assert width_of_terminal(100) == 100


def test_values_are_shown_in_four_digits() -> None:
    values = (None, True, False, 3, 1e-13, 0.123456, "a")
    assert [*map(shown, values)] == ["–", "yes", "NO", "3", "0", "0.1235", "a"]


def test_progress_says_a_line_now_and_then(monkeypatch, capsys) -> None:
    clock = iter([0.0, 1.0, 16.0, 17.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with Progress("decoding", 3) as shown_progress:
        for note in ("", "b", "c"):
            shown_progress.advance(note)
    assert capsys.readouterr().err == "decoding 2/3 b\ndecoding 3/3 c\n"
