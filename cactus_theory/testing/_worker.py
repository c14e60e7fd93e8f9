"""The process in which the user's rule runs; it writes events as JSON lines to its parent.

``python -c "from cactus_theory.testing._worker import main; main()" OPTIONS`` with options as
JSON. What the rule prints goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
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
# most repeats of a call in one property (at values of a knob), and the factor by which the
# machine may become slower than it was during the first calls
OFTEN, BUSIER = 40, 5.0


def main() -> None:
    """Check the rule, then end the process at once, its threads and exit handlers included."""
    code = 1
    try:
        _limit()
        _work(json.loads(sys.argv[1]), _speaker())
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _limit() -> None:
    """Limit the rule's memory, where the system can."""
    with suppress(ImportError):
        import resource

        most = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _speaker() -> Say:
    """Return a writer of events to stdout; everything else that is printed goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        print(json.dumps(event), file=stream, flush=True)

    return say


def _work(options: dict[str, Any], say: Say) -> None:
    """Check the rule and report every result so far as an event."""
    torch.set_num_threads(1)
    source, names = options["source"], options["properties"]
    try:
        rule = find_policy(source)
        declaration(rule, source)
        PROPERTIES.chosen("--properties", names or ())
    except (ValueError, TypeError, OSError) as error:
        return say(refused=" ".join(str(error).split()), done=True)

    def progress(law: str, report: Report) -> None:
        say(law=law, report=asdict(report))

    each = 0.0  # seconds of each call once, by drafted token

    def ask(prop: Property, seen: Behaviour) -> None:
        more = OFTEN * BUSIER * each * int(seen.drafted.sum())
        say(seconds=options["timeout"] + more, rows=([], []))

    def ask_row(prop: Property, seen: Behaviour) -> None:
        say(seconds=options["timeout"], rows=(seen.q[0].tolist(), seen.p[0].tolist()))

    def rows() -> Iterator[Pair]:
        """Check every row by itself first, so that a crash or hang names its row; yield all."""
        nonlocal each
        groups = examples(options["examples"], options["seed"])
        singly = [(q[i : i + 1], p[i : i + 1]) for q, p in groups for i in range(len(q))]
        for some in (singly[:1], singly):  # the first call may import packages
            start, answers = time.monotonic(), {"properties": ["answers"], "elsewhere": False}
            check_policy(rule, some, shrink_seconds=0, asking=ask_row, **answers)
            each = (time.monotonic() - start) / sum(int((p > 0).sum()) for _, p in some)
        yield from groups

    chosen = {"properties": names, "seed": options["seed"]}
    say(
        report=asdict(check_policy(rule, rows(), progress=progress, asking=ask, **chosen)),
        done=True,
    )


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
