"""The process in which the user's rule runs; it writes events as JSON lines to its parent.

``python -c "from cactus_theory.testing._worker import main; main()" OPTIONS`` with options as
JSON. What the rule prints goes to stderr.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.decoding.schedule import Schedule, find_rule
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy
from cactus_theory.policies._registry import POLICIES
from cactus_theory.testing._divergence import assert_divergence_properties
from cactus_theory.testing._examples import examples
from cactus_theory.testing._policies import check_rule
from cactus_theory.testing._property import measure
from cactus_theory.testing._report import Finding, Verdict, declared
from cactus_theory.testing._schedule import assert_schedule_properties
from cactus_theory.testing.properties import PROPERTIES, Behaviour

Say = Callable[..., None]
# the part of the machine's memory that a rule may use
MEMORY_SHARE = 0.5


def main() -> None:
    """Check the rule; threads, and what is registered for the end of Python, do not run on."""
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
    """Keep the rule from filling the memory, where the system can."""
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
    """Check the rule, or with ``trace`` try one row after the other until the process dies."""
    torch.set_num_threads(1)
    try:
        rule = _read(options["source"])
        if isinstance(rule, Schedule | Divergence):
            return _check_at_once(rule, options, say)
        claims = declaration(rule, options["source"])
        PROPERTIES.chosen("--properties", options["properties"] or ())
    except (ValueError, TypeError, OSError) as error:
        say(event="refused", message=" ".join(str(error).split()))
        return
    statements = {prop.name: prop.statement for prop in PROPERTIES.values()}
    say(event="loaded", rule=rule.spec, declares=claims, statements=statements)
    groups = examples(options["examples"], options["seed"])
    if options["trace"]:
        prop = PROPERTIES[options["trace"]]
        for q, p in groups:
            for i in range(len(q)):
                say(event="row", target=q[i].tolist(), draft=p[i].tolist())
                with suppress(Exception):  # only the end of the process is of interest here
                    measure(prop, Behaviour(rule, q[i : i + 1], p[i : i + 1]))
        say(event="end", advice="")
        return

    def done(verdict: Verdict) -> None:
        say(event="verdict", verdict=asdict(verdict))

    report = check_rule(
        rule,
        groups,
        properties=options["properties"],
        limit=options["timeout"],
        seed=options["seed"],
        progress=lambda name: say(event="law", law=name),
        done=done,
        waiting=lambda seconds: say(event="waiting", seconds=seconds),
    )
    say(event="end", advice=report.advice)


def _read(source: str) -> Policy | Schedule | Divergence:
    """Return what ``FILE.py:NAME`` stands for."""
    entry, _ = POLICIES.read(source, Schedule, Divergence)
    kind = entry if isinstance(entry, type) else type(entry)
    return find_divergence(source) if issubclass(kind, Divergence) else find_rule(source)


def _check_at_once(what: Schedule | Divergence, options: dict[str, Any], say: Say) -> None:
    """Hold a schedule or a divergence to the assertion of its kind, as one property."""
    if isinstance(what, Schedule):
        name, hold = "schedule", assert_schedule_properties
        statement = "a choice knows only what is known before its token, and its own text alone"
        declares = f"chooses among {', '.join(rule.spec for rule in what.rules)}"
    else:
        name, hold = "divergence", assert_divergence_properties
        statement = "generator, geometry, budgets and values are those of one divergence"
        declares = _kind_of(what)
    for law in options["properties"] or ():
        check.one_of("--properties", law, (name,))
    say(event="loaded", rule=what.spec, declares=declares, statements={name: statement})
    if not options["trace"]:
        say(event="law", law=name)
        finding = None
        try:
            hold(what, examples=options["examples"], seed=options["seed"])  # type: ignore[arg-type]
        except AssertionError as error:
            broken = f"the {name}", "what may be relied on", str(error), -math.inf
            finding = Finding(name, statement, [], [], *broken)
        outcome = "holds" if finding is None else "fails"
        verdict = Verdict(name, statement, outcome, options["examples"], None, finding)
        say(event="verdict", verdict=asdict(verdict))
    say(event="end", advice="")


def _kind_of(divergence: Divergence) -> str:
    """Return what a divergence is, in words."""
    if isinstance(divergence, FDivergence):
        return "an f-divergence"
    generator = divergence.generator
    return "a bound on h/q" if generator is None else f"a function of {generator.spec}"


def declaration(rule: Policy, source: str) -> str:
    """Return what the rule declares; raise ValueError for a declaration that cannot be read."""
    try:
        claims = rule.declares
        if claims.budget is not None:
            find_divergence(claims.budget.divergence)
        return declared(rule)
    except Exception as error:
        raise ValueError(
            f"{source}: what it declares cannot be read: {type(error).__name__}: {error}"
        ) from error
