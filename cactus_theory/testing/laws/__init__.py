"""The properties of policies, one function each; its docstring is its statement.

``LAWS`` maps names to properties in the order in which they are checked. A property of your
own is a function under ``@law()``: see :func:`cactus_theory.testing.policy_property`.

Examples
--------
>>> laws.LAWS["budget_holds"].applies(ct.policy("band:price=1"))
False
>>> laws.LAWS["budget_holds"].applies(ct.policy("band:delta=0.1"))
True
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
from cactus_theory.testing.laws.relied_on import (
    keeps_what_lossless_keeps,
    reads_only_drafted_entries,
    recovers_alike,
)
from cactus_theory.testing.laws._behaviour import Behaviour
from cactus_theory.testing.laws._ladder import at_knob, knob_ladder, other_knobs
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
    "keeps_what_lossless_keeps",
    "knob_ladder",
    "law",
    "names_of_tokens_do_not_matter",
    "never_slower_than_speculative",
    "no_token_without_target_mass",
    "nothing_accepts_more",
    "other_knobs",
    "reads_only_drafted_entries",
    "recovers_alike",
    "recovery_is_a_distribution",
    "stays_between",
    "strict_point_is_lossless",
]
