"""Check a rule in its own process: a crash or a hang there becomes a finding."""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cactus_theory.base.specs import split
from cactus_theory.testing._report import Finding, Report

# seconds allowed for starting Python, and for drawing one row, on a busy machine
STARTING, DRAWING = 60.0, 0.05
# seconds added to every time limit: for packages that the rule imports, and for shrinking
PATIENCE = 10.0
SAID = 400  # characters of the rule's output that a finding quotes
WORK = "from cactus_theory.testing._worker import main; main()"


class Refused(ValueError):
    """The request is invalid, whatever the rule does."""


def check_file(
    source: str,
    *,
    examples: int,
    seed: int = 0,
    properties: list[str] | None = None,
    timeout: float = 30.0,
    progress: Callable[[str, int, int], None] = lambda law, number, total: None,
) -> Report:
    """Return the report on the rule ``file.py:name``, which runs in its own process.

    ``timeout`` is in seconds for one property on a few rows; it grows with the rows and with
    the time that the rule's first calls took. A process that ends or says nothing for so long is
    the finding of the property at hand, and no other is checked. Refused, OSError, TypeError where
    there is no such file or name, for a file that raises, and for a name that is no rule.
    """
    split(source)
    options = {"source": source, "examples": examples, "seed": seed, "properties": properties,
               "timeout": timeout}  # fmt: skip
    silence, state = timeout + STARTING + DRAWING * examples, {}
    with tempfile.TemporaryFile() as printed:
        for event in run(options, silence, printed):
            state |= event
            chosen = properties or [law["law"] for law in state.get("report", {"laws": []})["laws"]]
            if event.get("law") in chosen:
                progress(event["law"], chosen.index(event["law"]) + 1, len(chosen))
        output = _tail(printed)
    if "refused" in state:
        raise Refused(state["refused"])
    if "report" not in state:
        raise Refused(f"{source}: {state['fault']} while the file was read{output}")
    report = Report.of(state["report"])
    if "fault" not in state:
        return report
    (law,) = (law for law in report.laws if law.law == state["law"])
    target, draft = state.get("rows", ([], []))
    fault, margin = state["fault"] + output, -math.inf
    about = "the rule itself", "an answer", fault, margin
    finding = Finding(law.law, law.statement, target, draft, *about)
    kind = "inconclusive" if state["late"] else "fails"
    verdict = replace(law, verdict=kind, worst=margin, finding=finding)
    return replace(report, laws=[verdict if each is law else each for each in report.laws])


def run(options: dict[str, Any], silence: float, printed: Any) -> Iterator[dict[str, Any]]:
    """Start a worker and yield its events; at the end its process group is killed.

    The last event has the ``fault`` of a worker that died, or was silent for more than the
    seconds that it had announced (``silence`` at first) and is ``late``.
    """
    # Hypothesis must not create its database next to the user's rule
    stored = os.path.join(tempfile.gettempdir(), "cactus-theory-hypothesis")
    home = str(Path(__file__).resolve().parents[2])
    found = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WORK, json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=printed,
        env={"HYPOTHESIS_STORAGE_DIRECTORY": stored} | os.environ | {"PYTHONPATH": found},
        start_new_session=True,
    )
    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, events), daemon=True).start()
    try:
        while (event := events.get(timeout=silence)) is not None:
            if "seconds" in event:
                silence = event["seconds"] + PATIENCE
            yield event
            if event.get("done"):
                return
        code = process.wait(silence)  # a rule may close its output, and go on
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield {"fault": f"the process ended with {how}", "late": False}
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"fault": f"no answer within {silence:.3g} s", "late": True}
    finally:
        process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(stream: Any, events: "queue.Queue[dict[str, Any] | None]") -> None:
    """Put the worker's events into the queue, then None."""
    with stream:
        for line in stream:
            with suppress(ValueError):
                events.put(json.loads(line))
    events.put(None)


def _tail(printed: Any) -> str:
    """Return the end of the process's output as a clause, empty if there was no output."""
    end = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, end - 8 * SAID))
    output = " ".join(printed.read().decode("utf-8", "replace").split())[-SAID:]
    return f"; it last printed: {output}" if output else ""
