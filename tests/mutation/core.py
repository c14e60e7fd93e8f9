"""The tests that every mistake is shown to; together they take at most 45 s."""

# files, and single tests of larger files
CORE = (
    "tests/decoding/models/test_cached.py",
    "tests/decoding/models/test_linear.py::test_other_weights_keep_their_precision",
    "tests/decoding/models/test_trees.py",
    "tests/decoding/test_greedy.py::test_equals_plain_greedy[",
    "tests/decoding/test_ragged.py::test_rows_may_have_policies",
    "tests/decoding/test_ragged.py::test_seven_rows_equal_each_alone",
    "tests/decoding/test_schedule.py",
    "tests/decoding/test_statistics.py::test_the_meter_adds",
    "tests/decoding/test_statistics.py::test_the_meter_equals",
    "tests/decoding/test_statistics.py::test_the_recorded_rows",
    "tests/optimum/test_decide.py",
    "tests/optimum/test_ends.py",
    "tests/optimum/test_newton.py",
    "tests/optimum/test_promises.py::test_ordinary_rows",
    "tests/optimum/test_promises.py::test_delta_price_and_acceptance",
    "tests/optimum/test_promises.py::test_price_is_what",
    "tests/optimum/test_two_ways.py::test_a_target_truncated",
    "tests/policies/test_rules.py",
    "tests/test_divergences.py",
    "tests/test_emitted.py::test_audit",
    "tests/test_emitted.py::test_fast_law_equals_enumeration_on_rough_rows",
    "tests/test_emitted.py::test_terms_added_singly_or_sorted",
    "tests/testing/test_registry_laws.py",
    "tests/verify/test_chain.py::test_rows_of_different_lengths",
    "tests/verify/test_chain.py::test_one_generator_per_row",
    "tests/verify/test_chain.py::test_a_certain_draft",
    "tests/verify/test_chain.py::test_extreme_coins",
    "tests/verify/test_contract.py",
    "tests/verify/test_draw.py",
)

# what is shown to a mistake first, by where it was made: most are noticed there
FIRST = {
    "verify/": ("verify/test_contract", "verify/test_draw", "verify/test_chain"),
    "policies/": ("policies/test_rules", "verify/test_contract", "test_emitted"),
    "optimum/decide": ("optimum/test_decide",),
    "optimum/": ("optimum/test_newton", "optimum/test_ends", "optimum/test_two_ways"),
    "divergences/": ("test_divergences", "optimum/test_ends"),
    "emitted": ("test_emitted",),
    "decoding/models/": ("decoding/models/test_trees", "decoding/models/test_cached"),
    "decoding/": ("decoding/test_schedule", "decoding/test_statistics"),
}


def files(changed: str = "") -> list[str]:
    """Return the files of the core tests, those about a changed file of the package first."""
    start = next((start for start in FIRST if changed.startswith(start)), None)
    first = [f"tests/{name}.py" for name in FIRST.get(start or "", ())]
    return first + sorted({entry.split("::")[0] for entry in CORE} - set(first))
