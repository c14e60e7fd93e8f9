"""Check a user's rule in a new process, so that a rule that hangs or exits gives an error."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.specs import split
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing._check_policies import check_policy
from cactus_theory.testing._examples import examples as draw_examples
from cactus_theory.testing.properties import PROPERTIES
from cactus_theory.testing.report import Report, declared

WORK = "from cactus_theory.testing.check_process import work; work()"


def check_file(
    source: str,
    *,
    examples: int,
    timeout: float,
    seed: int = 0,
    properties: list[str] | None = None,
    quiet: bool = False,
) -> Report:
    """Check the rule ``file.py:name`` in a new process, and return the report.

    Standard output of the rule is dropped. Unless ``quiet``, each property's name is printed on
    stderr. Raises OSError for a missing file; ValueError for a missing name, for a file that raises
    an error, and for a name that is not a rule; TimeoutError if the process is not done after
    ``timeout`` seconds; RuntimeError if the process ends without a report.
    """
    split(source)
    options = {"source": source, "examples": examples, "seed": seed, "properties": properties}
    # otherwise Hypothesis would create its database next to the user's file
    stored = os.path.join(tempfile.gettempdir(), "cactus-theory-hypothesis")
    # -P leaves the working folder off the path, and this package may be found there only
    home = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"HYPOTHESIS_STORAGE_DIRECTORY": stored} | os.environ | {"PYTHONPATH": search_path}
    command = [sys.executable, "-P", "-c", WORK, json.dumps(options | {"quiet": quiet})]
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": env, "start_new_session": True}
    try:
        done = subprocess.run(command, timeout=timeout, stdout=subprocess.PIPE, **settings)
        fault, events = f"its process ended with exit code {done.returncode}", done.stdout
    except subprocess.TimeoutExpired as late:
        fault, events = "", late.stdout or b""
    state = dict[str, Any]()  # the last event of each name: "property" is the last one begun
    for line in events.decode().splitlines():
        with suppress(ValueError):  # a process that was killed may leave half a line
            state |= json.loads(line)
    if "refused" in state:
        raise ValueError(state["refused"])
    if "report" in state:
        return Report.of(state["report"])
    at = f"{state['property']} was checked" if "property" in state else "the file was read"
    if not fault:
        raise TimeoutError(f"{source}: no answer within {timeout:g} s while {at}")
    raise RuntimeError(f"{source}: {fault} while {at}")


def work() -> None:
    """Check the rule that the JSON in ``sys.argv[1]`` names; print JSON lines; end the process."""
    options = json.loads(sys.argv[1])
    source, names = options["source"], options["properties"]
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rule's prints must not mix with the events

    def say(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    def progress(name: str) -> None:
        say(property=name)
        if not options["quiet"] and name in chosen:
            place = f"{chosen.index(name) + 1:>3}/{len(chosen)}"
            print(place, name, file=sys.stderr, flush=True)

    torch.set_num_threads(1)
    try:
        rule = read_policy(source)
        declaration(rule, source)
        chosen = [prop.name for prop in PROPERTIES.chosen("--properties", names)]
    except (ValueError, TypeError, OSError) as error:
        say(refused=" ".join(str(error).split()))
    else:
        groups = draw_examples(options["examples"], options["seed"])
        whole: dict[str, Any] = {"properties": names, "seed": options["seed"]}
        say(report=asdict(check_policy(rule, groups, progress=progress, **whole)))
    os._exit(0)


def declaration(policy: Policy, source: str) -> str:
    """Return the policy's declaration in words; raise ValueError if it cannot be read."""
    try:
        if (budget := policy.declares.budget) is not None:
            read_divergence(budget.divergence)
        return declared(policy)
    except Exception as error:
        raise ValueError(
            f"{source}: what it declares cannot be read: {type(error).__name__}: {error}"
        ) from error
