"""Check a divergence for the optimum: its generator, its geometry, its values."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cactus_theory.divergences import Divergence, FDivergence, read_divergence
from cactus_theory.testing._examples import examples as draw_examples
from cactus_theory.testing.definition import EXACT, Bounds, Properties, Seen, broken
from cactus_theory.testing.properties.behaviour import shaped
from cactus_theory.testing.report import row as shown_row

# properties of the generator f and of the geometry; properties of values on rows
GENERATOR_PROPERTIES = Properties("generator_property")
VALUE_PROPERTIES = Properties("value_property")
# difference of two float64 evaluations of a sum of a few dozen terms of order one
ROUNDING = 1e-12
# relative step of central differences, and their relative error
STEP, ROUGH = 1e-5, 1e-6
# ratios in place of 0 and infinity, and the tolerance for f's limits there
NEAREST, FAR, LIMIT = 1e-300, 1e300, 1e-2
# least |f| or |f′| at NEAREST or FAR where the limit is infinite
UNBOUNDED = 20.0
# total variation from which two rows count as different
APART = 1e-3
# number of rows of a batch that are also measured one by one
SINGLY = 3


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


RATIOS = (0.01, 0.3, 0.9, 1.2, 3.0, 40.0)
BUDGETS = (0.01, 0.1, 0.4)


def assert_divergence_properties(
    divergence: str | Divergence,
    *,
    properties: Collection[str] = (),
    examples: int = 100,
) -> None:
    """Check a divergence and its generator; raise AssertionError if a property is broken.

    * f is convex, f(1) = 0, and f′, its inverse, f″ and what is declared at 0, 1 and ∞ are those
      of f; budgets translate to the generator, or to a ceiling, and back.
    * D ≥ 0, and D = 0 for equal rows alone; treating two tokens as one never costs more; the
      order of tokens, other rows and tokens with q = h = 0 do not matter; the value is that of
      its generator, also where q = 0.

    The message shows the first broken property.
    """
    kind = read_divergence(divergence)
    names = properties or {*GENERATOR_PROPERTIES, *VALUE_PROPERTIES}
    geometry, values = (
        [prop for name, prop in table.items() if name in names and prop.applies(kind)]
        for table in (GENERATOR_PROPERTIES, VALUE_PROPERTIES)
    )
    rows = (_Rows(kind, q, h) for q, h in draw_examples(examples, 0))
    fault = broken(kind.spec, [_Geometry(kind)], geometry) or broken(kind.spec, rows, values)
    if fault:
        raise AssertionError(fault)


@dataclass
class _Geometry(Seen):
    """A divergence at fixed ratios and budgets; f′ by central differences of f, and so on."""

    kind: Divergence

    @property
    def f(self) -> FDivergence:
        """Return the generator, of a divergence with one."""
        assert self.kind.generator is not None
        return self.kind.generator


def _rise(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the derivative of a function by central differences."""
    step = STEP * at
    return (function(at + step) - function(at - step)) / (2 * step)


def _equal(
    values: Tensor, expected: Tensor | float, about: str, at: Tensor, relative: float = ROUGH
) -> Bounds:
    """Return bounds for values (N,) equal to ``expected``; ``about`` names the point ``{at}``."""
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(values.shape)
    allowed = relative * (1 + expected.abs().nan_to_num(posinf=0.0))
    tell = lambda index: about.format(at=f"{float(at[index]):.4g}")  # noqa: E731
    return Bounds(values, expected, expected, tell, allowed)


def _has_generator(kind: Divergence) -> bool:
    return kind.generator is not None


def _is_smooth(kind: Divergence) -> bool:
    return kind.generator is not None and kind.generator.smooth


