"""Every block of the pages runs as printed; links lead somewhere, flags exist.

In a page ``python`` blocks share one namespace and print their comments that begin a line, ``sh``
blocks run line by line, and a ``text`` block right after one says what it prints: ``…`` stands for
lines that are left out, numbers are compared as numbers. Other ``text`` blocks stand in NOT_RUN.
"""

import io
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from cactus_theory.cli import main as cactus_theory
from paper_figures.__main__ import main as figures
from simulations.__main__ import main as simulations
from solvers.__main__ import main as solvers
from tests.amounts import THOROUGH
from tests.test_docs import REGISTRIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path.relative_to(ROOT).as_posix()
         for pattern in ("*.md", "cactus_theory/*.md", "paper_figures/**/*.md",
                         "simulations/**/*.md")
         for path in sorted(ROOT.glob(pattern))]  # fmt: skip
GUIDES = ("CHOOSE", "DECODE", "CHECK", "MEASURE", "TRAIN")
RUN = ("README.md", *(f"cactus_theory/{name}.md" for name in (*GUIDES, "SERVING", "TRACES")),
       *(page for page in PAGES if page.startswith("paper_figures")))  # fmt: skip
PROGRAMS: dict[tuple[str, ...], Callable[[list[str]], int]] = {
    ("cactus-theory",): cactus_theory,
    ("python", "-m", "solvers"): solvers,
    ("python", "-m", "cactus_theory.solvers"): solvers,
    ("python", "-m", "simulations"): simulations,
    ("python", "-m", "paper_figures"): figures,
}
# what a text block of RUN begins with that nothing runs, and why
NOT_RUN = {
    "make smollm": "fetches a model",
    "@software": "BibTeX",
    "from speculators": "run by make speculators-test",
    "python -m simulations train-head": "trains for hours",
    "python -m simulations throughput --target smollm2": "needs the model",
    "cactus-theory trace --target smollm2": "needs the model",
    "make demo": "sets a virtual environment up",
    "pip install vllm": "installs vLLM and starts its server",
    "CACTUS_POLICY=": "starts vLLM's server",
    "curl localhost": "asks a server of vLLM",
    "vllm bench serve": "times a server of vLLM",
}
# commands that take more than a few seconds begin so: they run in the thorough suite
SLOW: tuple[str, ...] = ("cactus-theory tune --trace",)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    language: str
    code: str
    output: str | None  # of the text block right after it


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; a text block that is another's output comes with it."""
    found = list(re.finditer(r"^```(\w*)\n(.*?)^```$", page, flags=re.S | re.M))
    taken = False
    for block, after in pairwise([*found, None]):
        assert block is not None
        if taken:
            taken = False
            continue
        between = "" if after is None else page[block.end() : after.start()]
        taken = after is not None and after[1] == "text" and not between.strip()
        taken = taken and block[1] in ("sh", "python")
        yield Block(block[1], block[2], after[2] if taken and after else None)


