"""What the pages say was measured is what the committed CSV say."""

import re
from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.figures.page_tables import PAGES, ROOT, filled

DATA = ROOT / "paper_figures" / "data"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_files_say(name: str):
    assert (ROOT / name).read_text(encoding="utf-8") == filled(ROOT, name)


def test_every_table_links_to_the_file_that_has_its_command():
    for name in PAGES:
        origins = re.findall(r"^\*\*.+?\*\* \((.*)\)$", filled(ROOT, name), flags=re.M)
        assert len(origins) >= len(PAGES[name])
        for origin in origins:
            files = re.findall(r"\[command\]\((\S+)\)", origin)
            assert files and "torch 2" in origin and re.search(r"\d{4}-\d\d-\d\d", origin)
            for file in files:
                text = (ROOT / name).parent.joinpath(file).read_text(encoding="utf-8")
                assert re.search(r"^(# command|  \"command\"): ", text, flags=re.M)


def block(table: str, inside: str) -> str:
    return f"<!-- measured {table}".rstrip() + f" -->\n{inside}<!-- /measured -->\nbetween\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, tables in PAGES.items():
        page = tmp_path / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("".join(block(table, "old\n") for table in tables), encoding="utf-8")
    return tmp_path


def test_the_command_replaces_the_tables_and_nothing_else(root: Path):
    for _ in range(2):
        assert main(["table", "measured", "--root", str(root)]) == 0
        for name, tables in PAGES.items():
            made = "".join(block(table, make(DATA)) for table, make in tables.items())
            assert (root / name).read_text(encoding="utf-8") == made


@pytest.mark.parametrize("wrong", ["", "twice", "another"])
def test_pages_without_their_tables_are_left_alone(root: Path, capsys, wrong: str):
    last = root / list(PAGES)[-1]
    text = last.read_text(encoding="utf-8")
    first = block(next(iter(PAGES[list(PAGES)[-1]])), "old\n")
    last.write_text(
        {"": "none", "twice": text + first, "another": text + block("another", "")}[wrong],
        encoding="utf-8",
    )
    before = {name: (root / name).read_text(encoding="utf-8") for name in PAGES}
    assert main(["table", "measured", "--root", str(root)]) == 2
    assert f"{list(PAGES)[-1]} must hold" in capsys.readouterr().err
    assert {name: (root / name).read_text(encoding="utf-8") for name in PAGES} == before
