"""Check a rule in its own process: a crash or a hang there becomes a finding."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.base.specs import split
from cactus_theory.policies import Policy, policy
from cactus_theory.testing._report import Finding, Report, Verdict

# seconds on top of the limit of one call: starting Python, shrinking a finding
PATIENCE = 60.0
# and for drawing one row, on a busy machine
DRAWING = 0.05
SAID = 400
WORK = "from cactus_theory.testing._worker import main; main()"


def load_rule(source: str) -> Policy:
    """Return the policy called ``name`` in ``file.py:name``, or ``file.py:name:knob=value``.

    The same as ``ct.policy(source)``, for files only.

    Raises
    ------
    ValueError, OSError
        Not of that form, no such file, no such name in it; the file raised.
    TypeError
        The name does not stand for a policy.

    Examples
    --------
    >>> from pathlib import Path
    >>> text = "import cactus_theory as ct; mine = ct.rule(lambda q, p, n: 1.0)"
    >>> size = Path("mine.py").write_text(text)
    >>> load_rule("mine.py:mine").spec
    'mine.py:mine'
    """
    split(source)
    return policy(source)


class Refused(ValueError):
    """The request is invalid, whatever the rule does."""


@dataclass
class Progress:
    """What is known about a run so far; ``statements`` are those of all properties."""

    rule: str
    declares: str = ""
    law: str = "answers"
    statements: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    ended: bool = False
    advice: str = ""
    broken: str = ""
    silent: bool = False


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
    the time that the rule's first calls took. Refused, OSError, TypeError where there is no such
    file or name, for a file that raises, and for a name that is no rule.
    """
    split(source)
    options = {"source": source, "examples": examples, "seed": seed, "properties": properties}
    options |= {"timeout": timeout, "trace": ""}
    state = Progress(rule=source)
    with tempfile.TemporaryFile() as printed:
        for event in run(options, timeout + PATIENCE + DRAWING * examples, printed):
            take(state, event)
            chosen = list(state.statements) if properties is None else properties
            if event["event"] == "law" and event["law"] in chosen:
                progress(event["law"], chosen.index(event["law"]) + 1, len(chosen))
        if state.ended:
            return Report(state.rule, state.declares, state.verdicts, state.advice)
        output = _tail(printed)
    if not state.declares:
        raise Refused(f"{source}: {state.broken} while the file was read{_printed(output)}")
    rows = _last_row(options | {"trace": state.law}, timeout)
    return _cut_short(
        state, list(state.statements) if properties is None else properties, rows, output
    )


def take(state: Progress, event: dict[str, Any]) -> None:
    """Record an event of the worker."""
    kind = event["event"]
    if kind == "refused":
        raise Refused(event["message"])
    if kind == "loaded":
        state.rule, state.declares = event["rule"], event["declares"]
        state.statements = event["statements"]
    elif kind == "law":
        state.law = event["law"]
    elif kind == "verdict":
        plain = event["verdict"]
        finding = None if plain["finding"] is None else Finding(**plain["finding"])
        state.verdicts.append(Verdict(**{**plain, "finding": finding}))
    elif kind in ("dead", "silent"):
        state.broken, state.silent = event["message"], kind == "silent"
    elif kind == "end":
        state.ended, state.advice = True, event["advice"]


def run(options: dict[str, Any], silence: float, printed: Any) -> Iterator[dict[str, Any]]:
    """Start a worker and yield its events; at the end its process group is ended.

    The last event is ``dead`` if it died, and ``silent`` if it sent nothing for the number of
    seconds that it had announced (``silence`` at first).
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
    threading.Thread(target=_read, args=(process, events), daemon=True).start()
    try:
        while (event := events.get(timeout=silence)) is not None:
            if event["event"] == "waiting":
                silence = max(silence, event["seconds"] + PATIENCE)
                continue
            yield event
            if event["event"] in ("end", "refused"):
                return
        code = process.wait(silence)  # a rule may close what it says, and go on
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield {"event": "dead", "message": f"the process ended with {how}"}
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"event": "silent", "message": f"no answer within {silence:g} s"}
    finally:
        process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(process: Any, events: "queue.Queue[dict[str, Any] | None]") -> None:
    """Collect the events, and None at their end."""
    with process.stdout as stream:
        for line in stream:
            with suppress(ValueError):
                events.put(json.loads(line))
    events.put(None)


def _last_row(options: dict[str, Any], silence: float) -> tuple[list[float], list[float]]:
    """Return the (target, draft) rows on which the rule's process ends or hangs."""
    last: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryFile() as printed:
        for event in run(options, max(silence, 20.0), printed):
            if event["event"] == "row":
                last = (event["target"], event["draft"])
            elif event["event"] in ("silent", "dead"):
                return last
    return [], []


def _tail(printed: Any) -> str:
    end = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, end - 8 * SAID))
    return " ".join(printed.read().decode("utf-8", "replace").split())[-SAID:]


def _printed(output: str) -> str:
    return f"; it last printed: {output}" if output else ""


def _cut_short(
    state: Progress, chosen: list[str], rows: tuple[list[float], list[float]], output: str
) -> Report:
    """Return the report of a run that ended early."""
    name, statement = state.law, state.statements[state.law]
    fault = state.broken + _printed(output)
    finding = Finding(name, statement, *rows, "the rule itself", "an answer", fault, -float("inf"))
    kind = "inconclusive" if state.silent else "fails"
    verdicts = {v.law: v for v in state.verdicts}
    verdicts[name] = Verdict(name, statement, kind, 0, finding.margin, finding)
    rest = (
        verdicts.get(other, Verdict(other, state.statements[other], "not checked", 0, None))
        for other in (chosen if name in chosen else [name, *chosen])
    )
    return Report(state.rule, state.declares, list(rest))
