"""Flags that several commands share: a policy with its knobs, given once."""

import argparse
from collections.abc import Callable
from typing import Any

import cactus_theory as ct
from cactus_theory.policies._registry import POLICIES


class Once(argparse.Action):
    """Store a value; refuse a second one instead of forgetting the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Enter the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, f"must be given once; got {getattr(namespace, self.dest)} and {values}"
            )
        setattr(namespace, self.dest, values)


def add_policy(
    parser: argparse.ArgumentParser, several: bool = False, required: bool = True
) -> None:
    """Declare ``--policy`` and its knobs; ``several`` lets it be repeated."""
    more = "; may be repeated, for one table of several policies" if several else ""
    parser.add_argument(
        "--policy",
        required=required,
        action="append" if several else Once,
        help=f"one of {', '.join(POLICIES.names())}, or FILE.py:NAME; with :knob=value,knob=value"
        + more,
    )
    parser.add_argument("--delta", type=float, action=Once, help="the policy's delta")
    parser.add_argument("--price", type=float, action=Once, help="the policy's price")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="any other knob"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declare ``--trust-code``, without which no file that is read names code that is run."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run Python that data files name (FILE.py:NAME) and that model folders bring along",
    )


def chosen_policy(args: argparse.Namespace, find: Callable[..., Any] = ct.policy) -> Any:
    """Return what ``--policy``, ``--delta``, ``--price`` and ``--set`` name."""
    knobs: dict[str, Any] = {
        name: getattr(args, name) for name in ("delta", "price") if getattr(args, name) is not None
    }
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set: must read KNOB=VALUE; got {item!r}")
        if name in knobs:
            raise ValueError(f"--set: {name} must be given once; got {item!r} again")
        knobs[name] = value
    return find(args.policy, **knobs)