@GENERATOR_PROPERTIES.register(_has_generator, hint="another sign, or a constant that is left over")
def generator_is_convex_and_zero_at_one(seen: _Geometry) -> Iterator[Bounds]:
    """f(1) = 0, f is convex, and f(t) − f′(1)(t − 1) is never negative."""
    one = _numbers(1.0)
    yield Bounds(seen.f.f(one), 0, 0, "f(1)", ROUNDING)
    t = torch.logspace(-6, 6, 400, dtype=torch.float64)
    rise = seen.f.f(t.clone()).diff() / t.diff()
    allowed = ROUGH * (1 + rise[1:].abs())
    tell = lambda index: f"how much f steepens at the ratio {float(t[index[0] + 1]):.4g}"  # noqa: E731
    yield Bounds(rise.diff(), 0, None, tell, allowed)
    yield Bounds(seen.f.centred(t.clone()), 0, None, "f(t) − f′(1)(t − 1)", ROUNDING)


@GENERATOR_PROPERTIES.register(_has_generator, hint="slope, slope_at_one or kink is not that of f")
def slope_is_the_derivative(seen: _Geometry) -> Iterator[Bounds]:
    """f′ is the derivative of f; at 1 it is ``slope_at_one`` and jumps by ``kink``."""
    f, t, one = seen.f, _numbers(*RATIOS), _numbers(1.0)
    yield _equal(f.slope(t.clone()), _rise(f.f, t), "f′ at the ratio {at}", t)
    below, above = f.slope(_numbers(1 - EXACT, 1 + EXACT))
    yield _equal((above - below)[None], f.kink, "how much f′ jumps at the ratio {at}", one)
    yield _equal((above + below)[None] / 2, f.slope_at_one, "f′ around the ratio {at}", one)


@GENERATOR_PROPERTIES.register(
    _is_smooth, hint="slope_inverse solves another equation than f′(t) = y"
)
def slope_inverse_undoes_slope(seen: _Geometry) -> Iterator[Bounds]:
    """f′(t) = y at the inverse of y; beyond the range of f′ the ratio is 0 or ∞."""
    f, t = seen.f, _numbers(*RATIOS)
    y = f.slope(t.clone())
    for name, inverse in (("slope_inverse", f.slope_inverse), ("ratio_at", f.ratio_at)):
        about = f"f′ of {name} of f′({{at}})"
        yield _equal(f.slope(inverse(y.clone())), y, about, t, EXACT)
    low, high = float(f.slope(_numbers(0.0))[0]), f.slope_at_infinity
    if math.isfinite(low):
        below = _numbers(low, low - 1)
        yield _equal(f.ratio_at(below.clone()), 0.0, "ratio_at {at}, below f′(0)", below, 0.0)
    if math.isfinite(high):
        above = _numbers(high, high + 1)
        yield _equal(f.ratio_at(above.clone()), math.inf, "ratio_at {at}, above f′(∞)", above, 0.0)


@GENERATOR_PROPERTIES.register(_is_smooth, hint="curvature is not the derivative of slope")
def curvature_is_the_derivative_of_the_slope(seen: _Geometry) -> Iterator[Bounds]:
    """f″ is the derivative of f′, and positive where f is declared smooth."""
    t = _numbers(*RATIOS)
    curvature = seen.f.curvature(t.clone())
    yield Bounds(curvature, torch.finfo(torch.float64).tiny, None, "f″", 0.0)
    yield _equal(curvature / _rise(seen.f.slope, t), 1.0, "f″ over the slope of f′ at {at}", t)


@GENERATOR_PROPERTIES.register(_has_generator, hint="at_zero or slope_at_infinity is not the limit")
def ends_are_as_declared(seen: _Geometry) -> Iterator[Bounds]:
    """``at_zero`` is f(0) and ``slope_at_infinity`` f′(∞), each of which may be infinite."""
    f, near, far = seen.f, _numbers(NEAREST), _numbers(FAR)
    at_zero, steep = f.f(near.clone()), f.slope(far.clone())
    for value, limit, about, at in (
        (at_zero, f.at_zero, "f near 0, at {at}", near),
        (steep, f.slope_at_infinity, "f′ far away, at {at}", far),
    ):
        if math.isinf(limit):
            yield Bounds(value, UNBOUNDED, None, about.format(at=f"{float(at):g}"), 0.0)
        else:
            yield _equal(value, limit, about, at, LIMIT)


