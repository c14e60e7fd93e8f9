"""The laws a rule must obey, one function each; a law's docstring is its statement.

``LAWS`` maps names to laws in the order in which they are checked.
"""

from cactus_theory.testing.laws.always import (  # noqa: I001  the order of LAWS
    acceptance_is_a_probability,
    answers,
    batch_equals_loop,
    certain_drafts,
    emitted_law_sums_to_one,
    impossible_tokens_do_not_matter,
    names_of_tokens_do_not_matter,
    recovery_is_a_distribution,
)
from cactus_theory.testing.laws.verifier import (
    chains_follow_the_rule,
    coins_decide_as_declared,
    frequencies_follow_the_law,
)
from cactus_theory.testing.laws.declared import (
    acceptance_follows_the_knob,
    budget_holds,
    float32_agrees,
    never_slower_than_speculative,
    no_token_without_target_mass,
    nothing_accepts_more,
    stays_between,
    strict_point_is_lossless,
)
from cactus_theory.testing.laws._behaviour import Behaviour, at_knob, knob_ladder
from cactus_theory.testing.laws._law import LAWS, Bounds, Law, law

__all__ = [
    "LAWS",
    "Behaviour",
    "Bounds",
    "Law",
    "acceptance_follows_the_knob",
    "acceptance_is_a_probability",
    "answers",
    "at_knob",
    "batch_equals_loop",
    "budget_holds",
    "certain_drafts",
    "chains_follow_the_rule",
    "coins_decide_as_declared",
    "emitted_law_sums_to_one",
    "float32_agrees",
    "frequencies_follow_the_law",
    "impossible_tokens_do_not_matter",
    "knob_ladder",
    "law",
    "names_of_tokens_do_not_matter",
    "never_slower_than_speculative",
    "no_token_without_target_mass",
    "nothing_accepts_more",
    "recovery_is_a_distribution",
    "stays_between",
    "strict_point_is_lossless",
]
