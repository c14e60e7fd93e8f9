"""Bands at a price to 60 digits, by bisection alone: sharing nothing with the package."""

import math
import sys
from collections.abc import Sequence

from mpmath import mp

# digits of every number, and the least ln A: below it a row is p but for 1e-4000
DIGITS, FARTHEST = 60, -9200
STEPS = 110
# c and a of f″(t) = c t^(a − 2); of Jensen-Shannon's, ½/(t(1 + t)), a is None
CURVES = {
    "kl": (1, 1),
    "reverse_kl": (1, 0),
    "pearson_chi2": (2, 2),
    "neyman_chi2": (2, -1),
    "squared_hellinger": (0.5, 0.5),
    "jensen_shannon": (0.5, None),
}


def curve_of(spec: str):
    name, _, order = spec.partition(":a=")
    c, a = (1, float(order)) if name == "alpha" else CURVES[name]
    return mp.mpf(c), None if a is None else mp.mpf(a)


def edge(curve, step, at):
    """Return t with f′(t) − f′(``at``) = ``step``, 0 and ∞ beyond the range of f′."""
    c, a = curve
    if a is None:
        share = at / (1 + at) * mp.exp(step / c)
        return share / (1 - share) if share < 1 else mp.inf
    if a == 1:
        return at * mp.exp(step / c)
    power = at ** (a - 1) + (a - 1) * step / c
    if power <= 0:
        return mp.mpf(0) if a > 1 else mp.inf
    return power ** (1 / (a - 1))


def band(spec: str, price: float, q: Sequence[float], p: Sequence[float], alive=1, boxes=None):
    """Return h = clip(p/P, max(a, c) q, min(b, C) q) of sum 1, f′(b) − f′(a) being 1/price.

    ``boxes`` are (c, C) by token. Between a and b, the edge from which the other loses no digits is
    halved in logarithms; where nothing is cut a rises alone.
    """
    with mp.workdps(DIGITS):
        q, p = ([mp.mpf(float(x)) for x in row] for row in (q, p))
        q, p = [x / sum(q) for x in q], [x / sum(p) / mp.mpf(float(alive)) for x in p]
        boxes = boxes or [(0, mp.inf)] * len(q)
        curve, step = curve_of(spec), 1 / mp.mpf(price)
        rows = [(x, y, *box) for x, y, box in zip(q, p, boxes, strict=True) if x > 0]
        largest = max([y / x for x, y, *_ in rows] + [mp.mpf(1)])

        def law(low, high):
            return [max(max(low, c) * x, min(y, min(high, most) * x)) for x, y, c, most in rows]

        def halved(edges, least, most):
            for _ in range(STEPS):
                middle = (least + most) / 2
                short = sum(law(*edges(mp.exp(middle)))) < 1
                least, most = (middle, most) if short else (least, middle)
            return edges(mp.exp(most))

        def by_upper(x):
            return edge(curve, -step, x), x

        steep = curve[1] is not None and curve[1] > 1
        if steep and sum(law(0, top := edge(curve, step, mp.mpf(0)))) >= 1:  # f′(a) cannot fall
            edges = halved(lambda x: (0, x), 0, mp.log(top))
        elif steep:
            edges = halved(lambda x: (x, edge(curve, step, x)), FARTHEST, 0)
        elif sum(law(*by_upper(largest))) < 1:  # nothing is cut
            edges = halved(lambda x: (x, mp.inf), FARTHEST, 0)
        else:
            edges = halved(by_upper, 0, mp.log(largest))
        found = iter(law(*edges))
        return [float(next(found)) if x > 0 else 0.0 for x in q]


def spent(spec: str, h: Sequence[float], q: Sequence[float]) -> float:
    """Return D(h‖q) of an f-divergence; ∞ where a term f(h/q) is beyond the largest float64."""
    c, a = curve_of(spec)
    with mp.workdps(DIGITS):
        total = mp.mpf(0)
        for h_i, q_i in zip(h, q, strict=True):
            h_i, q_i = mp.mpf(float(h_i)), mp.mpf(float(q_i))
            if q_i == 0 or (h_i == 0 and a is not None and a <= 0):
                if h_i > 0 or q_i > 0:
                    return math.inf
                continue
            t = h_i / q_i
            if a is None:
                log = t * mp.log(t) if t else mp.mpf(0)
                value = (log - (1 + t) * mp.log((1 + t) / 2)) / 2
            elif a == 1:
                value = (t * mp.log(t) if t else 0) - t + 1
            elif a == 0:
                value = t - 1 - mp.log(t)
            else:
                value = c * (t**a - a * t + a - 1) / (a * (a - 1))
            if value > sys.float_info.max:
                return math.inf
            total += q_i * value
        return float(total)
