"""Commands in groups: flags are declared once, of the chosen command, and examples paste."""

import argparse
import shlex

import pytest

from cactus_theory.base.help_pages import EXAMPLE_WIDTH, add_commands

LONG = "FILE --text 'a b' " + " ".join(f"--flag-{number} value {number}" for number in range(9))


def program(declared: list[str]) -> argparse.ArgumentParser:
    def declare(name: str, parser: argparse.ArgumentParser) -> None:
        declared.append(name)
        parser.add_argument("--number", type=int)

    parser = argparse.ArgumentParser(prog="it", description="Does it.\n\nWell.")
    groups = {"Solve": {"one": ("the first", LONG), "other": ("the second", "")}}
    add_commands(parser, groups, declare, "WHAT")
    return parser


def test_flags_are_declared_once_and_of_the_chosen_command() -> None:
    declared: list[str] = []
    parser = program(declared)
    for number in (1, 2):
        args = parser.parse_args(["other", "--number", str(number)])
        assert (args.what, args.number) == ("other", number)
    assert declared == ["other"]


def test_an_unknown_command_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        program([]).parse_args(["two"])
    assert "invalid choice: 'two'" in capsys.readouterr().err


def test_a_long_example_breaks_before_flags_and_is_the_same_command() -> None:
    example = (program([]).epilog or "").removeprefix("example:\n")
    lines = example.split(" \\\n")
    assert len(lines) > 2 and all(line.startswith("    --flag") for line in lines[1:])
    assert max(map(len, lines)) <= EXAMPLE_WIDTH + 4
    assert shlex.split(example.replace("\\\n", "")) == shlex.split(f"it one {LONG}")


def test_paragraphs_are_wrapped_and_groups_are_not(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = program([]).format_help()
    assert "\nDoes it.\n\nWell.\n\nSolve:\n  one    the first\n  other  the second\n\n" in said
