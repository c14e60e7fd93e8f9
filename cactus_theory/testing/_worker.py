"""The process in which the user's rule runs; it writes events as JSON lines.

``python -c "from cactus_theory.testing._worker import main; main()" OPTIONS`` with options as
JSON. Events, and what the rule prints, go to two files of the ``folder`` that these name.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.testing._check_properties import Pair
from cactus_theory.testing._examples import examples
from cactus_theory.testing._policies import check_policy
from cactus_theory.testing._property import Property
from cactus_theory.testing._report import Report, declared
from cactus_theory.testing.properties import PROPERTIES, Behaviour

Say = Callable[..., None]
# share of the machine's memory that a rule may use
MEMORY_SHARE = 0.5


def main() -> None:
    """Check the rule, then end the process at once, its threads and exit handlers included."""
    code, options = 1, json.loads(sys.argv[1])
    try:
        _limit()
        _work(options, _speaker(Path(options["folder"]), options["quiet"]))
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _limit() -> None:
    with suppress(ImportError):
        import resource

        most = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _speaker(folder: Path, quiet: bool) -> Say:
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


def _work(options: dict[str, Any], say: Say) -> None:
    """Check the rule and report every result so far as an event."""
    torch.set_num_threads(1)
    source, names = options["source"], options["properties"]
    try:
        rule = find_policy(source)
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
        groups = examples(options["examples"], options["seed"])
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
        claims = policy.declares
        if claims.budget is not None:
            find_divergence(claims.budget.divergence)
        return declared(policy)
    except Exception as error:
        raise ValueError(
            f"{source}: what it declares cannot be read: {type(error).__name__}: {error}"
        ) from error
