"""Define families (a policy with one free knob, under a verifier), and the range of the knob.

A knob is searched by its looseness x > 0: the larger x is, the further the policy may depart from
q. The function from x to the knob's value is fixed for knobs of this package; for other
policies it follows from the declared ``knob_range``, ``direction`` and ``strict``.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.copies import called
from cactus_theory.base.specs import merged_knobs, parse_spec
from cactus_theory.decoding.schedule import followers
from cactus_theory.divergences import Divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import Policy, knob_values, read_policy
from cactus_theory.policies.band import EOS, Band
from cactus_theory.policies.registry import class_of
from cactus_theory.policies.tilt import Tilted, tilt_of
from cactus_theory.traces.replays import check_unit
from cactus_theory.verify.contract import find_verifier

# a spec that names its free knob without a value: ``band:price``, ``mine.py:rule:alpha,k=2``
BARE = re.compile(r"(\w+|.+?\.py:\w+):([A-Za-z_]\w*)(?:,(.*))?", re.DOTALL)
PACKAGE = f"{Policy.__module__.rpartition('.')[0]}."
# knobs of this package's policies: value from looseness; least, first and largest looseness
KNOBS = {
    "delta": (float, 1e-9, 1e-3, 1e2),
    "price": (lambda looseness: 1 / looseness, 1e-4, 1.0, 1e2),
    "lenience": (lambda looseness: math.exp(-looseness), 1e-6, 0.5, 30.0),
    "acc": (lambda looseness: math.exp(-looseness), 1e-6, 0.5, 30.0),
    "single": (lambda looseness: math.exp(-looseness), 1e-6, 0.5, 30.0),
    "epsilon": (lambda looseness: math.exp(-looseness), 1e-6, 1.0, 30.0),
    "alpha": (float, 1e-6, 0.1, 1.0),
    "threshold": (float, 1e-9, 0.1, 1e2),
    "tilt": (float, 1e-4, 0.2, 1e2),
    "top_p": (lambda looseness: math.exp(-looseness), 1e-4, 0.05, 1e1),
    "k": (float, 1.0, 8.0, 1e6),
    "top_k": (lambda looseness: 1e6 / looseness, 1.0, 1e4, 1e6),
}
Scale = tuple[Callable[[float], float], float, float, float]
# least and largest looseness of a knob without a scale of its own; FAR where its range is infinite
NEAR, FAR = 1e-9, 1e6
# policies that are tuned by default, with their verifiers
USUAL = {
    defaults.POLICY: ("chain", "block"),
    "cactus": ("chain",),
    "band": ("chain", "block"),
    "lenience": ("chain",),
    "mixture": ("chain",),
}
# policies that are tuned by default at temperature 0, with their verifiers
USUAL_GREEDY = {defaults.STRICT: ("chain",), "regret": ("chain", "block")}


@dataclass(frozen=True)
class Family:
    """A policy with one free knob, under one verifier; or a fixed policy without a free knob.

    Attributes
    ----------
    name, verifier : names, such as ``band:price`` and ``chain``.
    base : the policy at some value of the knob.
    varied : name of the free knob; empty for a fixed policy, which has nothing to solve.
    knob : function from looseness x > 0 to the knob's value.
    least, first, most : looseness nearest to lossless, looseness to try first, largest looseness.
    whole : whether the knob takes whole numbers only.
    trusted : whether nats are known to rise or fall steadily with x, without a jump.
    """

    name: str
    verifier: str
    base: Policy
    varied: str = ""
    knob: Callable[[float], float] = float
    least: float = 1.0
    first: float = 1.0
    most: float = 1.0
    whole: bool = False
    trusted: bool = True

    @property
    def key(self) -> str:
        """Return name and verifier as one word, such as ``band:price@chain``."""
        return f"{self.name}@{self.verifier}"

    @property
    def tiltable(self) -> bool:
        """Return whether the policy has a knob ``tilt`` that its spec does not set."""
        return isinstance(self.base, Tilted) and not self.base.tilt and self.varied != "tilt"

    def tilted(self, tilt: float, first: float) -> "Family":
        """Return the family with a tilt; ``first`` is the looseness to try first."""
        if not tilt:
            return self
        base = read_policy(self.base, tilt=float(f"{tilt:.4g}"))
        return replace(self, base=base, first=first, trusted=False)

    @property
    def lossless(self) -> bool:
        """Return whether the policy is lossless sampling, or strict greedy decoding."""
        return self.name in (defaults.POLICY, defaults.STRICT)

    def value(self, looseness: float) -> float:
        """Return the knob's value at a looseness, rounded to six digits."""
        value = float(f"{self.knob(looseness):.6g}")
        return round(value) if self.whole else value

    def at(self, value: float) -> Policy:
        """Return the policy at a value of its knob."""
        return read_policy(self.base, **{self.varied: value})

    def policy(self, looseness: float) -> Policy:
        """Return the policy at a looseness."""
        return self.at(self.value(looseness)) if self.varied else self.base


