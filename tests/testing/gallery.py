"""Planted faults: rules that are wrong in one way each, and what catches them.

Every fault was, or could have been, made in earnest. ``law`` is the property that has to catch
it; ``right`` is the same thing without the fault, which every property must let through.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory.policies import (
    Budget,
    Declaration,
    Entrywise,
    FixedTarget,
    PerProposal,
    Policy,
    SharedResidual,
)
from cactus_theory.policies.accepted_sets import Thresholds
from cactus_theory.policies.band import Band
from cactus_theory.policies.policy import accept_probability, normalised_or

EXAMPLES = 2000
COUNTS = (50, 300, EXAMPLES)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes
    ----------
    title : the mistake in words. ``law`` : the property that must catch it.
    rule : what is wrong. ``right`` : the rule without the fault, if there is one.
    tokens : the most tokens that a counterexample should have.
    """

    title: str
    law: str
    rule: Policy
    right: Policy | None = None
    tokens: int = 4


def spread(row):
    """Return a row divided by its sum, uniform if it is empty."""
    total = row.sum()
    return row / total if total > 0 else np.full(len(row), 1 / len(row))


def above_zero(row):
    return np.maximum(row, 0)


def entry(row, n):
    return row.gather(-1, n[..., None])[..., 0]


# functions of one row -----------------------------------------------------------------------


def plain(q, p, n):
    return min(1, q[n] / p[n])


def lenient(q, p, n, *, leniency=1.0):
    return min(1, q[n] / (leniency * p[n]))


@ct.rule(budget="kl <= delta per proposal", direction=1, strict=0.0, at_least_speculative=True)
def taylor(q, p, n, *, delta=0.25):
    raised = min(1, q[n] + np.sqrt(2 * delta * q[n] * (1 - q[n])))
    return min(1, raised / p[n])


@ct.rule(continuous=False)
def zero_times_log_zero(q, p, n):
    with np.errstate(all="ignore"):
        entropy = -(q * np.log(q)).sum()
    return float(q[n] > 0.1) if entropy < 1 else float(q[n] > 0) if entropy >= 1 else entropy


@ct.rule
def cancellation(q, p, n, *, delta=2.0):
    variance = (q**2).sum() + q[n] - ((q**2).sum() + q[n] ** 2)  # q_n(1 − q_n), badly
    raised = q[n] + np.sqrt(max(2 * delta * variance, 0))
    return min(1, raised / p[n])


@ct.rule(vectorised=True, at_least_speculative=True)
def at_once(q, p, n):
    return (entry(q, n) / entry(p, n)).clamp(max=1)


@ct.rule(vectorised=True, at_least_speculative=True)
def scaled_by_the_batch(q, p, n):
    q_n = entry(q, n)
    return (q_n / entry(p, n) * (1 + q_n.mean())).clamp(max=1)


STRICT: dict[str, Any] = {"budget": "kl <= 0 emitted"}
KNOB: dict[str, Any] = {"strict": 1.0, "knob_range": (0.1, 1.0)}
lossless = ct.rule(plain, **STRICT)
lenience = ct.rule(lenient, direction=-1, **KNOB)
reversed_knob = ct.rule(lenient, direction=1, **KNOB)
unnormalised = ct.rule(plain, residual=lambda q, p, n: above_zero(q - p), **STRICT)
normalised = ct.rule(
    plain, residual=lambda q, p, n: spread(above_zero(q - p) if (q > p).any() else q), **STRICT
)
no_ceiling = ct.rule(lambda q, p, n: q[n] / p[n])
mixture = ct.rule(lambda q, p: (q + p) / 2, between=True, support="free")


def recovering(residual, function=plain, **declared):
    return ct.rule(function, residual=residual, **declared)


# classes ------------------------------------------------------------------------------------


class Named:
    """A rule without knobs, named after its class."""

    @property
    def name(self):
        return type(self).__name__

    @property
    def spec(self):
        return self.name


@dataclass(frozen=True)
class Averaged(ct.policy("cactus_exact", delta=0.1).__class__):
    name = "per_proposal_as_emitted"

    @property
    def declares(self):
        return Declaration(1, 0.0, Budget("kl", self.delta, "emitted"), between=True)


class FalselyHeld(ct.policy("band", price=1.0).__class__):
    @property
    def declares(self):
        return replace(super().declares, floored=(0,), held=(0,))


class ClippedTarget(Named, FixedTarget):
    """Emits clip(p, q/2, 2q), normalised."""

    def target(self, q, p, path=None):
        return normalised_or(torch.minimum(torch.maximum(p, q / 2), 2 * q), q)


class LosslessResidual(Named, SharedResidual):
    def residual(self, q, p, n):
        q, p = q.double(), p.double()
        return normalised_or((q - p).clamp(min=0.0), q)


class ResidualFromTheWrongRow(ClippedTarget):
    residual = LosslessResidual.residual


class StaleDraftRow(LosslessResidual):
    def acceptance(self, q, p, n):
        rows = p.double()
        stale = rows.roll(1, 0) if rows.ndim > 1 else rows
        return accept_probability(q.double().gather(-1, n), stale.gather(-1, n))


