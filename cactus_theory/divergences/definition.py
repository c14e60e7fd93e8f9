r"""Divergences: their base classes, with the members that the optimum needs, and their registry.

Every f-divergence is :math:`D_f(h\|q) = \sum_{q>0} q f(h/q) + f'(\infty)\,h(q=0)` with convex
f, f(1) = 0. Any other divergence either is an increasing function of an f-divergence (Rényi),
so that every budget equals a budget of the f-divergence, or bounds h/q pointwise (max-divergence).
The optimum and the solvers use only the members declared here, and have no code for particular
divergences.
Source of the definitions: Csiszár 1967; Liese & Vajda 2006; van Erven & Harremoës 2014.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.specs import Registry, merged_knobs, names_a_file, parse_spec

SAFE_RATIO = 1e-300  # h/q is finite from this q on, for any h ≤ 1
# relative step of the finite difference that stands in for f″
CURVATURE_STEP = 1e-5


@dataclass(frozen=True)
class Divergence:
    """A divergence D(h‖q), in nats or another unit, 0 iff h = q; its dataclass fields are knobs.

    Attributes
    ----------
    name : the name in specs; ``spec`` adds the knobs.
    example : the knob values with which audits and tables use this divergence.
    generator : the f-divergence that a budget translates to; None where the budget bounds
        h/q pointwise, by ``ceiling``.
    concave_frontier : whether the best acceptance is concave in the budget.
    priced : whether the best acceptance is strictly concave in the budget, so that every price
        belongs to one budget.
    linear : whether D ≤ δ is a set of linear constraints on h.
    additive : whether the sum of D over positions is convex in the positions' rows.
    """

    name = "divergence"
    example: ClassVar[Mapping[str, float]] = {}
    generator: ClassVar["FDivergence | None"] = None
    concave_frontier = True
    linear = False
    additive = False

    def __post_init__(self) -> None:
        for knob in fields(self):  # a spec gives them as text
            value = check.number(knob.name, getattr(self, knob.name), -math.inf)
            object.__setattr__(self, knob.name, value)

    @property
    def spec(self) -> str:
        """Return the string that names this divergence everywhere, with all digits of its knobs."""
        values = [(knob.name, str(getattr(self, knob.name))) for knob in fields(self)]
        knobs = ",".join(f"{name}={value.removesuffix('.0')}" for name, value in values)
        return f"{self.name}:{knobs}" if knobs else self.name

    @property
    def priced(self) -> bool:
        """Return whether each price belongs to one budget, and each budget to one price."""
        generator = self.generator
        return self.concave_frontier and generator is not None and generator.smooth

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...)."""
        raise NotImplementedError

    def to_generator(self, delta: Tensor) -> Tensor:
        """Return the generator's budget that is equivalent to a budget of ``delta``."""
        return delta

    def from_generator(self, value: Tensor) -> Tensor:
        """Return the divergence of rows whose divergence by ``generator`` is ``value``."""
        return value

    def price_from_generator(self, price: Tensor, value: Tensor) -> Tensor:
        """Return the price of this divergence from the generator's ``price``, if D = ``value``."""
        return price

    def ceiling(self, delta: Tensor) -> Tensor:
        """Return the largest h/q that a budget of ``delta`` allows, where ``generator`` is None."""
        raise NotImplementedError

    def from_ceiling(self, ratio: Tensor) -> Tensor:
        """Return the budget whose ceiling on h/q is ``ratio``."""
        raise NotImplementedError

    def ceiling_slope(self, ratio: Tensor) -> Tensor:
        """Return the ceiling's derivative in δ, at the budget δ whose ceiling is ``ratio``."""
        raise NotImplementedError


