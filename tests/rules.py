"""Every registered rule at several knobs; a new rule is picked up by its registration."""

import itertools
import math
from typing import get_args

import cactus_theory as ct
from cactus_theory.divergences.definition import examples as divergences
from cactus_theory.policies.claims import Support
from tests.amounts import THOROUGH
from tests.formulas import TEN

LADDERS = {
    "delta": (0.0, 0.01, 0.25, 1.0, math.inf),
    "price": (0.0, 0.5, 2.0, math.inf),
}
OTHER_KNOBS = (0.0, 0.1, 0.3, 0.7, 1.0, 2.0, 5.0)
VARIANTS = (
    *(f"cactus_exact:delta=0.3,divergence={spec}" for spec in TEN),
    *(f"band:delta=0.1,divergence={spec}" for spec in TEN if "=" not in spec),
    "band:price=0.8,divergence=reverse_kl",
    "band:price=0.8,per_row=True",
    "band:price=0.8,head=0.3",
    "band:price=1,per_row=True,head=0.4",
    "band:delta=0.1,head=0.3",
    "fuzzy:threshold=0.2,divergence=kl",
    "fuzzy:threshold=0.2,divergence=total_variation",
    "mixture:alpha=0.3,support=free",
    "fuzzy:threshold=0.5,support=free",
    "truncated:top_p=0.8,top_k=3",
    "speculative:tilt=0.25",
    "speculative:tilt=-0.5",
    "band:price=0.8,tilt=0.3",
    "band:price=0.8,tilt=0.3,head=0.4",
    "band:price=1,tilt=0.3,hold=0",
    "lenience:lenience=0.5,tilt=0.2",
    "relaxed:k=3,delta=0.2,recover=accepted",
    "typical:recover=target",
    "typical:epsilon=0.3,alpha=0.9",
)


def ladder(name: str, knob: str, **others) -> list[ct.Policy]:
    """Return the rule at every value of the knob that it admits, in rising order."""
    found = []
    for value in LADDERS.get(knob, OTHER_KNOBS):
        try:
            found.append(ct.policy(name, **{knob: value}, **others))
        except (TypeError, ValueError):  # outside its range, or a knob of words
            continue
    return found


def every_rule() -> dict[str, ct.Policy]:
    found = [ct.policy(spec) for spec in VARIANTS]
    for name, entry in ct.list_policies().items():
        if not entry["knobs"]:
            found.append(ct.policy(name))
        for knob in entry["knobs"]:
            found += ladder(name, knob)
    return {rule.spec: rule for rule in found}


RULES = every_rule()


# what a spec can ask for besides an amount, by the knob that names it
CHOICES = {
    "divergence": divergences(), "head": (0.0, 0.3, 1.0), "support": get_args(Support),
    "hold": ("", "0"), "floor": ("", "0") if THOROUGH else ("",),  # what is held is floored, too
}  # fmt: skip


def combinations() -> dict[str, list[ct.Policy]]:
    """Return by policy x divergence x head x support the rule at each amount, generated."""
    found = {}
    for name, entry in ct.list_policies().items():
        named = [knob for knob in entry["knobs"] if knob in CHOICES]
        amounts = [knob for knob in entry["knobs"] if knob not in CHOICES]
        for values in itertools.product(*map(CHOICES.__getitem__, named)):
            choice = dict(zip(named, values, strict=True))
            rules = [rule for knob in amounts for rule in ladder(name, knob, **choice)]
            found["-".join([name, *map(str, values)])] = rules or [ct.policy(name)]
    return found


def of_each(count: int) -> tuple[str, ...]:
    """Return ``count`` specs of every rule, evenly spread over its own."""
    by_name: dict[str, list[str]] = {}
    for spec, rule in RULES.items():
        by_name.setdefault(rule.name, []).append(spec)
    found: list[str] = []
    for specs in by_name.values():
        most = min(count, len(specs))
        found += [specs[(2 * i + 1) * len(specs) // (2 * most)] for i in range(most)]
    return tuple(found)


# what tests of every rule go through
SPECS = tuple(RULES) if THOROUGH else of_each(2)
