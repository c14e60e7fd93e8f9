"""``--help`` of programs with commands: grouped by task, with an example on every page."""

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, cast

Parser = argparse.ArgumentParser
Raw = argparse.RawDescriptionHelpFormatter
# group → command → a line about it, the flags of its example, and further entries for its program
Groups = Mapping[str, Mapping[str, tuple[Any, ...]]]
EXAMPLE_WIDTH = 74  # columns, of 80
SubParsers = cast(Any, argparse)._SubParsersAction  # a class without a public name


class _Commands(SubParsers):
    """Declare only the chosen command's flags: other commands may need missing packages."""

    undeclared: dict[str, Callable[[str, Parser], None]]

    def __call__(self, parser: Parser, namespace: Any, values: Any, option: Any = None) -> None:
        if declare := self.undeclared.pop(values[0], None):
            declare(values[0], self.choices[values[0]])
        SubParsers.__call__(self, parser, namespace, values, option)


def add_commands(
    parser: Parser, groups: Groups, declare: Callable[[str, Parser], None], metavar: str
) -> None:
    """Add the commands of ``groups`` to a parser.

    In parsed ``args`` the name of the chosen command stands under ``metavar`` in lower case.
    ``declare`` is called with this name and the command's parser, and adds the flags.
    """
    commands: Any = parser.add_subparsers(
        dest=metavar.lower(), metavar=metavar, required=True, action=_Commands,
        help=f"flags and an example: %(prog)s {metavar} --help",
    )  # fmt: skip
    parts = [parser.description or ""]  # of the description: a paragraph for each group
    width = max(len(name) for entries in groups.values() for name in entries)
    for group, entries in groups.items():
        parts.append(f"{group}:")
        for name, (about, flags, *_) in entries.items():
            parts[-1] += f"\n  {name:<{width}}  {about}"
            command = commands.add_parser(name, description=about, formatter_class=Raw)
            command.epilog = f"example:\n  {_in_lines(f'{command.prog} {flags}')}"
            parser.epilog = parser.epilog or command.epilog  # the first command's example
    commands.undeclared = dict.fromkeys(commands.choices, declare)
    parser.description, parser.formatter_class = "\n\n".join(parts), Raw


def _in_lines(command: str) -> str:
    """Return a command for a shell, broken into lines before its flags if it is long."""
    whole = re.sub(" (?!--)", "\xa0", command)  # ``wrap`` breaks no line at such a blank
    lines = textwrap.wrap(whole, EXAMPLE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines).replace("\xa0", " ")
