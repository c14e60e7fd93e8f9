"""The process in which a stranger's rule runs; it speaks JSON lines to the one that started it.

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

from cactus_theory.testing._examples import examples
from cactus_theory.testing._load import BrokenRule, load_rule
from cactus_theory.testing._runner import Verdict, check_rule, declared, measure
from cactus_theory.testing.laws import LAWS, Behaviour

Say = Callable[..., None]


def main(options: dict[str, Any]) -> None:
    """Check the rule, or with ``trace`` ask about one row after the other until it dies."""
    torch.set_num_threads(1)
    say = _speaker()
    try:
        rule = load_rule(options["source"])
    except BrokenRule as error:
        say(event="broken", message=" ".join(str(error).split()))
        return
    except (ValueError, TypeError, OSError) as error:
        say(event="refused", message=" ".join(str(error).split()))
        return
    groups = examples(options["examples"], options["seed"])
    say(event="loaded", rule=rule.spec, declares=declared(rule))
    if options["trace"]:
        law = LAWS[options["trace"]]
        for q, p in groups:
            for i in range(len(q)):
                say(event="row", target=q[i].tolist(), draft=p[i].tolist())
                _ask(law, Behaviour(rule, q[i : i + 1], p[i : i + 1]))
        return

    def done(verdict: Verdict) -> None:
        say(event="verdict", verdict=asdict(verdict))

    check_rule(
        rule,
        groups,
        laws=options["laws"],
        limit=options["timeout"],
        progress=lambda law: say(event="law", law=law),
        done=done,
    )
    say(event="end")


def _ask(law: Any, seen: Behaviour) -> None:
    try:
        measure(law, seen)
    except Exception:  # noqa: BLE001, S110  only the end of the process is of interest here
        pass


def _speaker() -> Say:
    """Keep stdout for ourselves and send everything else that is printed to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return say


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
