"""The properties of verifiers, one function each; its docstring is its statement.

``VERIFIER_PROPERTIES`` maps names to properties in the order in which they are checked. One of
your own is a function under ``@verifier_property()``.

Examples
--------
>>> verifiers.VERIFIER_PROPERTIES["counts_have_a_law"].statement
'On every path the probabilities of 0 … K accepted tokens are ≥ 0 and sum to 1.'
"""

from cactus_theory.testing.verifiers.exact import (  # noqa: I001  the order of checks
    alive_is_the_chance_of_passing,
    charged_rows_are_emitted,
    counts_have_a_law,
    next_token_has_the_law,
    reaches_every_node_as_often_as_possible,
    single_precision_agrees,
)
from cactus_theory.testing.verifiers.coins import (
    a_coin_at_its_value_does_not_pass,
    coins_decide_as_stated,
    draws_follow_the_stated_law,
    impossible_tokens_are_never_emitted,
)
from cactus_theory.testing.verifiers.batches import (
    a_row_alone_equals_the_batch,
    certain_drafts_are_one_hot_rows,
    each_token_has_its_own_policy,
)
from cactus_theory.testing.verifiers.frequencies import frequencies_follow_the_stated_law
from cactus_theory.testing.verifiers._assert import POLICIES, assert_verifier_properties
from cactus_theory.testing.verifiers._enumeration import Enumeration
from cactus_theory.testing.verifiers._property import (
    VERIFIER_PROPERTIES,
    VerifierProperty,
    verifier_property,
)
from cactus_theory.testing.verifiers._trees import Trees, trees

__all__ = [
    "POLICIES",
    "VERIFIER_PROPERTIES",
    "Enumeration",
    "Trees",
    "VerifierProperty",
    "a_coin_at_its_value_does_not_pass",
    "a_row_alone_equals_the_batch",
    "alive_is_the_chance_of_passing",
    "assert_verifier_properties",
    "certain_drafts_are_one_hot_rows",
    "charged_rows_are_emitted",
    "coins_decide_as_stated",
    "counts_have_a_law",
    "draws_follow_the_stated_law",
    "each_token_has_its_own_policy",
    "frequencies_follow_the_stated_law",
    "impossible_tokens_are_never_emitted",
    "next_token_has_the_law",
    "reaches_every_node_as_often_as_possible",
    "single_precision_agrees",
    "trees",
    "verifier_property",
]
