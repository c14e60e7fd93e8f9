"""Choose policy, knob, verifier and K for a divergence per token, by a model of their speed."""

from cactus_theory.tuning.choices import Choice, Tuned
from cactus_theory.tuning.costs import Costs, plain_speed, speed
from cactus_theory.tuning.families import Family, Knobs, families
from cactus_theory.tuning.measure import Prompts, Setting, measure_costs
from cactus_theory.tuning.report import notes, payload, save_tuned, sentence, table
from cactus_theory.tuning.tune import tune

__all__ = [
    "Choice",
    "Costs",
    "Family",
    "Knobs",
    "Prompts",
    "Setting",
    "Tuned",
    "families",
    "measure_costs",
    "notes",
    "payload",
    "plain_speed",
    "save_tuned",
    "sentence",
    "speed",
    "table",
    "tune",
]