def commands(code: str) -> Iterator[tuple[list[str], int]]:
    """Yield the words of each command of a block, and the exit code that its comment says."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        (status,) = re.findall(r"# exits (\d)", line) or [0]
        if words:
            yield words, int(status)


def run(words: list[str]) -> int:
    """Run one command in this process."""
    for program, main in PROGRAMS.items():
        if tuple(words[: len(program)]) == program:
            return main(words[len(program) :])
    raise AssertionError(f"not a program: {shlex.join(words)}")


def alike(printed: str, said: str) -> bool:
    """Say whether two lines have the same words and, up to rounding, the same numbers."""
    one, other = printed.split(), said.split()
    if other[-1] == "…":
        one, other = one[: len(other) - 1], other[:-1]
    one, other = " ".join(one), " ".join(other)
    if NUMBER.sub("0", one) != NUMBER.sub("0", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 1e-3 * abs(float(b)) + 1e-9 for a, b in pairs)


def holds(printed: str, said: str) -> bool:
    """Say whether the output is what a page says; a line ``…`` stands for any lines."""
    lines = [line for line in printed.splitlines() if line.strip()]
    parts = [part.splitlines() for part in re.split(r"^…$", said, flags=re.M)]
    place = 0
    for number, part in enumerate(parts):
        part = [line for line in part if line.strip()]
        ends = [
            start + len(part)
            for start in range(place, len(lines) - len(part) + 1)
            if all(map(alike, lines[start:], part))
            and (number or not start)
            and (number + 1 < len(parts) or not part or start + len(part) == len(lines))
        ]
        if not ends:
            return False
        place = ends[0]
    return True


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder that has what pages read of a checkout, and forget what is registered."""
    for folder in ("simulations", "paper_figures", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # tables fit the terminal that a run happens to have
    for registry in REGISTRIES:
        patch.dict(registry).start()
    yield tmp_path
    patch.stopall()


@pytest.mark.parametrize("name", RUN)
def test_every_block_runs_as_printed(name: str, scratch: Path, capfd) -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        said = block.output
        if block.language == "sh":
            asked = list(commands(block.code))
            if not THOROUGH and any(shlex.join(words).startswith(SLOW) for words, _ in asked):
                continue
            assert [run(words) for words, _ in asked] == [status for _, status in asked]
        elif block.language == "python":
            exec(compile(block.code, name, "exec"), space)
            if file := re.match(r"# (\w+\.py)\n", block.code):  # which commands below read
                (scratch / file[1]).write_text(block.code, encoding="utf-8")
            if said is None:
                said = "\n".join(re.findall(r"^# (.*)", block.code, flags=re.M))
                said = said if "print(" in block.code else "…"
        else:
            assert block.code.startswith(tuple(NOT_RUN)), block.code
            continue
        printed, error = capfd.readouterr()
        assert said is None or holds(printed, said), f"{printed}\n--- instead of\n{said}"
        assert "Traceback" not in error


def test_another_number_or_line_is_seen() -> None:
    printed = "mean  0.1526 ±0.0452\ngap   1.1e-16\nseconds 3\n"
    assert holds(printed, "mean 0.1526 ±0.0452\ngap 0\n…") and holds(printed, "…\nseconds 3")
    assert holds(printed, "mean 0.1526 …\n…")
    wrong = "mean 0.1530 ±0.0452\n…", "mean 0.1526 ±0.0452", "…\ngap 0", "gap 0\n…", "…\nrow\n…"
    for said in wrong:
        assert not holds(printed, said), said


def test_a_text_block_is_the_output_of_what_stands_right_before_it() -> None:
    page = "```sh\na\n```\n\n```text\nb\n```\n\nwords\n\n```text\nc\n```\n"
    assert list(blocks(page)) == [("sh", "a\n", "b\n"), ("text", "c\n", None)]
    assert list(commands("a \\\n  b  # exits 1\n# c\n")) == [(["a", "b"], 1)]


@cache
def known_flags(program: tuple[str, ...], *words: str) -> set[str]:
    """Return the flags in the help of a command; none where there is no such command."""
    depth = 2 if words[0] in ("table", "bench", "gpu-check") else 1
    text = io.StringIO()
    with pytest.raises(SystemExit), redirect_stdout(text), redirect_stderr(io.StringIO()):
        PROGRAMS[program]([*words[:depth], "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", text.getvalue()))


def unknown_flags(page: str) -> list[str]:
    """Return the flags that the commands of a page, in blocks or in lines, do not have.

    Commands "of commit N" are passed over; of ``verify|theory`` the first is looked at.
    """
    found = []
    spans = re.findall(
        r"`([^`]+)`(?!\s+of\s+commit)", re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    )
    lines = [line for block in blocks(page) for line in block.code.replace("\\\n", " ").split("\n")]
    for line in (*lines, *(" ".join(span.split()) for span in spans)):
        words = re.sub(r"  #.*|\|\w+", "", line).split()
        for program in (one for one in PROGRAMS if tuple(words[: len(one)]) == one):
            command = [*takewhile(lambda word: word[0] not in "-…", words[len(program) :])]
            asked = {word.split("=")[0] for word in words if word.startswith("--")}
            if command and asked:
                missing = asked - known_flags(program, *command[:2])
                found += [f"{line}: {flag}" for flag in sorted(missing)]
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_of_a_command_exists(name: str) -> None:
    assert unknown_flags((ROOT / name).read_text(encoding="utf-8")) == []


def test_a_flag_that_is_not_there_is_seen() -> None:
    assert unknown_flags("`cactus-theory solve rows.npz --delta 1 --delta-of 2`") == [
        "cactus-theory solve rows.npz --delta 1 --delta-of 2: --delta-of"
    ]


@pytest.mark.parametrize("name", PAGES)
def test_code_is_at_most_80_columns_wide(name: str) -> None:
    """The site cuts longer lines off behind a scroll bar; formulas are drawn, not cut."""
    found = blocks((ROOT / name).read_text(encoding="utf-8"))
    code = [f"{block.code}\n{block.output}" for block in found if block.language != "math"]
    assert [line for text in code for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", PAGES)
def test_decimals_have_a_digit_before_the_point(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    bare = re.findall(r"(?<![\w.)\]}:%*])\.\d+(?![\w.]).{0,20}", re.sub(r"`[^`]*`", "", page))
    assert not bare, bare