@dataclass(frozen=True)
class FDivergence(Divergence):
    """A divergence given by a convex function f with f(1) = 0; it is its own ``generator``.

    Attributes
    ----------
    at_zero : f(0), possibly infinite.
    slope_at_infinity : f′(∞), possibly infinite.
    slope_at_one : f′(1); subtracting slope_at_one·(t−1) from f leaves the divergence unchanged. At
        a kink, the mean of the two one-sided slopes.
    kink : the jump of f′ at 1.
    smooth : whether f is differentiable and strictly convex.
    """

    at_zero = 0.0
    slope_at_infinity = math.inf
    slope_at_one = 0.0
    kink = 0.0
    smooth = True
    additive = True

    @property
    def generator(self) -> "FDivergence":  # type: ignore[override]
        return self

    def f(self, t: Tensor) -> Tensor:
        """Return the generator at the ratio t = h/q ≥ 0."""
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        """Return f′(t)."""
        raise NotImplementedError

    def slope_inverse(self, y: Tensor) -> Tensor:
        """Return the ratio t with f′(t) = y, for y in the range of f′."""
        raise ValueError(f"divergence: {self.name} has no inverse slope; got {self.spec}")

    def curvature(self, t: Tensor) -> Tensor:
        """Return f″(t); by default a central difference of f′, good to about nine digits.

        A class need not define f″: solvers then use the less exact difference, and may take more
        steps to the same result.
        """
        step = CURVATURE_STEP * t
        return (self.slope(t + step) - self.slope(t - step)) / (2 * step)

    def centred(self, t: Tensor) -> Tensor:
        """Return f(t) − f′(1)(t−1), which is never negative and sums to the same divergence."""
        if self.slope_at_one == 0:
            return self.f(t)
        return self.f(t).sub_(t - 1, alpha=self.slope_at_one)

    def centred_slope(self, t: Tensor) -> Tensor:
        """Return f′(t) − f′(1), the derivative of ``centred``."""
        return self.slope(t) - self.slope_at_one

    def ratio_at(self, y: Tensor) -> Tensor:
        """Return the ratio where f′ reaches y; 0 for y below the range of f′, ∞ above the range."""
        low, high = self.slope(torch.full_like(y, SAFE_RATIO)), self.slope_at_infinity
        inside = (y > low) & (y < high)
        ratio = self.slope_inverse(torch.where(inside, y, self.slope_at_one))
        return torch.where(inside, ratio, torch.where(y >= high, torch.inf, 0.0))

    def upper_edge(self, step: float) -> float:
        """Return the ratio b with f′(b) − f′(1) = ``step``; ∞ if f′ does not rise by so much."""
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return float(self.ratio_at(self.slope(one) + step))

    def two_points(self, raised: Tensor, q_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least D of rows with h_n = ``raised``, and the derivative in ``raised``.

        The least D is q f(γ/q) + (1−q) f((1−γ)/(1−q)), where γ is ``raised`` and q is ``q_n``.
        """
        rest = 1 - q_n
        up, down = raised / q_n, (1 - raised) / rest
        value = q_n * self.centred(up) + rest * self.centred(down)
        return value, self.slope(up) - self.slope(down)

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...).

        The result is ∞, never too small, where a term f(h/q) is beyond the largest float64.
        """
        h, q = tensors.float64_rows(emitted, target)
        ratio = h / q
        if not q.numel() or float(q.amin()) > SAFE_RATIO:  # no h/q overflows: three passes fewer
            return self.centred(ratio).mul_(q).sum(-1).clamp_(min=0.0)
        inside = torch.isfinite(ratio)  # q = 0, or so small that h/q overflows
        terms = torch.where(inside, q * self.centred(torch.where(inside, ratio, 1.0)), 0.0)
        outside = torch.where(inside, 0.0, h).sum(-1)
        price = self.slope_at_infinity - self.slope_at_one
        total = terms.sum(-1) + torch.where(outside == 0, 0.0, outside * price)  # 0 · ∞ is 0
        return total.clamp_(min=0.0)  # a rounded sum may be negative


Kind = TypeVar("Kind", bound=type[Divergence])
DIVERGENCES: Registry[type[Divergence]] = Registry(
    "divergence", Divergence, "a Divergence", "divergence"
)
# tolerance of the checks f(1) = 0 and f′(1) = slope_at_one at registration
ROUNDING = 1e-9


def register_divergence(kind: Kind) -> Kind:
    """Make a divergence class available wherever a divergence is named.

    These places are ``ct.divergence``, the optimum, the band, audits, the command line, and the
    solvers, which also need the divergence's form for cvxpy (``solvers/_perspective.py``). The
    class has a name, its knobs as dataclass fields, an ``example`` of the knobs if there are any,
    and the members of :class:`Divergence` or :class:`FDivergence`. f(1) = 0 and ``slope_at_one``
    are checked.

    Raises
    ------
    TypeError
        Not a Divergence class.
    ValueError
        The base class's name or a taken name, an example without all knobs, f(1) ≠ 0, or f′(1)
        other than ``slope_at_one``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from cactus_theory.divergences.classical import KL
    >>> @ct.register_divergence
    ... @dataclass(frozen=True)
    ... class Information(KL):
    ...     name = "information"
    >>> ct.divergence("information").value(torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]))
    tensor(0.2231, dtype=torch.float64)
    """
    given = cast(Any, kind)
    if not (isinstance(given, type) and issubclass(given, Divergence)):
        raise TypeError(f"divergence: must be a Divergence class; got {kind!r}")
    if kind.name == Divergence.name or DIVERGENCES.taken(kind.name, kind):
        raise ValueError(f"name: must be set and not registered already; got {kind.name!r}")
    knobs = [knob.name for knob in fields(kind)]
    if set(kind.example) != set(knobs):
        raise ValueError(
            f"example: must name the knobs {', '.join(knobs) or 'none'} of {kind.name}; "
            f"got {kind.example!r}"
        )
    _check_generator(given(**given.example))
    DIVERGENCES.add(kind.name, kind)
    return kind


def _check_generator(example: Divergence) -> None:
    f, one = example.generator, torch.ones((), dtype=torch.float64, device="cpu")
    if f is None:
        return
    if not abs(float(f.f(one))) <= ROUNDING:
        raise ValueError(f"f: must be 0 at 1 ({example.spec}); got {float(f.f(one)):g}")
    slope = float(f.slope(one))
    if not math.isclose(slope, f.slope_at_one, rel_tol=ROUNDING, abs_tol=ROUNDING):
        raise ValueError(
            f"slope_at_one: must equal slope(1) ({example.spec}); "
            f"got {f.slope_at_one:g} and {slope:g}"
        )


def list_divergences() -> tuple[str, ...]:
    """Return the registered names in order of registration."""
    return DIVERGENCES.names()


def examples() -> tuple[str, ...]:
    """Return the spec of each registered divergence at its ``example``, for tables and audits."""
    return tuple(kind(**kind.example).spec for kind in DIVERGENCES.known.values())


def read_divergence(spec: str | Divergence, **knobs: Any) -> Divergence:
    """Return the divergence named by ``spec``, such as ``"kl"`` or ``"renyi:a=2"``.

    ``divergence("my_file.py:Mine")`` reads a divergence of your own from its file, and registers
    the divergence under that name.

    Raises
    ------
    ValueError
        An unknown name or knob, a missing knob, or a knob outside its range.
    OSError, TypeError
        No such file; an object in the file that is no divergence.

    Examples
    --------
    >>> kind = ct.divergence("renyi:a=2")
    >>> kind.spec
    'renyi:a=2'
    >>> kind.value(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.2877, dtype=torch.float64)
    """
    if not (isinstance(spec, str) and names_a_file(spec)):
        return known_divergence(spec, **knobs)
    entry, _ = DIVERGENCES.read(spec)
    kind: type[Divergence] = entry if isinstance(entry, type) else type(entry)
    if DIVERGENCES.known.get(kind.name) is not kind:
        register_divergence(kind)
    values = merged_knobs(spec, knobs)
    return _built(kind, spec, values) if isinstance(entry, type) or values else entry


def known_divergence(spec: Any, **knobs: Any) -> Divergence:
    """Return the divergence of a spec from data or a request, without reading any file."""
    if isinstance(spec, Divergence):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"divergence: must be a spec string or a Divergence; got {spec!r}")
    kind = DIVERGENCES.find(parse_spec(spec)[0])
    return _built(kind, spec, merged_knobs(spec, knobs))


def _built(kind: type[Divergence], spec: str, values: dict[str, Any]) -> Divergence:
    knobs = [knob.name for knob in fields(kind)]
    if set(values) != set(knobs):
        need = f"needs exactly the knob {', '.join(knobs)}" if knobs else "takes no knobs"
        raise ValueError(f"divergence: {kind.name} {need}; got {spec!r}")
    return kind(**values)
