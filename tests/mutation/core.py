"""The tests that every mistake is shown to; together they take at most 45 s."""

# files, and single tests of larger files
CORE = (
    "tests/decoding/models/test_cached.py",
    "tests/decoding/models/test_linear.py::test_other_weights_keep_their_precision",
    "tests/decoding/models/test_trees.py",
    "tests/decoding/test_greedy.py::test_equals_plain_greedy[",
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
    "tests/verify/test_chain.py::test_extreme_coins",
    "tests/verify/test_contract.py",
    "tests/verify/test_draw.py",
)


def files(changed: str = "") -> list[str]:
    """Return the files of the core tests, those beside a changed file of the package first."""
    own = sorted({entry.split("::")[0] for entry in CORE})
    stem = changed.rsplit("/", 1)[-1].removesuffix(".py").strip("_").split("_")[0]

    def far(name: str) -> tuple[bool, bool]:
        folder = "tests/" + changed.rsplit("/", 1)[0] + "/"
        return not (stem and f"test_{stem}" in name), not name.startswith(folder)

    return sorted(own, key=far)
