"""The page on what is trusted is short, and names test modules that exist and test."""

import re

from tests.test_theory import ROOT, functions_of

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def without_tests(page: str) -> set[str]:
    """Return the test modules that a page names and that hold no test."""
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    return {path for path in named if not any(map(_is_test, functions_of(path)))}


def _is_test(name: str) -> bool:
    return name.startswith("test_")


def test_every_module_it_names_has_tests() -> None:
    assert len(re.findall(r"`tests/", PAGE)) >= 7 and not without_tests(PAGE)


def test_a_module_without_tests_is_seen() -> None:
    named = {"tests/test_that_is_missing.py", "tests/amounts.py"}
    assert without_tests("`, `".join(["", *named, ""])) == named


def test_each_guarantee_is_one_item_of_a_page_of_twenty_lines() -> None:
    assert PAGE.count("\n") <= 20 and PAGE.count("\n* ") >= 8
