"""The process in which the user's rule runs; it writes events as JSON lines to its parent.

Every event begins with the key that the parent gave: other lines are the rule's. What the rule
prints goes to stderr.
"""

import builtins
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.decoding.schedule import Schedule, find_rule
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy
from cactus_theory.testing._examples import examples
from cactus_theory.testing._policies import check_rule
from cactus_theory.testing._property import measure
from cactus_theory.testing._report import Finding, Verdict, declared
from cactus_theory.testing._schedule import assert_schedule_properties
from cactus_theory.testing.properties import PROPERTIES, Behaviour

Say = Callable[..., None]
# the descriptor of events, out of the way of rules that close the usual ones
CHANNEL = 200
# what verdicts rest on besides this package and the properties
TABLE = "the table of properties"
TOOLS = (builtins, json, math, time, np, torch, torch.Tensor, torch.nn.functional)


def main(options: dict[str, Any]) -> None:
    """Check the rule, or with ``trace`` try one row after the other until the process dies."""
    torch.set_num_threads(1)
    say = _speaker(options["key"])
    tools = _tools()
    try:
        rule = find_rule(options["source"])
        if isinstance(rule, Schedule):
            return _check_schedule(rule, options, say)
        claims = declaration(rule, options["source"])
        _check_tools(tools)
        PROPERTIES.chosen("--laws", options["laws"] or ())
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
        laws=options["laws"],
        limit=options["timeout"],
        seed=options["seed"],
        progress=lambda name: say(event="law", law=name),
        done=done,
        waiting=lambda seconds: say(event="waiting", seconds=seconds),
    )
    _check_tools(tools)
    say(event="end", advice=report.advice)


def _check_schedule(schedule: Schedule, options: dict[str, Any], say: Say) -> None:
    """Hold a schedule to :func:`assert_schedule_properties`, as one property."""
    name, finding = "schedule", None
    for law in options["laws"] or ():
        check.one_of("--laws", law, (name,))
    statement = "a choice knows only what is known before its token, and its own text alone"
    declares = f"chooses among {', '.join(rule.spec for rule in schedule.rules)}"
    say(event="loaded", rule=schedule.spec, declares=declares, statements={name: statement})
    if not options["trace"]:
        say(event="law", law=name)
        try:
            assert_schedule_properties(schedule, examples=options["examples"], seed=options["seed"])
        except AssertionError as error:
            broken = "what it chooses", "what may be relied on", str(error), -math.inf
            finding = Finding(name, statement, [], [], *broken)
        outcome = "holds" if finding is None else "fails"
        verdict = Verdict(name, statement, outcome, options["examples"], None, finding)
        say(event="verdict", verdict=asdict(verdict))
    say(event="end", advice="")


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


def _tools() -> dict[tuple[Any, str], Any]:
    """Return the functions and classes that verdicts rest on, by their place and name."""
    ours = [module for name, module in sys.modules.items() if name.startswith("cactus_theory.")]
    classes = [
        value
        for module in ours
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return {
        (place, name): value
        for place in (*TOOLS, *ours, *classes)
        for name in dir(place)
        if callable(value := _held(place, name)) and not name.startswith("_abc")
    } | {(TABLE, name): entry for name, entry in PROPERTIES.items()}


def _held(place: Any, name: str) -> Any:
    """Return what a module or a class has under a name, as it is written there."""
    if place == TABLE:
        return PROPERTIES.get(name)
    sources = place.__mro__ if isinstance(place, type) else (place,)
    return next((vars(source)[name] for source in sources if name in vars(source)), None)


def _check_tools(tools: dict[tuple[Any, str], Any]) -> None:
    """Raise ValueError if the rule has replaced one of them."""
    for (place, name), value in tools.items():
        if _held(place, name) is not value:
            where = getattr(place, "__name__", place)
            raise ValueError(
                f"rule: must leave the check's tools alone; it replaced {where}.{name}"
            )


def _speaker(key: str) -> Say:
    """Return a writer of events to stdout; everything else that is printed goes to stderr."""
    os.dup2(1, CHANNEL, inheritable=False)
    stream = os.fdopen(CHANNEL, "w", encoding="utf-8")
    os.dup2(2, 1)
    dumps = json.dumps

    def say(**event: Any) -> None:
        stream.write(f"\n{key}{dumps(event)}\n")  # a line of its own, whatever the rule wrote
        stream.flush()

    return say
