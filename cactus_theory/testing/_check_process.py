"""Check a rule in its own process: a crash or a hang there becomes a finding.

The process writes events as JSON lines, and what the rule prints, to two files of a folder.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.specs import split
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing._check_properties import Pair
from cactus_theory.testing._examples import examples as draw_examples
from cactus_theory.testing._policies import check_policy
from cactus_theory.testing._property import Property
from cactus_theory.testing._report import Finding, Report, declared
from cactus_theory.testing.properties import PROPERTIES, Behaviour

SAID = 400  # characters of the rule's output that a finding quotes
WORK = "from cactus_theory.testing._check_process import work; work()"
# share of the machine's memory that a rule may use
MEMORY_SHARE = 0.5


class Refused(ValueError):
    """The request is invalid, whatever the rule does."""


def check_file(
    source: str,
    *,
    examples: int,
    timeout: float,
    seed: int = 0,
    properties: list[str] | None = None,
    quiet: bool = False,
) -> Report:
    """Return the report on the rule ``file.py:name``, which runs in its own process.

    A process that ends, or is not done after ``timeout`` seconds, is the finding of the property at
    hand, and no other is checked; unless ``quiet`` each is named on stderr. Refused, OSError,
    TypeError where there is no such file or name, for a file that raises, and for a name that is
    no rule.
    """
    split(source)
    options = {"source": source, "examples": examples, "seed": seed, "properties": properties}
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        fault, late = _run(options | {"quiet": quiet, "folder": folder}, timeout)
        state, output = _said(Path(folder))
    if "refused" in state:
        raise Refused(state["refused"])
    if "report" not in state:
        raise Refused(f"{source}: {fault} while the file was read{output}")
    report = Report.of(state["report"])
    if "done" in state:
        return report
    (at,) = (own for own in report.properties if own.property == state["property"])
    q, p = state.get("rows", ([], []))
    said = ("the rule itself", "an answer", fault + output)
    finding = Finding(at.property, at.statement, q, p, *said, -math.inf)
    kind = "inconclusive" if late else "fails"
    verdict = replace(at, verdict=kind, worst=finding.margin, finding=finding)
    verdicts = [verdict if own is at else own for own in report.properties]
    return replace(report, properties=verdicts)


def _run(options: dict[str, Any], timeout: float) -> tuple[str, bool]:
    """Run the process, and end what it started; return how it ended, and whether too late."""
    # Hypothesis must not create its database next to the user's rule
    stored = os.path.join(tempfile.gettempdir(), "cactus-theory-hypothesis")
    home = str(Path(__file__).resolve().parents[2])
    found = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-c", WORK, json.dumps(options)]
    own = {"HYPOTHESIS_STORAGE_DIRECTORY": stored} | os.environ | {"PYTHONPATH": found}
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": own, "start_new_session": True}
    try:
        code = subprocess.run(command, timeout=timeout, **settings).returncode
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s", True
    finally:
        state, _ = _said(Path(options["folder"]))
        if "pid" in state and hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(state["pid"], signal.SIGKILL)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process ended with {how}", False


def _said(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the events, the last of each kind, and the output's end as a clause."""
    state, events, printed = dict[str, Any](), folder / "events", folder / "printed"
    for line in events.read_text(encoding="utf-8").splitlines() if events.exists() else ():
        with suppress(ValueError):  # a line that was cut off
            state |= json.loads(line)
    text = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    output = " ".join(text[-8 * SAID :].split())[-SAID:]
    return state, f"; it last printed: {output}" if output else ""


def work() -> None:
    """Check the rule, then end this process at once, its threads and exit handlers included."""
    code, options = 1, json.loads(sys.argv[1])
    try:
        with suppress(ImportError):
            import resource

            most = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        _check(options, _speaker(Path(options["folder"]), options["quiet"]))
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _speaker(folder: Path, quiet: bool) -> Callable[..., None]:
    """Return a writer of events, and of progress to stderr; what else is printed goes to a file."""
    shown = os.fdopen(os.dup(2), "w", encoding="utf-8")
    events = (folder / "events").open("w", encoding="utf-8")
    with (folder / "printed").open("wb") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)

    def say(place: str = "", **event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)
        if place and not quiet:
            print(f"{place} {event['property']}", file=shown, flush=True)

    say(pid=os.getpid())
    return say


def _check(options: dict[str, Any], say: Callable[..., None]) -> None:
    """Check the rule and report every result so far as an event."""
    source, names = options["source"], options["properties"]
    try:
        rule = read_policy(source)
        declaration(rule, source)
        chosen = [own.name for own in PROPERTIES.chosen("--properties", names)]
    except (ValueError, TypeError, OSError) as error:
        return say(refused=" ".join(str(error).split()))

    def progress(name: str, report: Report) -> None:
        place = f"{chosen.index(name) + 1:>3}/{len(chosen)}" if name in chosen else ""
        say(place, property=name, report=asdict(report))

    def ask(prop: Property, seen: Behaviour) -> None:
        single = len(seen.q) == 1
        say(rows=(seen.q[0].tolist(), seen.p[0].tolist()) if single else ([], []))

    def rows() -> Iterator[Pair]:
        """Check every row by itself first, so that a crash or hang names its row; yield all."""
        groups = draw_examples(options["examples"], options["seed"])
        singly = [(q[i : i + 1], p[i : i + 1]) for q, p in groups for i in range(len(q))]
        first: dict[str, Any] = {"properties": ["answers"], "elsewhere": False}
        check_policy(rule, singly, shrink_seconds=0, asking=ask, **first)
        yield from groups

    whole: dict[str, Any] = {"properties": names, "seed": options["seed"]}
    report = check_policy(rule, rows(), progress=progress, asking=ask, **whole)
    say(report=asdict(report), done=True)


def declaration(policy: Policy, source: str) -> str:
    """Return the policy's declaration; raise ValueError if it cannot be read."""
    try:
        if (budget := policy.declares.budget) is not None:
            read_divergence(budget.divergence)
        return declared(policy)
    except Exception as error:
        raise ValueError(
            f"{source}: what it declares cannot be read: {type(error).__name__}: {error}"
        ) from error
