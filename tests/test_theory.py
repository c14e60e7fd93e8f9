"""THEORY.md names only what exists, and code names only theorems that THEORY.md has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOOK = (ROOT / "cactus_theory" / "THEORY.md").read_text(encoding="utf-8")
CODE = ("cactus_theory", "solvers", "simulations", "tests")
# "THEORY.md, Theorem 7" or "Theorems 7 and 8"; claims of other people's papers are not cited so
CITED = re.compile(r"Theorems?\s+(\d+(?:(?:, | and | to )\d+)*)")
# of what no code has to implement: their tests are all there is
OF_TESTS_ALONE = {10}


def parts(book: str) -> dict[int, str]:
    """Return the text of every theorem."""
    found = re.split(r"^## Theorem (\d+)\. .*$", book, flags=re.M)[1:]
    return {int(number): text for number, text in zip(found[::2], found[1::2], strict=True)}


def has_tests(path: str) -> bool:
    source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return any(name.startswith("test_") for name in names)


def cited(text: str) -> set[int]:
    """Return the theorems that a text names."""
    return {int(number) for group in CITED.findall(text) for number in re.findall(r"\d+", group)}


def test_theorems_are_numbered_from_one_and_complete():
    found = parts(BOOK)
    assert list(found) == list(range(1, len(found) + 1))
    for number, text in found.items():
        for word in ("Statement.", "Proof.", "Checked by:", "Seen in:", "Prior art:"):
            assert f"*{word}*" in text and "∎" in text, (number, word)
        (module,) = re.findall(r"^\*Checked by:\* `(tests/[\w/]+\.py)`\.$", text, flags=re.M)
        assert has_tests(module), (number, module)


def test_each_module_that_the_page_on_trust_names_has_tests():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert len(named) >= 7 and all(map(has_tests, named))
    assert page.count("\n* ") >= 8
    assert not has_tests("tests/test_that_is_missing.py") and not has_tests("tests/amounts.py")


def test_every_theorem_it_names_exists():
    assert "::" not in BOOK and not cited(BOOK) - set(parts(BOOK))


def test_citations_in_the_code_point_to_theorems():
    known, seen, implemented = set(parts(BOOK)), set(), set()
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "THEORY.md" in text and path != Path(__file__):
            assert cited(text) <= known, path
            seen.add(path)
            if path.relative_to(ROOT).parts[0] in ("cactus_theory", "solvers"):
                implemented |= cited(text)
    assert len(seen) > len(known)
    assert implemented >= known - OF_TESTS_ALONE


def test_formulas_survive_markdown():
    """Between single dollars, markdown eats escaped marks and takes some underscores for itself."""
    plain = re.sub(r"```math\n.*?\n```", "", BOOK, flags=re.S)
    for paragraph in re.split(r"\n\s*\n", plain):
        assert paragraph.count("$") % 2 == 0, paragraph
    for formula in re.findall(r"\$([^$]+)\$", plain):
        assert not re.search(r"\\[^A-Za-z]|(?<!\w)_|\*|\n", formula), formula
        assert formula.count("{") == formula.count("}"), formula