@GENERATOR_PROPERTIES.register(_has_generator, hint="the mass that is not on the token is left out")
def two_points_are_a_row_of_two_tokens(seen: _Geometry) -> Iterator[Bounds]:
    """``two_points`` returns D of a row of two tokens and its derivative."""
    f, raised, q_n = seen.f, _numbers(0.3, 0.8), _numbers(0.2, 0.5)
    value, slope = f.two_points(raised.clone(), q_n.clone())
    due = q_n * f.f(raised / q_n) + (1 - q_n) * f.f((1 - raised) / (1 - q_n))
    yield _equal(value, due, "two_points at {at}", raised, EXACT)
    rise = _rise(lambda x: f.two_points(x, q_n.clone())[0], raised)
    yield _equal(slope, rise, "the derivative of two_points at {at}", raised)


@GENERATOR_PROPERTIES.register(
    hint="a translation of budgets that is not undone, or its derivative"
)
def budgets_translate_both_ways(seen: _Geometry) -> Iterator[Bounds]:
    """Budgets translate to the generator's or to a ceiling and back, prices by the derivative."""
    kind, delta = seen.kind, _numbers(*BUDGETS)
    if kind.generator is None:
        ceiling = kind.ceiling(delta.clone())
        yield _equal(kind.from_ceiling(ceiling.clone()), delta, "budget {at}", delta, EXACT)
        slope, about = kind.ceiling_slope(ceiling.clone()), "ceiling_slope of the budget {at}"
        yield _equal(slope, _rise(kind.ceiling, delta), about, delta)
        return
    back = kind.from_generator(kind.to_generator(delta.clone()))
    yield _equal(back, delta, "budget {at}, translated and back", delta, EXACT)
    price = kind.price_from_generator(torch.ones_like(delta), delta.clone())
    about = "what a generator's price of 1 is at the budget {at}"
    yield _equal(price, _rise(kind.to_generator, delta), about, delta)


@dataclass
class _Rows(Seen):
    """A divergence on rows q and h, (R, V)."""

    kind: Divergence
    q: Tensor
    h: Tensor

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        yield "target q", shown_row(self.q[row].tolist())
        yield "emitted", shown_row(self.h[row].tolist())

    def cost(self, h: Tensor, q: Tensor) -> Tensor:
        """Return D(h‖q), (R,), of copies of rows (R, V)."""
        return shaped("value", self.kind.value(h.clone(), q.clone()), (len(q),))

    @cached_property
    def value(self) -> Tensor:
        """Return D(h‖q), (R,)."""
        return self.cost(self.h, self.q)

    @property
    def allowed(self) -> Tensor:
        """Return the rounding error allowed for each value, (R,)."""
        return EXACT * (1 + self.value.nan_to_num(posinf=0.0))


@VALUE_PROPERTIES.register(hint="0 log 0, 0/0, or a rounded sum that is not clamped at 0")
def values_are_never_negative(seen: _Rows) -> Iterator[Bounds]:
    """D(h‖q) ≥ 0, ∞ included, as float64 whatever the rows' dtype."""
    yield Bounds(seen.value, 0, None, "D(h‖q)", ROUNDING)
    single = seen.kind.value(seen.h.float(), seen.q.float())
    wide = torch.tensor([single.dtype == torch.float64])
    yield Bounds(wide, 1, 1, "whether the value of float32 rows is float64", 0.0)


