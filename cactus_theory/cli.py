"""The command line ``cactus-theory``; its subcommands are in :mod:`cactus_theory.commands`.

Exit codes: 0 done; 1 a property is broken (``check``), an engine's tokens do not have the claimed
law (``served``), every lossy policy exceeds the budget (``tune``), or some policy has no knob that
gives what was asked (``compare``); 2 bad input, in one line on stderr; 3 a rule did not answer in
time (``check``), or there are too few texts or tokens to say anything (``expect``, ``tune``,
``served``); 130 interrupted, in one line on stderr.

The chosen command alone is imported, so that ``--help`` takes no time to load torch.
"""

import argparse
import importlib
import sys

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base.help_pages import add_commands
from cactus_theory.base.specs import blamed
from cactus_theory.base.terminal import REPORTED, ends_quietly, importing, interrupted, one_line
from cactus_theory.commands import COMMANDS
from cactus_theory.commands.flags import check_outputs

# what an interrupted command has kept
KEPT = {
    "compare": "lines made so far are in --csv, if that was given",
    "served": "lines read so far are kept in --state: the same command goes on from there",
    "trace": "texts logged so far are kept in --out: the same command goes on from there",
    "tune": "texts logged so far are kept in --work: the same command goes on from there",
}


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; bad input gives one line on stderr and code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else ""
    try:
        args, others = _parser().parse_known_args(arguments)
        if others:
            args.parser.error(f"unrecognized arguments: {' '.join(others)}")
        check.refuse_empty(arguments)
        check_outputs(args)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return interrupted(f"cactus-theory {command}", KEPT.get(command))
    except (Exception, SystemExit) as error:
        if (said := blamed(error)) is None and not isinstance(error, REPORTED):
            raise
        print(f"cactus-theory {command}: {one_line(said or error)}", file=sys.stderr)
        from cactus_theory.traces.estimate import CannotSay  # imports torch

        return 3 if isinstance(error, CannotSay | TimeoutError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cactus-theory", description=(ct.__doc__ or "").partition("\n")[0]
    )
    add_commands(parser, COMMANDS, _declare, "COMMAND")
    return parser


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    with importing("cactus-theory"):
        command = importlib.import_module(f"cactus_theory.commands.{name}")
    command.add_arguments(parser)
    parser.set_defaults(run=command.run, parser=parser)


if __name__ == "__main__":
    sys.exit(main())
