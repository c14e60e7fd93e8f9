"""The process in which the user's rule runs; it writes events as JSON lines to its parent.

``python -m cactus_theory.testing._worker '{"source": "file.py:name", …}'``. What the rule
prints goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from cactus_theory import _arguments as check
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy
from cactus_theory.testing._examples import examples
from cactus_theory.testing._load import load_rule
from cactus_theory.testing._runner import Verdict, check_rule, declared, measure
from cactus_theory.testing.laws import LAWS, Behaviour

Say = Callable[..., None]


def main(options: dict[str, Any]) -> None:
    """Check the rule, or with ``trace`` try one row after the other until the process dies."""
    torch.set_num_threads(1)
    say = _speaker()
    try:
        rule = load_rule(options["source"])
        said = declaration(rule, options["source"])
        for name in options["laws"] or ():
            check.one_of("--laws", name, tuple(LAWS))
    except (ValueError, TypeError, OSError) as error:
        say(event="refused", message=" ".join(str(error).split()))
        return
    statements = {prop.name: prop.statement for prop in LAWS.values()}
    say(event="loaded", rule=rule.spec, declares=said, statements=statements)
    groups = examples(options["examples"], options["seed"])
    if options["trace"]:
        prop = LAWS[options["trace"]]
        for q, p in groups:
            for i in range(len(q)):
                say(event="row", target=q[i].tolist(), draft=p[i].tolist())
                _ask(prop, Behaviour(rule, q[i : i + 1], p[i : i + 1]))
        return

    def done(verdict: Verdict) -> None:
        say(event="verdict", verdict=asdict(verdict))

    report = check_rule(
        rule,
        groups,
        laws=options["laws"],
        limit=options["timeout"],
        seed=options["seed"],
        progress=lambda name: say(event="law", law=name),
        done=done,
        waiting=lambda seconds: say(event="waiting", seconds=seconds),
    )
    say(event="end", advice=report.advice)


def declaration(rule: Policy, source: str) -> str:
    """Return what the rule declares; raise ValueError for a declaration that cannot be read."""
    try:
        said = rule.declares
        if said.budget is not None:
            find_divergence(said.budget.divergence)
        return declared(rule)
    except Exception as error:
        raise ValueError(
            f"{source}: what it declares cannot be read: {type(error).__name__}: {error}"
        ) from error


def _ask(prop: Any, seen: Behaviour) -> None:
    try:
        measure(prop, seen)
    except Exception:  # noqa: BLE001, S110  only the end of the process is of interest here
        pass


def _speaker() -> Say:
    """Return a writer of events to stdout; everything else that is printed goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return say


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