@VALUE_PROPERTIES.register(hint="what tells the rows apart is not looked at")
def only_equal_rows_cost_nothing(seen: _Rows) -> Iterator[Bounds]:
    """D(q‖q) = 0, and D(h‖q) > 0 where the rows differ."""
    yield Bounds(seen.cost(seen.q, seen.q), 0, 0, "D(q‖q)", ROUNDING)
    differ = (seen.h - seen.q).abs().sum(-1) / 2 > APART
    yield Bounds(seen.value, torch.finfo(torch.float64).tiny, None, "D(h‖q)", 0.0, differ)


@VALUE_PROPERTIES.register(hint="a sum or maximum over the batch, or the number of tokens is used")
def other_rows_and_impossible_tokens_do_not_matter(seen: _Rows) -> Iterator[Bounds]:
    """The order of tokens, tokens with q = h = 0 and other rows, even of NaN, change nothing."""
    for about, change in (
        ("after moving all tokens", lambda rows: rows.roll(1, -1)),
        ("after adding impossible tokens", lambda rows: torch.nn.functional.pad(rows, (1, 2))),
    ):
        costs = seen.cost(change(seen.h), change(seen.q))
        yield Bounds(costs, seen.value, seen.value, f"D(h‖q) {about}", seen.allowed)
    bad = torch.full_like(seen.h[:1], torch.nan)
    beside = seen.cost(torch.cat([seen.h, bad]), torch.cat([seen.q, seen.q[:1]]))
    yield Bounds(beside[:-1], seen.value, seen.value, "D(h‖q) beside NaN", seen.allowed)
    yield Bounds(beside[-1:].isnan(), 1, 1, "whether NaN costs NaN", 0.0)
    for row in range(min(SINGLY, len(seen.q))):
        only = torch.tensor([row])
        alone, due = seen.cost(seen.h[only], seen.q[only]), seen.value[only]
        yield Bounds(alone, due, due, "D(h‖q) of the row alone", seen.allowed[only], rows=only)


@VALUE_PROPERTIES.register(hint="no f-divergence, nor an increasing function of one")
def merging_tokens_never_costs_more(seen: _Rows) -> Iterator[Bounds]:
    """Rows in which two tokens are treated as one are no further apart."""
    if seen.q.shape[-1] < 2:
        return
    h, q = (torch.cat([r[:, :1] + r[:, 1:2], r[:, 2:]], -1) for r in (seen.h, seen.q))
    about = "D(h‖q) with the first two tokens as one"
    yield Bounds(seen.cost(h, q), None, seen.value, about, seen.allowed)


@VALUE_PROPERTIES.register(hint="another sum, or mass where q = 0 at another price than f′(∞)")
def values_are_those_of_the_generator(seen: _Rows) -> Iterator[Bounds]:
    """D is Σ q f(h/q) + f′(∞) h(q=0), what its generator translates to, or its largest ratio's."""
    h, q, kind, f = seen.h, seen.q, seen.kind, seen.kind.generator
    ratio = torch.where(h == 0, 0.0, h / q)
    judged = (ratio.isfinite() | (q == 0)).all(-1)
    if f is None:
        due, allowed = kind.from_ceiling(ratio.amax(-1)), seen.allowed
    elif f is kind:
        terms = torch.where(q > 0, q * f.f(torch.where(q > 0, ratio, 1.0)), 0.0)
        lost = torch.where(q > 0, 0.0, h).sum(-1)
        due = terms.sum(-1) + torch.where(lost > 0, lost * f.slope_at_infinity, 0.0)
        allowed = seen.allowed + EXACT * terms.abs().sum(-1).nan_to_num(posinf=0.0)
    else:
        generated = f.value(h.clone(), q.clone())
        # rows far apart lose the digits in the generator's value: compare after translating back
        same = torch.isclose(kind.to_generator(seen.value), generated, rtol=EXACT, atol=0.0)
        due = torch.where(same, seen.value, kind.from_generator(generated))
        allowed = seen.allowed
    yield Bounds(seen.value, due, due, "D(h‖q)", allowed, judged)