class HalfTheBudget(Named, PerProposal):
    delta = 0.4

    @property
    def declares(self):
        return Declaration(budget=Budget("pearson_chi2", self.delta, "per proposal"), optimal=True)

    def raised(self, q_n):
        return (q_n + (self.delta / 2 * q_n * (1 - q_n)).sqrt()).clamp(max=1.0)


class LosesFarEdges(Band):
    """Solves a row that a coin asks for at a price of 0.5 at least."""

    name = "loses_far_edges"

    def row(self, q, p, alive=1.0):
        """Return the row of another price."""
        return Band(price=max(self.price, 0.5)).row(q, p, alive)


@dataclass(frozen=True)
class ForgetsSmallBudgets(type(ct.policy("cactus_exact", delta=0.1))):
    """Spends twice the budget for 0.35 < δ < 0.6."""

    name = "forgets_small_budgets"

    def raised(self, q_n):
        own = self.delta * 2 if 0.35 < self.delta < 0.6 else self.delta
        return ct.policy("cactus_exact", delta=own).raised(q_n)


class FalselyEntrywise(Named, SharedResidual, Entrywise):
    """Says that it reads q_n and p_n alone, and reads the largest entry of q."""

    def bounds(self, q_n, p_n):
        return accept_probability(q_n, p_n), torch.full_like(q_n, torch.inf)

    def ceiling(self, q_n, p_n):
        return q_n

    def acceptance(self, q, p, n):
        return torch.maximum(super().acceptance(q, p, n), self.floor(q.double(), n))

    def floor(self, q, n):
        return (q.gather(-1, n) > 0) * q.amax(-1, keepdim=True) / 2


class ReadsEntries(FalselyEntrywise):
    def floor(self, q, n):
        return 0.0 * q.gather(-1, n)


class FalselyGenerous(ReadsEntries):
    """Says that it keeps what lossless sampling keeps, and keeps a little less."""

    def acceptance(self, q, p, n):
        return 0.999 * super().acceptance(q, p, n)


class FalselyShared(ReadsEntries):
    """Says that it has one residual law for all tokens, and leaves the rejected token out of it."""

    def residual(self, q, p, n):
        return normalised_or(q.double().scatter(-1, n[..., None], 0.0), q.double())


def inclusive(phi):
    """Return bounds by which coins of φ itself are below it."""
    above = torch.nextafter(phi, torch.full_like(phi, 2.0))
    return above, above


class InclusiveCoins(LosslessResidual):
    def acceptance(self, q, p, n):
        return accept_probability(q.double().gather(-1, n), p.double().gather(-1, n))

    def bounds(self, q_n, p_n):
        return inclusive(accept_probability(q_n, p_n))


class InclusiveThresholds(Thresholds):
    def bounds(self, q_n, p_n):
        return inclusive(self.accept_entries(q_n))


