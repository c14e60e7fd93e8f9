"""Choose policy, knob, verifier and K for a divergence per token, by a model of their speed."""

from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.measure import Prompts, measure_costs
from cactus_theory.tuning.report import save_tuned, sentence
from cactus_theory.tuning.tune import tune

__all__ = ["Costs", "Prompts", "measure_costs", "save_tuned", "sentence", "tune"]
