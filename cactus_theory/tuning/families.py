"""The policies that are tuned: by name, with the verifiers they are tried with and their knob."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._values import ValueTable
from cactus_theory.tuned import MOST_SIBLINGS
from cactus_theory.verify.contract import find_verifier, verifiers
from cactus_theory.verify.tree import RUNS

LOSSLESS = "speculative"


@dataclass(frozen=True)
class Family:
    """A policy at any value of its knob, under one verifier; or at one value only.

    Attributes
    ----------
    name, verifier : ``band:price``, ``chain``.
    template : spec with ``{}`` where the knob's value goes; without, there is nothing to tune.
    knob : the knob's value at a looseness x > 0: the larger x is, the more may be emitted.
    least, first, most : x nearest to lossless, to begin with, and loosest.
    like, times : key of the family whose verification was timed for it, None for its own, and
        how many times that its own takes.
    values : the table that the policy reads, which the template leaves out.
    siblings : likeliest tokens beside each drafted one; the verifier is a ``tree`` then, whose
        runs are judged by ``verifier``.

    Examples
    --------
    >>> band = families(ct.divergence("kl"), ["band:price"])[-1]
    >>> band.key, band.spec(0.5)
    ('band:price@block', 'band:price=2')
    """

    name: str
    verifier: str
    template: str
    knob: Callable[[float], float] = float
    least: float = 1.0
    first: float = 1.0
    most: float = 1.0
    like: str | None = None
    times: float = 1.0
    values: ValueTable | None = None
    siblings: int = 0

    @property
    def key(self) -> str:
        """Return name, verifier and siblings as one word."""
        return f"{self.name}@{self.verifier}" + f"+{self.siblings}" * (self.siblings > 0)

    @property
    def costs(self) -> str:
        """Return the key under which its verification was timed."""
        return self.like or self.key

    @property
    def lossless(self) -> bool:
        """Return whether it emits the target's law."""
        return self.name == LOSSLESS

    def spec(self, looseness: float) -> str:
        """Return the policy; its knob has six digits."""
        return self.template.format(f"{self.knob(looseness):.6g}")

    def policy(self, looseness: float) -> Policy:
        """Return the policy of that spec, with its table of values."""
        table = {} if self.values is None else {"values": self.values}
        return find_policy(self.spec(looseness), **table)


def _one_over(looseness: float) -> float:
    return 1 / looseness


def _exp_minus(looseness: float) -> float:
    return math.exp(-looseness)


# knob, least, first and most looseness; beyond them nothing changes in any digit that is shown
KNOBS = {
    "delta": (float, 1e-9, 1e-3, 1e2),
    "price": (_one_over, 1e-4, 1.0, 1e2),
    "lenience": (_exp_minus, 1e-6, 0.5, 30.0),
    "alpha": (float, 1e-6, 0.1, 1.0),
}
# each with the verifiers it is tried with
USUAL = {
    LOSSLESS: ("chain", "block"),
    "cactus:delta": ("chain",),
    "band:price": ("chain", "block"),
    "soft_band:price": ("block",),
    "lenience:lenience": ("chain",),
    "mixture:alpha": ("chain",),
}
OTHERS = ("band:delta", "cactus_exact:delta")
# whose rows are the best ones for the divergence that they are given
FOR_DIVERGENCE = ("band:price", "band:delta", "soft_band:price")


def families(
    kind: Divergence, names: Sequence[str] | None = None, siblings: Sequence[int] = ()
) -> list[Family]:
    """Return the families to tune for a divergence.

    Parameters
    ----------
    names : of families (``band:price``), or whole specs (``typical:epsilon=0.3``), which are
        taken as they are; lossless ones are always among them. None for the usual ones.
    siblings : numbers of siblings a place that every one is tried with, too.

    Raises
    ------
    ValueError, TypeError
        A name that is neither, a policy that no verifier can follow, siblings below 1, above 256 or
        twice.

    Examples
    --------
    >>> [family.key for family in families(ct.divergence("kl"), ["band:price"])]
    ['speculative@chain', 'speculative@block', 'band:price@chain', 'band:price@block']
    """
    wanted = list(USUAL) if names is None else [LOSSLESS, *names]
    found = [own for name in dict.fromkeys(wanted) for own in _named(name, kind)]
    if names is None and not kind.priced:  # the band has no price then, but a budget
        found += _named("band:delta", kind)
    within = all(1 <= count <= MOST_SIBLINGS for count in siblings)
    if not within or len(set(siblings)) < len(siblings):
        got = " ".join(map(str, siblings))
        raise ValueError(f"siblings: must be 1 to {MOST_SIBLINGS}, each number once; got {got}")
    able = [own for own in found if own.verifier in RUNS]
    return found + [replace(own, siblings=count) for count in siblings for own in able]


def _named(name: str, kind: Divergence) -> list[Family]:
    if name in (*USUAL, *OTHERS) and name != LOSSLESS:
        return _tuned(name, kind)
    if "=" not in name and ":" in name:
        known = ", ".join((*USUAL, *OTHERS))
        raise ValueError(
            f"policies: must be a policy with its knobs, or one of {known}; got {name!r}"
        )
    spec = find_policy(name).spec
    return [Family(spec, verifier, spec) for verifier in USUAL.get(name, _followers(spec))]


def _tuned(name: str, kind: Divergence) -> list[Family]:
    policy, knob = name.split(":")
    smooth = isinstance(kind, FDivergence) and kind.smooth
    if knob == "price" and not (kind.priced and (policy == "band" or smooth)):
        return []
    template = f"{name}={{}}"
    if name in FOR_DIVERGENCE and kind.spec != "kl":
        template += f",divergence={kind.spec}"
    tried = USUAL.get(name, ("chain",))
    return [Family(name, verifier, template, *KNOBS[knob]) for verifier in tried]


def _followers(spec: str) -> list[str]:
    """Return the verifiers that can follow a policy."""
    found, policy, refused = [], find_policy(spec), ""
    for name in verifiers(metered=True):
        if find_verifier(name).drafts != ("chain",):  # on chains it is one of the others
            continue
        try:
            find_verifier(name).check(policy)
            found.append(name)
        except ValueError as error:
            refused = str(error)
    if not found:
        raise ValueError(f"policies: a verifier must be able to follow {spec}; got {refused}")
    return found


def checked_level(level: float) -> float:
    """Return a divergence per token.

    Raises
    ------
    ValueError
        A level that is not a finite number above 0.
    """
    value = check.number("kl-per-token", level, 0, open_low=True)
    if not math.isfinite(value):
        raise ValueError(f"kl-per-token: must be finite; got {level}")
    return value