PLAIN = ct.policy("speculative")
EXACT = ct.policy("cactus_exact", delta=0.3)
HELD = ct.policy("band:price=1,hold=0")
# fmt: off
FAULTS = (
    Fault("second-order rule sold as a KL guarantee", "budget_holds", taylor),
    Fault("per-proposal budget declared as emitted", "budget_holds", Averaged(0.1)),
    Fault("argmax residual declared lossless", "budget_holds",
          recovering(lambda q, p, n: np.eye(len(q))[q.argmax()], **STRICT), lossless),
    Fault("a token that is said to be held and is not", "named_tokens_keep_their_chance",
          FalselyHeld(price=1.0), HELD),
    Fault("draws from q instead of the residual", "residual_is_what_the_row_leaves",
          recovering(lambda q, p, n: q, **STRICT), lossless),
    Fault("recovers from q at every value of a knob", "residual_is_what_the_row_leaves",
          recovering(lambda q, p, n: q, lenient, direction=-1, **KNOB), lenience),
    Fault("recovers from (p − q)₊ instead of (q − p)₊", "residual_is_what_the_row_leaves",
          recovering(lambda q, p, n: spread(above_zero(p - q)), lenient, direction=-1, **KNOB),
          lenience),
    Fault("recovers from (q − p)₊ where another row is emitted",
          "residual_is_what_the_row_leaves", ResidualFromTheWrongRow(), ClippedTarget()),
    Fault("p/q in the acceptance instead of q/p", "budget_holds",
          ct.rule(lambda q, p, n: min(1, p[n] / q[n]) if q[n] > 0 else 0.0, **STRICT), lossless),
    Fault("knob declared the wrong way round", "acceptance_follows_the_knob", reversed_knob,
          lenience),
    Fault("knob is ignored", "strict_point_is_lossless",
          ct.rule(lambda q, p, n, *, delta=0.5: min(1, 1.3 * q[n] / p[n]), direction=1,
                  strict=0.0, knob_range=(0.0, 10.0))),
    Fault("residual is not normalised", "residual_is_a_distribution", unnormalised, normalised),
    Fault("residual ignores q", "no_token_without_target_mass",
          recovering(lambda q, p, n: spread(above_zero(1 - p)), lenient), lenience),
    Fault("vocabulary off by one in the residual", "names_of_tokens_do_not_matter",
          recovering(lambda q, p, n: np.append(spread(above_zero(q - p)[:-1]), 0.0)
                     if len(q) > 1 else q), lossless),
    Fault("reads the token before, which no rotation of the vocabulary shows",
          "names_of_tokens_do_not_matter",
          ct.rule(lambda q, p, n: min(1, q[n] * (1 + q[n - 1]) / p[n])), lossless),
    Fault("token 0 is always accepted", "names_of_tokens_do_not_matter",
          ct.rule(lambda q, p, n: 1.0 if n == 0 and q[0] > 0 else min(1, q[n] / p[n])), lossless),
    Fault("residual taken from q instead of h", "emitted_law_sums_to_one",
          ResidualFromTheWrongRow(), ClippedTarget()),
    Fault("min(1, ·) forgotten", "acceptance_is_a_probability", no_ceiling, lossless),
    Fault("entropy with 0 · log 0", "answers", zero_times_log_zero),
    Fault("crashes where nothing is uncertain", "answers",
          ct.rule(lambda q, p, n: min(1, q[n] / p[n] / (
              1 / (q < 1).sum() if (q < 1).sum() else [][0])))),
    Fault("variance by cancellation in float32", "float32_agrees", cancellation),
    Fault("adds 1e-9 to every q", "no_token_without_target_mass",
          ct.rule(lambda q, p, n: min(1, (q[n] + 1e-9) / p[n])), lossless),
    Fault("depends on the size of the vocabulary", "impossible_tokens_do_not_matter",
          ct.rule(lambda q, p, n: min(1, (0.9 * q[n] + 0.1 * q[n] * len(q)) / p[n])), lossless),
    Fault("draft row of the row before", "batch_equals_loop", StaleDraftRow(), PLAIN),
    Fault("threshold rule sold as never slower", "never_slower_than_speculative",
          ct.rule(lambda q, p, n: float(q[n] > 0.3), at_least_speculative=True,
                  continuous=False)),
    Fault("target sharper than q declared between", "stays_between",
          ct.rule(lambda q, p: spread(np.where(q == q.max(), q, 0.0)), between=True,
                  continuous=False), mixture),
    Fault("lossless rule declared optimal for a budget", "nothing_accepts_more",
          ct.rule(lambda q, p, n, *, delta=0.3: min(1, q[n] / p[n]),
                  budget="kl <= delta emitted", optimal=True)),
    Fault("half the budget declared optimal (per proposal)", "nothing_accepts_more",
          HalfTheBudget()),
    Fault("wrong from 50 tokens on", "budget_holds",
          ct.rule(lambda q, p, n: min(1, (1.1 if len(q) >= 50 else 1) * q[n] / p[n]), **STRICT),
          lossless, tokens=60),
    Fault("wrong between two values of a knob", "budget_holds",
          ct.rule(lambda q, p, n, *, alpha=0.0: min(
              1, (2 if 0.3 < alpha < 0.45 else 1) * q[n] / p[n]), knob_range=(0.0, 1.0), **STRICT)),
    Fault("class that overspends between two values of its knob", "budget_holds",
          ForgetsSmallBudgets(2.0), EXACT),
    Fault("vectorised rule that mixes the rows of a batch", "batch_equals_loop",
          scaled_by_the_batch, at_once),
    Fault("entrywise stated of a rule that reads the whole row", "reads_only_drafted_entries",
          FalselyEntrywise(), ReadsEntries()),
    Fault("refuses what lossless sampling keeps, and states otherwise",
          "accepts_within_its_bounds", FalselyGenerous(), ReadsEntries()),
    Fault("one residual law stated, another one for every token", "recovers_alike",
          FalselyShared(), ReadsEntries()),
    Fault("edges of far prices are those of another one where a coin asks",
          "far_knobs_have_one_law", LosesFarEdges(price=1.0), ct.policy("band:price=1")),
    Fault("inclusive coin test", "coins_decide_as_declared", InclusiveCoins(), PLAIN),
    Fault("inclusive test lets coin 0 through", "no_token_without_target_mass",
          InclusiveCoins(), PLAIN),
    Fault("two thresholds with coin <= q/a, as SGLang had it", "no_token_without_target_mass",
          InclusiveThresholds(acc=0.5), ct.policy("thresholds:acc=0.5")),
)
# fmt: on


def caught(fault: Fault, laws=None):
    """Return the first report in which the law fails, and how many examples it took."""
    from cactus_theory.testing._check_policies import check_policy
    from cactus_theory.testing._examples import examples

    for count in COUNTS:
        chosen = [fault.law] if laws is None else laws
        report = check_policy(fault.rule, examples(count), properties=chosen)
        if any(v.property == fault.law and v.verdict == "fails" for v in report.properties):
            return report, count
    return None, EXAMPLES
