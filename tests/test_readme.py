"""Pages name make targets, files, headings and policies that exist."""

import json
import re
from pathlib import Path

import pytest

from cactus_theory.answer_bounds import most_variation
from cactus_theory.cli import main
from simulations.common.results import read_csv

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cactus_theory", "solvers", "simulations", "paper_figures", "tests")
PAGES = [path for pattern in ("*.md", "cactus_theory/**/*.md", "paper_figures/**/*.md",
                         "simulations/**/*.md")
         for path in sorted(ROOT.glob(pattern))]  # fmt: skip


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


def test_every_path_under_a_folder_of_the_checkout_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)`", page.read_text(encoding="utf-8"))
    assert not [path for path in named if not any(map(Path.exists, _places(path)))]


def _places(path: str) -> list[Path]:
    return [ROOT / path, ROOT / f"{path}.py"]


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", own.lower()).replace(" ", "-") for own in headings}


def test_a_page_lists_every_policy_with_its_knobs_and_declaration() -> None:
    import cactus_theory as ct

    page = (ROOT / "cactus_theory" / "CHOOSE.md").read_text(encoding="utf-8")
    for name, entry in ct.list_policies().items():
        knobs = ", ".join(entry["knobs"]) or "–"
        assert f"| `{name}` | {knobs} | {entry['declares'].rstrip('.')} |" in page


def test_what_a_nat_buys_and_costs_is_what_was_measured_and_proven() -> None:
    page = (ROOT / "cactus_theory" / "CHOOSE.md").read_text(encoding="utf-8")
    data = ROOT / "paper_figures" / "data"
    calls = {(float(row["level"]), row["family"]): float(row["tokens_per_call"])
             for row in read_csv(data / "price_travels_smollm2_4bit.csv")[0]
             if row["law"] == "speculative"}  # fmt: skip
    elsewhere, _ = read_csv(data / "same_nats_smollm2_4bit.csv")
    colder_at = {float(row["level"]): float(row["knob"]) for row in elsewhere
                 if row["spent"] == "tempered"}  # fmt: skip
    for nats in (0.02, 0.05, 0.1):
        band, lenience, cactus = (
            calls[nats, name] / calls[0, "speculative"]
            for name in ("band:price", "lenience:lenience", "cactus:delta")
        )
        right, of_64 = (
            f"{0.5 + 0.5 * most_variation(own):.1%}".replace("%", " %") for own in (nats, 64 * nats)
        )
        colder = colder_at[nats]
        line = (
            rf"\| {nats} \| {band:.2f} \| {lenience:.2f} \| {cactus:.2f} \| {colder:.3f} "
            rf"\| {right} \| {of_64} \| {64 * nats:.3g} nats"
        )
        assert re.search(line, page), line


@pytest.mark.parametrize("nats", [0.01, 0.1, 1])
def test_the_intervals_of_events_are_those_of_the_command(nats: float, capsys) -> None:
    assert (
        main(["promise", "--cap", f"{nats}", "--rate", *"0.01 0.5 0.9 0.99".split(), "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    page = (ROOT / "cactus_theory" / "CHOOSE.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {nats:g} \| (0 to .*) points \|$", page, flags=re.M)
    *intervals, points = (cell.removesuffix(" %") for cell in line.split(" | "))
    ends = [end for cell in intervals for end in cell.split(" to ")]
    known = [event[end] for event in said["events"] for end in ("low", "high")]
    known.append(said["total_variation"])
    for printed, value in zip([*ends, points], known, strict=True):
        digits = len(printed.partition(".")[2])
        assert float(printed) == round(100 * value, digits), (printed, value)
