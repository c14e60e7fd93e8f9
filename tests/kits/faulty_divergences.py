"""Planted faults: divergences that are wrong in one way each, and the property that sees it."""

import math
from dataclasses import dataclass

import torch

from cactus_theory.divergences import Divergence
from cactus_theory.divergences.classical import (
    KL,
    JensenShannon,
    MaxDivergence,
    PearsonChi2,
    Renyi,
    ReverseKL,
    TotalVariation,
)


class Concave(KL):
    slope_at_one = -1.0

    def f(self, t):
        return -super().f(t)

    def centred(self, t):
        return self.f(t) + (t - 1)


class Shifted(PearsonChi2):
    def f(self, t):
        return super().f(t) + 1e-6


class SlopeOfAnother(KL):
    slope_at_one = 0.0

    def slope(self, t):
        return t.log()


class KinkNotDeclared(TotalVariation):
    kink = 0.0


class SlopeAtOne(KL):
    slope_at_one = 1.1


class InverseOfAnother(KL):
    def slope_inverse(self, y):
        return y.exp()


class NeverZero(PearsonChi2):
    def ratio_at(self, y):
        return self.slope_inverse(y)


class DoubleCurvature(KL):
    def curvature(self, t):
        return 2 / t


class FiniteAtZero(ReverseKL):
    at_zero = 0.0


class SteepAtInfinity(JensenShannon):
    slope_at_infinity = math.inf


class OnePoint(KL):
    def two_points(self, raised, q_n):
        up = raised / q_n
        return q_n * self.centred(up), self.slope(up)


class PriceOfTheGenerator(Renyi):
    def price_from_generator(self, price, value):
        return price


class CeilingOfTwo(MaxDivergence):
    def ceiling(self, delta):
        return 2.0**delta


class MaySinkBelowZero(KL):
    def value(self, emitted, target):
        return (emitted.double() * (emitted.double() / target).log()).nan_to_num().sum(-1) - 1e-9


class SingleValue(KL):
    def value(self, emitted, target):
        return super().value(emitted, target).to(emitted.dtype)


class BlindToNames(KL):
    def value(self, emitted, target):
        return super().value(emitted.sort(-1).values, target.sort(-1).values)


class MeanOverTokens(KL):
    def value(self, emitted, target):
        return super().value(emitted, target) / emitted.shape[-1]


class LargestOfTheBatch(KL):
    def value(self, emitted, target):
        found = super().value(emitted, target)
        return found if found.ndim == 0 else found + found.amax()


class SumOfSquares(Divergence):
    """Not monotone: two tokens that both grew count more as one."""

    generator = None

    def value(self, emitted, target):
        return ((emitted.double() - target.double()) ** 2).sum(-1)

    def ceiling(self, delta):
        return delta.exp()

    def from_ceiling(self, ratio):
        return ratio.log()

    def ceiling_slope(self, ratio):
        return ratio


class HalfOfLostMass(TotalVariation):
    def value(self, emitted, target):
        lost = torch.where(target == 0, emitted, 0.0).double().sum(-1)
        return super().value(emitted, target) + lost / 4


@dataclass(frozen=True)
class Fault:
    """One planted fault and the property that must see it."""

    divergence: Divergence
    prop: str


FAULTS = (
    Fault(Concave(), "generator_is_convex_and_zero_at_one"),
    Fault(Shifted(), "generator_is_convex_and_zero_at_one"),
    Fault(SlopeOfAnother(), "slope_is_the_derivative"),
    Fault(KinkNotDeclared(), "slope_is_the_derivative"),
    Fault(SlopeAtOne(), "slope_is_the_derivative"),
    Fault(InverseOfAnother(), "slope_inverse_undoes_slope"),
    Fault(NeverZero(), "slope_inverse_undoes_slope"),
    Fault(DoubleCurvature(), "curvature_is_the_derivative_of_the_slope"),
    Fault(FiniteAtZero(), "ends_are_as_declared"),
    Fault(SteepAtInfinity(), "ends_are_as_declared"),
    Fault(OnePoint(), "two_points_are_a_row_of_two_tokens"),
    Fault(PriceOfTheGenerator(a=2.0), "budgets_translate_both_ways"),
    Fault(CeilingOfTwo(), "budgets_translate_both_ways"),
    Fault(MaySinkBelowZero(), "values_are_never_negative"),
    Fault(SingleValue(), "values_are_never_negative"),
    Fault(BlindToNames(), "only_equal_rows_cost_nothing"),
    Fault(MeanOverTokens(), "other_rows_and_impossible_tokens_do_not_matter"),
    Fault(LargestOfTheBatch(), "other_rows_and_impossible_tokens_do_not_matter"),
    Fault(SumOfSquares(), "merging_tokens_never_costs_more"),
    Fault(HalfOfLostMass(), "values_are_those_of_the_generator"),
)