def family_of(
    spec: str | Policy, kind: Divergence, ends: Sequence[Any] = (EOS,), verifier: str = "chain"
) -> Family:
    """Return the family of policies that a spec or a policy names.

    Knobs to which the spec gives a value are fixed. The free knob is the one that the spec names
    without a value (``band:delta``), otherwise the policy's main knob; for a band ``price``, or
    ``delta`` in a divergence without prices. If a Policy is given in place of a spec, its main knob
    is free whatever the value.

    Raises
    ------
    ValueError, TypeError
        As :func:`cactus_theory.policy`; a band's price in a divergence without prices; a policy for
        temperature 0 unless nats are of regret, and any other policy if they are.
    """
    bare = BARE.fullmatch(spec) if isinstance(spec, str) else None
    name, varied, others = bare.groups() if bare else (spec, None, None)
    word = f"{name}:{others}" if others else name  # the spec without its free knob, or the policy
    if word == defaults.POLICY and kind == REGRET:
        word = defaults.STRICT
    class_ = class_of(word)
    given = merged_knobs(word, {}) if isinstance(word, str) else {}  # knobs with a value
    nats = "nats of regret" if kind == REGRET else f"nats of {kind.spec}"
    check_unit(name if isinstance(name, str) else name.spec, class_.unit, kind, nats)
    fixed: dict[str, Any] = {}
    if issubclass(class_, Band) and not isinstance(word, Policy):
        if varied == "price" and not kind.priced:
            rule = "band:price is for divergences with a price, band:delta for the others"
            raise ValueError(f"policy: {rule}; got {kind.spec}")
        if kind.spec != "kl" and "divergence" not in given:  # the band is optimal in the unit asked
            fixed = {"divergence": kind.spec}
    varied = varied or _free(word, class_, given, kind)
    if varied is None:
        base = read_policy(word, **fixed).at_ends(ends)
        return Family(base.spec, verifier, base)
    known = knob_values.of(class_)
    check.one_of("knob", varied, tuple(known))
    scale, whole = _scale(word, class_, varied), _whole(varied, known[varied])
    value_at, _, first, _ = scale
    start = round(value_at(first)) if whole else value_at(first)
    base = read_policy(word, **fixed, **{varied: start}).at_ends(ends)
    label = parse_spec(word)[0] if isinstance(word, str) else called(base)
    parts = [f"{label}:{varied}", *(f"{knob}={value}" for knob, value in given.items())]
    # nats of a user's policy may jump or fall, and whole numbers leave gaps
    ours = class_.__module__.startswith(PACKAGE) and not whole
    trusted = ours and (isinstance(base, Band) or base.declares.continuous)
    trusted = trusted and (varied == "tilt" or not tilt_of(base))  # tilted: nats fall, then rise
    return Family(",".join(parts), verifier, base, varied, *scale, whole, trusted)


