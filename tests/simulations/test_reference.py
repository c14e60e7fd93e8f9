"""The site is whole: every link leads somewhere, every formula is drawn, every name is there."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytest.importorskip("mkdocs", reason="make docs installs it")
pytest.importorskip("mkdocstrings")
from simulations import reference  # noqa: E402
from simulations.markup import (
    markdown,  # noqa: E402
    with_formulas,  # noqa: E402
)
from tests.amounts import thorough  # noqa: E402
from tests.test_docs import PACKAGES, PUBLIC  # noqa: E402

DOCSTRING = """Return one, as :func:`cactus_theory.audit` does.

With :math:`h = a` split, and

.. math:: c = d,
    \\qquad e

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
>>> a
1
"""


def test_docstrings_become_markdown() -> None:
    page = markdown(DOCSTRING)
    assert page.startswith("Return one, as `audit` does.")
    assert "- **one, \\_two**: (...), what they mean, and how.\n" in page
    assert "- **\\*\\*others**: `x : y`.\n\nA line that ends the list.\n" in page
    assert "**Raises**\n\n- **ValueError**: Never.\n" in page
    assert "```pycon\n>>> a : int = 1\n>>> a\n1\n```" in page
    assert page.count("<math") == 2 and page.count('display="block"') == 1


def test_formulas_are_drawn_outside_of_code() -> None:
    page = with_formulas("$p$ costs 5$ and `$q$`\n\n```\n$h$\n```\n$$\n\\frac12\n$$\n")
    assert page.count("<math") == 2 and "<mfrac>" in page
    assert "costs 5$ and `$q$`" in page and "```\n$h$\n```" in page


def test_links_lead_to_pages_pictures_or_nowhere(tmp_path) -> None:
    said = (
        "[g](../cactus_theory/GUIDE.md#tune) [r](data/rules.csv) ![p](rules.png) [w](https://a.b)"
    )
    page = reference.linked(said, "paper_figures/RESULTS.md", tmp_path)
    assert page == "[g](guide.md#tune) r ![p](rules.png) [w](https://a.b)"
    assert (tmp_path / "rules.png").stat().st_size


def test_every_package_has_a_page() -> None:
    assert {f"cactus_theory{name}" for name in PACKAGES} <= set(reference.PACKAGES)


class Page(HTMLParser):
    """Where a page's links lead, which anchors it has, and its text outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], {""}
        self.text, self.inside = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        self.anchors |= {own["id"]} if "id" in own else set()
        if tag == "a" and "href" in own:
            self.links.append(own["href"])
        elif tag in ("img", "script", "link"):
            self.loaded.append(own.get("src") or own.get("href") or "")
        if tag in ("pre", "code", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[Path, dict[Path, Page]]:
    from simulations.__main__ import main

    out = tmp_path_factory.mktemp("docs")
    assert main(["reference", "--out", str(out)]) == 0
    pages = {path: Page(path.read_text("utf-8")) for path in out.rglob("*.html")}
    pages.pop(out / "404.html")
    return out, pages


@thorough
def test_every_link_leads_somewhere(site) -> None:
    out, pages = site
    assert len(pages) == len(reference.PAGES) + len(reference.PACKAGES)
    for path, page in pages.items():
        for link in page.links + page.loaded:
            target, anchor = urldefrag(unquote(link))
            if "://" in target or target.startswith("mailto:"):
                assert link not in page.loaded, (path, link)  # pages load nothing from elsewhere
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), (path.name, link)
            assert file not in pages or anchor in pages[file].anchors, (path.name, link)


@thorough
def test_no_formula_is_left_as_it_was_typed(site) -> None:
    for path, page in site[1].items():
        text = "".join(page.text)
        left = re.search(r"\\[a-z]+\b|\$\S[^$\n]{0,60}\$|:(math|class|func):", text)
        assert left is None, (path.name, text[max(0, left.start() - 40) : left.end() + 40])


@thorough
def test_every_public_name_is_on_its_page(site) -> None:
    out, pages = site
    names = [f"{own.__name__}.{name.rpartition('.')[2]}" for name, (own, _) in PUBLIC.items()]
    pages = {path.stem: page.anchors for path, page in pages.items()}
    assert not [own for own in names if own not in pages[own.rpartition(".")[0]]]
