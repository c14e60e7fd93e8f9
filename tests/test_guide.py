"""The page on what is trusted names only tests that exist."""

from tests.test_theory import ROOT, missing_tests

GUIDE = (ROOT / "cactus_theory" / "GUIDE.md").read_text(encoding="utf-8")


def trusted(guide: str) -> str:
    """Return the section *What is trusted*."""
    return guide.partition("\n## What is trusted\n")[2].partition("\n## ")[0]


def test_every_guarantee_has_a_test_that_exists() -> None:
    section = trusted(GUIDE)
    guarantees = section.split("\n* ")[1:]
    assert len(guarantees) >= 25
    assert all("`tests/" in item and "::test_" in item for item in guarantees)
    assert not missing_tests(section)


def test_a_missing_test_is_seen() -> None:
    assert missing_tests("`tests/test_guide.py::test_that_is_missing`")
