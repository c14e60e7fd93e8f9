import re

import pytest

from simulations.reference import command
from simulations.reference.command import markdown
from tests.amounts import thorough
from tests.test_docs import PACKAGES, PUBLIC

DOCSTRING = """Return one.

With :math:`h = a
q` split, \\\\( b \\\\) and

$$c$$

Parameters
----------
one, _two : (...), what they mean,
    and how.
**others : ``x : y``.

A line that ends the list.

Raises
------
ValueError
    Never.

Examples
--------
>>> a : int = 1
"""


def tagged(tex: str, display: str) -> str:
    return f"<{display} {tex}>"


def test_entries_keep_what_their_names_mean() -> None:
    page = markdown(DOCSTRING, tagged)
    assert "- **one, \\_two**: (...), what they mean, and how.\n" in page
    assert "- **\\*\\*others**: ``x : y``.\n\nA line that ends the list.\n" in page
    assert "**Raises**\n\n- **ValueError**: Never.\n" in page
    assert "**Examples**\n\n>>> a : int = 1\n" in page


def test_formulas_are_converted_wherever_they_stand() -> None:
    page = markdown(DOCSTRING, tagged)
    assert re.findall("<(inline|block) (.*?)>", page) == [
        ("inline", "h = a q"), ("inline", "b"), ("block", "c"),
    ]  # fmt: skip


def test_every_package_has_a_page() -> None:
    assert {f"cactus_theory{name}" for name in PACKAGES} <= set(command.PACKAGES)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    for name in command.NEEDED:
        pytest.importorskip(name)
    from simulations.__main__ import main

    out = tmp_path_factory.mktemp("docs")
    assert main(["reference", "--out", str(out)]) == 0
    return {
        path.relative_to(out).with_suffix("").as_posix(): path.read_text("utf-8")
        for path in out.rglob("*.html")
    }


@thorough
def test_every_public_name_is_on_its_page(pages) -> None:
    for name, (package, _) in PUBLIC.items():
        own = name.rpartition(".")[2]
        page = package.__name__.replace(".", "/")
        assert f'id="{own}"' in pages[page] or f"{page}/{own}" in pages, name


@thorough
def test_pages_load_nothing_and_leave_no_formula_or_private_module(pages) -> None:
    for name, page in pages.items():
        assert not re.search(r"<(script|link|img)[^>]*(src|href)=.https?:", page), name
        assert not re.search(r"\$\$|:math:|<m\w+>[^<]*\\", page), name
        assert "/_" not in name
