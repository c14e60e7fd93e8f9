"""Choose the fastest policy, knob, verifier and K within a divergence per token, on a trace."""

from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.measure import Prompts as Prompts
from cactus_theory.tuning.measure import measure_costs as measure_costs
from cactus_theory.tuning.report import save_tuned
from cactus_theory.tuning.tune import tune

__all__ = ["Costs", "save_tuned", "tune"]
