"""Check a rule in its own process: a crash or a hang there becomes a finding."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.testing._load import split
from cactus_theory.testing._report import Finding, Report, Verdict

# seconds on top of the limit of one call: starting Python, shrinking a finding
PATIENCE = 60.0
# and for drawing one row, on a busy machine
DRAWING = 0.05
SAID = 400


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
    laws: list[str] | None = None,
    timeout: float = 30.0,
    progress: Callable[[str, int, int], None] = lambda law, number, total: None,
) -> Report:
    """Return the report on the rule ``file.py:name``, which runs in its own process.

    ``timeout`` is in seconds for one property on a few rows; it grows with the rows and with
    the time that the rule's first calls took.

    Raises
    ------
    Refused, OSError, TypeError
        No such file or name, a file that raises, or a name that is no rule.
    """
    split(source)
    options = {
        "source": source,
        "examples": examples,
        "seed": seed,
        "laws": laws,
        "timeout": timeout,
        "trace": "",
    }
    state = Progress(rule=source)
    with tempfile.TemporaryFile() as printed:
        for event in run(options, timeout + PATIENCE + DRAWING * examples, printed):
            take(state, event)
            chosen = list(state.statements) if laws is None else laws
            if event["event"] == "law" and event["law"] in chosen:
                progress(event["law"], chosen.index(event["law"]) + 1, len(chosen))
        if state.ended:
            return Report(state.rule, state.declares, state.verdicts, state.advice)
        said = _tail(printed)
    if not state.declares:
        raise Refused(f"{source}: {state.broken} while the file was read{_printed(said)}")
    rows = _last_row(options | {"trace": state.law}, timeout)
    return _cut_short(state, list(state.statements) if laws is None else laws, rows, said)


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
    """Start a worker and yield its events.

    The last event is ``dead`` if it died, and ``silent`` if it sent nothing for the number of
    seconds that it had announced (``silence`` at first).
    """
    home = str(Path(__file__).resolve().parents[2])
    paths = filter(None, [home, os.environ.get("PYTHONPATH")])
    # Hypothesis must not create its database next to the user's rule
    stored = os.path.join(tempfile.gettempdir(), "cactus-theory-hypothesis")
    process = subprocess.Popen(
        [sys.executable, "-m", "cactus_theory.testing._worker", json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=printed,
        env={"HYPOTHESIS_STORAGE_DIRECTORY": stored}
        | os.environ
        | {"PYTHONPATH": os.pathsep.join(paths)},
        text=True,
        encoding="utf-8",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    ended = False
    try:
        while True:
            line = lines.get(timeout=silence)
            if line is None:
                break
            event = json.loads(line)
            ended |= event["event"] in ("end", "refused")
            if event["event"] == "waiting":
                silence = max(silence, event["seconds"] + PATIENCE)
            else:
                yield event
        code = process.wait()
        if not ended:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            yield {"event": "dead", "message": f"the process ended with {how}"}
    except queue.Empty:
        yield {"event": "silent", "message": f"no answer within {silence:g} s"}
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def _read(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_row(options: dict[str, Any], silence: float) -> tuple[list[float], list[float]]:
    """Return the (target, draft) rows on which the rule's process ends or hangs."""
    last: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryFile() as printed:
        for event in run(options, max(silence, 20.0), printed):
            if event["event"] == "row":
                last = (event["target"], event["draft"])
            elif event["event"] == "silent":
                return last
            elif event["event"] == "dead":
                died = "exit code 0" not in event["message"]
                return last if died else ([], [])
    return [], []


def _tail(printed: Any) -> str:
    printed.seek(0)
    return " ".join(printed.read().decode("utf-8", "replace").split())[-SAID:]


def _printed(said: str) -> str:
    return f"; it last printed: {said}" if said else ""


def _cut_short(
    state: Progress, chosen: list[str], rows: tuple[list[float], list[float]], said: str
) -> Report:
    """Return the report of a run that ended early."""
    name, statement = state.law, state.statements[state.law]
    found = state.broken + _printed(said)
    finding = Finding(name, statement, *rows, "the rule itself", "an answer", found, -float("inf"))
    kind = "inconclusive" if state.silent else "fails"
    verdicts = {v.law: v for v in state.verdicts}
    verdicts[name] = Verdict(name, statement, kind, 0, finding.margin, finding)
    rest = (
        verdicts.get(other, Verdict(other, state.statements[other], "not checked", 0, None))
        for other in (chosen if name in chosen else [name, *chosen])
    )
    return Report(state.rule, state.declares, list(rest))
