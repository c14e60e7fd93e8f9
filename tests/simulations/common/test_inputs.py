"""Prompts are read or named, commands are written down as they were given."""

import argparse
from pathlib import Path

import pytest

from cactus_theory.commands.flags import Repeated
from simulations.common.inputs import add_pair_arguments, command_line


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("theory", "verify"))
    add_pair_arguments(parser)
    parser.add_argument("--delta", type=float, nargs="+", default=[0.1])
    parser.add_argument("--max-tokens", type=int, default=5)
    parser.add_argument("--policy", action=Repeated, default=[])
    parser.add_argument("--out", type=Path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("verify", "bench verify"),
        ("verify --out /some/where --max-tokens 5", "bench verify"),
        ("theory --max-tokens 6 --delta 1 0.5", "bench theory --delta 1 0.5 --max-tokens 6"),
        ("verify --target /home/me/stories", "bench verify --target stories"),
        (
            "verify --policy /me/my.py:rule:a=1 --policy fuzzy",
            "bench verify --policy my.py:rule:a=1 --policy fuzzy",
        ),
    ],
)
def test_the_command_holds_what_is_not_usual_and_no_folder(given: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    declare(parser)
    named = argparse.Namespace(command="bench", declare=declare)
    args = parser.parse_args(given.split(), named)
    assert command_line(args, ("out",)) == f"python -m simulations {said}"
