"""What the README says was measured is what the committed CSV say."""

from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.figures.measured import BEGIN, END, ROOT, tables

DATA = ROOT / "paper_figures" / "data"


def test_the_readme_says_what_the_files_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n{tables(DATA)}"


def test_the_command_replaces_the_block_and_nothing_else(tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert main(["measured", "--readme", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{tables(DATA)}{END}\nafter\n"
    assert main(["measured", "--readme", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count(BEGIN) == 1


@pytest.mark.parametrize("text", ["none", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_a_page_without_the_markers_is_left_alone(tmp_path: Path, capsys, text: str):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert main(["measured", "--readme", str(page)]) == 2
    assert "--readme: must hold" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == text
