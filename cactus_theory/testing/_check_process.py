"""Check a rule in its own process: a crash or a hang there becomes a finding."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cactus_theory.base.specs import split
from cactus_theory.testing._report import Finding, Report

SAID = 400  # characters of the rule's output that a finding quotes
WORK = "from cactus_theory.testing._worker import main; main()"


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
    """Run the worker, and end what it started; return how it ended, and whether too late."""
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
    """Return the worker's events, the last of each kind, and its output's end as a clause."""
    state, events, printed = dict[str, Any](), folder / "events", folder / "printed"
    for line in events.read_text(encoding="utf-8").splitlines() if events.exists() else ():
        with suppress(ValueError):  # a line that was cut off
            state |= json.loads(line)
    text = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    output = " ".join(text[-8 * SAID :].split())[-SAID:]
    return state, f"; it last printed: {output}" if output else ""
