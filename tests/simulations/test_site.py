"""The site is whole: links lead somewhere, formulas are drawn, names are there, words are found."""

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.amounts import thorough
from tests.test_docs import PUBLIC

CONFIG = Path(__file__).resolve().parents[2] / "simulations" / "mkdocs.yml"


class Page(HTMLParser):
    """Where a page's links lead, which anchors it has, and its text outside of code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], {""}
        self.text, self.inside = [], []
        self.feed(page)

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
def site(tmp_path_factory) -> dict[Path, Page]:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", out]
    subprocess.run(command, check=True)
    pages = {path: Page(path.read_text("utf-8")) for path in out.rglob("*.html")}
    pages.pop(out / "404.html")
    return pages


@thorough
def test_every_link_leads_somewhere(site) -> None:
    for path, page in site.items():
        for link in page.links + page.loaded:
            target, anchor = urldefrag(unquote(link))
            if "://" in target or target.startswith("mailto:"):
                assert link not in page.loaded, (path, link)  # pages load nothing from elsewhere
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), (path.name, link)
            assert file not in site or anchor in site[file].anchors, (path.name, link)


@thorough
def test_no_formula_is_left_as_it_was_typed(site) -> None:
    for path, page in site.items():
        text = "".join(page.text)
        left = re.search(r"\\[a-z({}]+|\$\S[^$\n]{0,60}\$|\.\. math|:(math|class|func):", text)
        assert left is None, (path.name, text[max(0, left.start() - 40) : left.end() + 40])
        text = path.read_text("utf-8")
        boxes = re.findall(r'class="arithmatex(?: long)?"><math ', text)
        assert "style.css" in text and len(re.findall("<math ", text)) == len(boxes)


@thorough
def test_every_public_name_is_on_its_page(site) -> None:
    anchors = {path.stem: page.anchors for path, page in site.items()}
    names = [f"{own.__name__}.{name.rpartition('.')[2]}" for name, (own, _) in PUBLIC.items()]
    # an entry of its package's page, or a page: of a module, or of one that a function is named for
    shown = [name in anchors or name in anchors[name.rpartition(".")[0]] for name in names]
    assert all(shown), [name for name, there in zip(names, shown, strict=True) if not there]


@thorough
def test_its_search_finds_the_words_that_users_type(site) -> None:
    index = json.loads((Path(os.path.commonpath(site)) / "search/search_index.json").read_text())
    text = " ".join(html.unescape(re.sub("<[^>]*>", " ", entry["text"])) for entry in index["docs"])
    assert {"npz", "logprobs", "chat"} <= set(re.split(index["config"]["separator"], text))