def _free(word: Any, class_: Any, given: Collection[str], kind: Divergence) -> str | None:
    """Return the free knob of a spec that names none; None if the spec sets it or has no knob.

    A policy with the knobs ``price`` and ``delta`` takes one of these two.
    """
    if isinstance(word, str) and {"price", "delta"} <= {*knob_values.of(class_)}:
        if {"price", "delta"} & set(given):
            return None
        return "price" if kind.priced or kind == REGRET else "delta"
    knob = word.knob if isinstance(word, Policy) else class_.knob
    if not knob:
        scaled = (name for name in knob_values.of(class_) if name in KNOBS and name != "tilt")
        knob = next(scaled, None)
    return None if knob in given else knob


def _whole(name: str, knob: Parameter) -> bool:
    """Return whether a knob takes whole numbers only, by its annotation or its default value."""
    try:
        knob_values.converted(name, 0.5, knob.annotation)
    except ValueError:
        return True
    return isinstance(knob.default, int) and not isinstance(knob.default, bool)


def _scale(word: Any, class_: Any, varied: str) -> Scale:
    """Return the function from looseness to the knob's value, and three values of looseness.

    The three are the least looseness, the one at which a search starts, and the largest.

    The looseness goes from the end of the knob's range at which the policy is lossless (or else
    accepts least) to the other end. A range that is not declared goes from the lossless value, or
    0, to infinity.
    """
    if class_.__module__.startswith(PACKAGE) and varied in KNOBS:
        return KNOBS[varied]
    default = knob_values.of(class_)[varied].default
    value = default if isinstance(default, int | float) else 1.0
    policy = word if isinstance(word, Policy) else read_policy(word, **{varied: value})
    claims = policy.declares
    main = varied == policy.knob  # declarations and range are about the main knob only
    # strict: the lossless value; sign: whether a larger value is looser (1) or stricter (−1)
    strict, sign = (claims.strict, claims.direction) if main else (None, 0)
    declared = main and hasattr(class_, "source")  # the class was made from a rule, a function
    known = getattr(class_.source, "knob_range", None) if declared else None
    low, high = known or (-math.inf, math.inf)
    if strict is None or not low <= strict <= high:
        if not known:
            low = 0.0
        strict = low if sign >= 0 else high
    if not sign:  # not declared: away from the lossless value, on the side of the default
        sign = -1 if strict == high or (strict != low and value < strict) else 1
    loose = high if sign > 0 else low
    # value from looseness x, with least, first and largest x
    if math.isinf(strict):
        return (lambda x: loose - sign / x), NEAR, 1.0, FAR
    if math.isinf(loose):
        return (lambda x: strict + sign * x), NEAR, max(abs(value - strict), NEAR), FAR
    return (lambda x: strict + (loose - strict) * x), NEAR, 0.1, 1.0


def families(
    kind: Divergence, specs: Sequence[str | Policy] | None = None, ends: Sequence[Any] = (EOS,)
) -> list[Family]:
    """Return the families to tune for a divergence, lossless sampling first.

    ``specs`` are as for :func:`family_of`, and may end in a verifier, as ``cactus@block`` does;
    None stands for the default policies. A spec that names no verifier gets chain and block, as far
    as they support the policy. Cactus gets the chain only: under a block, rows are read again for
    each token that may be rejected, which is slow.

    Raises
    ------
    ValueError, TypeError
        As :func:`family_of`; a policy that no verifier supports.
    """
    found, verifiers_of = [], USUAL_GREEDY if kind == REGRET else USUAL
    lossless = next(iter(verifiers_of))  # the first entry, with which all others are compared
    for spec in verifiers_of if specs is None else [lossless, *specs]:
        word, _, verifier = spec.partition("@") if isinstance(spec, str) else (spec, "", "")
        family = family_of(word, kind, ends)
        name = called(family.base)
        policy = "cactus" if "cactus" in name else name  # cactus_exact is verified likewise
        if verifier:
            names = [find_verifier(verifier).name]
        else:
            both = USUAL[defaults.POLICY]
            names = verifiers_of.get(family.name, verifiers_of.get(policy, both))
        able, refused = followers(family.base, names)
        if not able:
            rule = f"a verifier must be able to follow {family.base.spec}"
            raise ValueError(f"policy: {rule}; got {refused}")
        found += [replace(family, verifier=verifier) for verifier in able]
    return [*{family.key: family for family in found}.values()]  # each once
