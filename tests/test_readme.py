"""The README's example prints what it says; pages name files, places and policies that exist."""

import re
import shlex
from pathlib import Path

import pytest

from cactus_theory.cli import main as cactus_theory
from solvers.__main__ import main as solvers

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [path for pattern in ("*.md", "cactus_theory/**/*.md", "paper_figures/*.md",
                         "simulations/**/*.md")
         for path in sorted(ROOT.glob(pattern))]  # fmt: skip


def test_the_example_prints_its_comments(capsys) -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.S)[0]
    promised = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == promised


def test_what_researchers_paste_runs_in_an_empty_folder(tmp_path, monkeypatch) -> None:
    for module in ("cvxpy", "matplotlib"):
        pytest.importorskip(module)
    section = README.split("## For researchers")[1].split("\n## ")[0]
    (pasted,) = re.findall(r"```\n(.*?)```", section, flags=re.S)
    head, code, commands = re.split(r"<<'END'\n|\nEND\n", pasted)
    assert head == "python - "
    assert len(code.splitlines()) <= 4
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "cactus-theory":
            assert cactus_theory(words[1:]) == 0
        else:
            assert words[:3] == ["python", "-m", "cactus_theory.solvers"]
            assert solvers(words[3:]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"rows.npz", "row.png", "t.csv"}


@pytest.fixture(params=PAGES, ids=lambda path: path.name)
def page(request) -> Path:
    return request.param


def test_every_make_target_it_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    prose, blocks = (page.read_text(encoding="utf-8").split("```")[part::2] for part in (0, 1))
    code = [*blocks, *re.findall(r"`([^`\n]+)`", "".join(prose))]
    named = {name for part in code for name in re.findall(r"^make ([a-z-]+)", part, flags=re.M)}
    assert named <= targets


def test_every_file_and_heading_it_links_to_exists(page: Path) -> None:
    for path, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8")):
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), path
        if heading:
            assert heading in _anchors(found), (path, heading)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", own.lower()).replace(" ", "-") for own in headings}


def test_the_guide_lists_every_rule_with_its_knobs_and_declaration() -> None:
    import cactus_theory as ct

    guide = (ROOT / "cactus_theory" / "GUIDE.md").read_text(encoding="utf-8")
    for name, entry in ct.list_policies().items():
        knobs = ", ".join(entry["knobs"]) or "–"
        assert f"| `{name}` | {knobs} | {entry['declares'].rstrip('.')} |" in guide
