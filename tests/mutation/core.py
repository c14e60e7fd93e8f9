"""The tests that every mistake is shown to; together they take at most 45 s."""

# files, and single tests of larger files
CORE = (
    "tests/decoding/models/test_cached.py",
    "tests/decoding/test_greedy.py::test_equals_plain_greedy[",
    "tests/decoding/models/test_linear.py::test_other_weights_keep_their_precision",
    "tests/decoding/test_ragged.py::test_seven_rows_equal_each_alone",
    "tests/optimum/test_ends.py",
    "tests/optimum/test_newton.py",
    "tests/optimum/test_promises.py::test_ordinary_rows",
    "tests/optimum/test_promises.py::test_delta_price_and_acceptance",
    "tests/optimum/test_promises.py::test_price_is_what",
    "tests/optimum/test_two_ways.py::test_a_target_truncated",
    "tests/test_divergences.py",
    "tests/test_emitted.py::test_audit",
    "tests/test_emitted.py::test_fast_law_equals_enumeration_on_rough_rows",
    "tests/test_emitted.py::test_terms_added_singly_or_sorted",
    "tests/policies/test_rules.py",
    "tests/testing/test_registry_laws.py",
    "tests/verify/test_chain.py::test_rows_of_different_lengths",
    "tests/verify/test_chain.py::test_one_generator_per_row",
    "tests/verify/test_chain.py::test_extreme_coins",
)
