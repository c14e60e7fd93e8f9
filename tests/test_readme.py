"""The README's example prints what the README says, and its commands exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_its_comments(capsys) -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.S)[0]
    promised = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == promised


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) - {"and"} <= targets


def test_every_file_it_shows_exists() -> None:
    for path in re.findall(r"\]\(([^)]+\.(?:png|csv|md))\)", README):
        assert (ROOT / path).is_file(), path


def test_it_lists_every_rule_with_its_knobs_and_declaration() -> None:
    import cactus_theory as ct

    for name, entry in ct.list_policies().items():
        knobs = ", ".join(entry["knobs"]) or "–"
        assert f"| `{name}` | {knobs} | {entry['declares'].rstrip('.')} |" in README
