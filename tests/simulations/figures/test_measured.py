"""What the pages say was measured is what the committed CSV say."""

from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.figures.measured import BEGIN, END, PAGES, ROOT

DATA = ROOT / "paper_figures" / "data"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_files_say(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n{PAGES[name](DATA)}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in PAGES:
        page = tmp_path / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    return tmp_path


def test_the_command_replaces_the_blocks_and_nothing_else(root: Path):
    for _ in range(2):
        assert main(["table", "measured", "--root", str(root)]) == 0
        for name, make in PAGES.items():
            made = f"before\n{BEGIN}\n{make(DATA)}{END}\nafter\n"
            assert (root / name).read_text(encoding="utf-8") == made


@pytest.mark.parametrize("text", ["none", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_pages_without_the_markers_are_left_alone(root: Path, capsys, text: str):
    before = {name: (root / name).read_text(encoding="utf-8") for name in PAGES}
    last = list(PAGES)[-1]
    before[last] = text
    (root / last).write_text(text, encoding="utf-8")
    assert main(["table", "measured", "--root", str(root)]) == 2
    assert f"{Path(last).name} must hold" in capsys.readouterr().err
    assert {name: (root / name).read_text(encoding="utf-8") for name in PAGES} == before
