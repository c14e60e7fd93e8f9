r"""Divergences of an emitted row h from a target row q.

Every f-divergence here is :math:`D_f(h\|q) = \sum_{q>0} q f(h/q) + f'(\infty)\,h(q=0)`
with convex f, f(1) = 0. Rényi divergences are increasing functions of an alpha
divergence and the max-divergence is their limit, so both reuse the same geometry.
Source of the definitions: Csiszár 1967; Liese & Vajda 2006; van Erven & Harremoës 2014.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory import _arguments as check

LARGEST_EXPONENT = 700.0  # e^x is finite in float64 up to here
SAFE_RATIO = 1e-300  # a probability over one above this is finite


@dataclass(frozen=True)
class Divergence:
    """A divergence D(h‖q) in nats (or its own unit), 0 iff h = q.

    Attributes
    ----------
    name : the spec's name; ``spec`` adds the knob.
    concave_frontier : whether the best acceptance is concave in the budget.
    """

    name = "divergence"
    concave_frontier = True

    @property
    def spec(self) -> str:
        """Return the one string that names this divergence everywhere."""
        return self.name

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...)."""
        raise NotImplementedError


@dataclass(frozen=True)
class FDivergence(Divergence):
    """A divergence given by a convex generator f with f(1) = 0.

    Attributes
    ----------
    at_zero : f(0), possibly infinite.
    slope_at_infinity : f′(∞), possibly infinite.
    slope_at_one : f′(1); subtracting slope_at_one·(t−1) leaves the divergence unchanged.
    smooth : whether f is differentiable and strictly convex.
    scale_free : whether f′(b) − f′(a) depends on b/a alone.
    """

    at_zero = 0.0
    slope_at_infinity = math.inf
    slope_at_one = 0.0
    smooth = True
    scale_free = False

    def f(self, t: Tensor) -> Tensor:
        """Return the generator at the ratio t = h/q ≥ 0."""
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        """Return f′(t)."""
        raise NotImplementedError

    def slope_inverse(self, y: Tensor) -> Tensor:
        """Return the ratio t with f′(t) = y."""
        raise NotImplementedError

    def lower_edge(self, upper: float, step: float) -> float:
        """Return a ≥ 0 with f′(b) − f′(a) = ``step``, 0 where f′ does not fall that far."""
        least = float(self.slope(torch.zeros((), dtype=torch.float64)))
        wanted = float(self.slope(torch.tensor(upper, dtype=torch.float64))) - step
        if not wanted > least:
            return 0.0
        return float(self.slope_inverse(torch.tensor(wanted, dtype=torch.float64)))

    def upper_edge(self, lower: float, step: float) -> float:
        """Return b with f′(b) − f′(a) = ``step``, ∞ where f′ does not rise that far."""
        wanted = float(self.slope(torch.tensor(lower, dtype=torch.float64))) + step
        if not wanted < self.slope_at_infinity:
            return math.inf
        return float(self.slope_inverse(torch.tensor(wanted, dtype=torch.float64)))

    def centred(self, t: Tensor, out: Tensor | None = None) -> Tensor:
        """Return f(t) − f′(1)(t−1), which is never negative and sums to the same divergence."""
        if self.slope_at_one == 0:
            return self.f(t)
        return self.f(t).sub_(t - 1, alpha=self.slope_at_one)

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...)."""
        h, q = emitted.double(), target.double()
        ratio = h / q
        if not q.numel() or float(q.amin()) > SAFE_RATIO:  # no ratio overflows: three passes fewer
            return self.centred(ratio).mul_(q).sum(-1).clamp_(min=0.0)
        inside = torch.isfinite(ratio)  # q = 0, or so small that h/q overflows
        terms = torch.where(inside, q * self.centred(torch.where(inside, ratio, 1.0)), 0.0)
        outside = torch.where(inside, 0.0, h).sum(-1)
        price = self.slope_at_infinity - self.slope_at_one
        whole = terms.sum(-1) + torch.where(outside > 0, outside * price, 0.0)
        return whole.clamp_(min=0.0)  # a rounded sum may lie below


class KL(FDivergence):
    """KL(h‖q): f = t ln t."""

    name = "kl"
    slope_at_one = 1.0
    scale_free = True

    def f(self, t: Tensor) -> Tensor:
        # twice as fast as xlogy
        return t.clamp(min=torch.finfo(t.dtype).tiny).log_().mul_(t)

    def slope(self, t: Tensor) -> Tensor:
        return t.log() + 1

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (y - 1).exp()

    def lower_edge(self, upper: float, step: float) -> float:
        return upper * math.exp(-step)

    def upper_edge(self, lower: float, step: float) -> float:
        return lower * math.exp(step) if step < LARGEST_EXPONENT else math.inf


class ReverseKL(FDivergence):
    """KL(q‖h): f = −ln t. The optimum under it is mentored decoding (Tran-Thien 2023)."""

    name = "reverse_kl"
    at_zero = math.inf
    slope_at_infinity = 0.0
    slope_at_one = -1.0

    def f(self, t: Tensor) -> Tensor:
        return -t.log()

    def slope(self, t: Tensor) -> Tensor:
        return -1 / t

    def slope_inverse(self, y: Tensor) -> Tensor:
        return -1 / y


class TotalVariation(FDivergence):
    """½Σ|h − q|: f = ½|t − 1|, with a kink at 1 and no curvature elsewhere."""

    name = "total_variation"
    at_zero = 0.5
    slope_at_infinity = 0.5
    smooth = False

    def f(self, t: Tensor) -> Tensor:
        return (t - 1).abs() / 2

    def slope(self, t: Tensor) -> Tensor:
        return torch.sign(t - 1) / 2

    def slope_inverse(self, y: Tensor) -> Tensor:
        raise ValueError("divergence: total_variation has no inverse slope; got total_variation")


class PearsonChi2(FDivergence):
    """Σ(h − q)²/q: f = (t − 1)². Its per-proposal optimum is the published Cactus rule."""

    name = "pearson_chi2"
    at_zero = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) ** 2

    def slope(self, t: Tensor) -> Tensor:
        return 2 * (t - 1)

    def slope_inverse(self, y: Tensor) -> Tensor:
        return 1 + y / 2


class NeymanChi2(FDivergence):
    """Σ(h − q)²/h: f = (t − 1)²/t."""

    name = "neyman_chi2"
    at_zero = math.inf
    slope_at_infinity = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) * (1 - 1 / t)

    def slope(self, t: Tensor) -> Tensor:
        return 1 - t**-2

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 - y) ** -0.5


class SquaredHellinger(FDivergence):
    """Σ(√h − √q)²: f = (√t − 1)², between 0 and 2."""

    name = "squared_hellinger"
    at_zero = 1.0
    slope_at_infinity = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t.sqrt() - 1) ** 2

    def slope(self, t: Tensor) -> Tensor:
        return 1 - t**-0.5

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 - y) ** -2


class JensenShannon(FDivergence):
    """Mean KL of h and q to their mixture: f = ½[t ln t − (1+t) ln((1+t)/2)]."""

    name = "jensen_shannon"
    at_zero = math.log(2) / 2
    slope_at_infinity = math.log(2) / 2

    def f(self, t: Tensor) -> Tensor:
        # ½[−t·ln((1+1/t)/2) − ln((1+t)/2)] avoids the cancellation of t ln t at large t
        safe = t.clamp(min=1e-300)
        first = torch.where(t > 0, -t * (torch.log1p(1 / safe) - math.log(2)), 0.0)
        return (first - torch.log1p(t) + math.log(2)) / 2

    def slope(self, t: Tensor) -> Tensor:
        return (math.log(2) - torch.log1p(1 / t)) / 2

    def slope_inverse(self, y: Tensor) -> Tensor:
        doubled = (2 * y).exp()
        return doubled / (2 - doubled)


@dataclass(frozen=True)
class Alpha(FDivergence):
    """The alpha divergence, f = (t^a − at + a − 1)/(a(a−1)), a ∉ {0, 1}.

    Limits: a → 1 is kl, a → 0 is reverse_kl. a = 2 is ½ Pearson, ½ is 2 Hellinger,
    −1 is ½ Neyman. Orders below −16 or above 16 overflow on ordinary rows and are refused.
    """

    a: float

    name = "alpha"

    def __post_init__(self) -> None:
        a = check.number("a", self.a, -16, 16)
        if a in (0.0, 1.0):
            raise ValueError(f"a: must not be 0 or 1 (use reverse_kl or kl); got {self.a!r}")
        object.__setattr__(self, "a", a)

    @property
    def spec(self) -> str:
        return f"alpha:a={self.a:g}"

    @property
    def at_zero(self) -> float:  # type: ignore[override]
        return 1 / self.a if self.a > 0 else math.inf

    @property
    def slope_at_infinity(self) -> float:  # type: ignore[override]
        return math.inf if self.a > 1 else 1 / (1 - self.a)

    def f(self, t: Tensor) -> Tensor:
        return (t**self.a - self.a * t + self.a - 1) / (self.a * (self.a - 1))

    def slope(self, t: Tensor) -> Tensor:
        return (t ** (self.a - 1) - 1) / (self.a - 1)

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 + (self.a - 1) * y) ** (1 / (self.a - 1))


@dataclass(frozen=True)
class Renyi(Divergence):
    """ln Σ h^a q^{1−a} / (a − 1), a > 0, a ≠ 1: an increasing function of ``alpha:a``."""

    a: float

    name = "renyi"

    def __post_init__(self) -> None:
        a = check.number("a", self.a, 0, 16, open_low=True)
        if a == 1:
            raise ValueError(f"a: must not be 1 (use kl); got {self.a!r}")
        object.__setattr__(self, "a", a)

    @property
    def spec(self) -> str:
        return f"renyi:a={self.a:g}"

    @property
    def concave_frontier(self) -> bool:  # type: ignore[override]
        return self.a < 1

    @property
    def generator(self) -> Alpha:
        """Return the alpha divergence of the same order."""
        return Alpha(self.a)

    def to_alpha(self, delta: Tensor) -> Tensor:
        """Return the alpha-divergence budget equal to a Rényi budget of ``delta`` nats."""
        return torch.expm1((self.a - 1) * delta) / (self.a * (self.a - 1))

    def from_alpha(self, value: Tensor) -> Tensor:
        """Return the Rényi divergence in nats of rows with this alpha divergence."""
        return torch.log1p((self.a * (self.a - 1) * value).clamp(min=-1)) / (self.a - 1)

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        return self.from_alpha(self.generator.value(emitted, target))


class MaxDivergence(Divergence):
    """ln max h/q, the Rényi divergence of infinite order: h ≤ e^δ q pointwise."""

    name = "max_divergence"
    concave_frontier = False

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        h, q = emitted.double(), target.double()
        ratio = torch.where(h > 0, h / q, 0.0)
        return ratio.amax(-1).log().clamp(min=0.0)


_PLAIN = {
    kind.name: kind
    for kind in (
        KL,
        ReverseKL,
        TotalVariation,
        PearsonChi2,
        NeymanChi2,
        SquaredHellinger,
        JensenShannon,
        MaxDivergence,
    )
}
_ORDERED = {"alpha": Alpha, "renyi": Renyi}
NAMES = (*_PLAIN, *_ORDERED)

# One of each family, for tables and audits.
EXAMPLES = (*_PLAIN, "alpha:a=0.5", "renyi:a=2")


def divergence(spec: str | Divergence, **knobs: Any) -> Divergence:
    """Return the divergence named by ``spec``, such as ``"kl"`` or ``"renyi:a=2"``.

    Raises
    ------
    ValueError
        Unknown name or knob, a missing order, or an order outside its range.
    """
    if isinstance(spec, Divergence):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"divergence: must be a spec string or a Divergence; got {spec!r}")
    name, given = check.parse_spec(spec)
    check.one_of("divergence", name, NAMES)
    if given.keys() & knobs.keys():
        raise ValueError(f"divergence: a knob must be given once; got {spec!r} and {knobs!r}")
    given = {**given, **knobs}
    wanted = {"a"} if name in _ORDERED else set()
    if set(given) != wanted:
        rule = "needs exactly the knob a" if wanted else "takes no knobs"
        raise ValueError(f"divergence: {name} {rule}; got {spec!r}")
    return _ORDERED[name](given["a"]) if wanted else _PLAIN[name]()
