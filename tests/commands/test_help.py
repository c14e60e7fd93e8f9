"""``--help`` of the four programs: few commands, in groups; every page has an example that runs."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cactus_theory.cli
import paper_figures.__main__
import simulations.__main__
import solvers.__main__
from cactus_theory.commands import COMMANDS
from simulations.common.inputs import ROOT
from simulations.figures import page_tables
from simulations.figures.command import TABLES
from solvers import _commands
from tests.amounts import THOROUGH

MOST = 29
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "cactus-theory": cactus_theory.cli.main,
    "python -m solvers": solvers.__main__.main,
    "python -m simulations": simulations.__main__.main,
    "python -m paper_figures": paper_figures.__main__.main,
}
GROUPS = {
    "cactus-theory": COMMANDS,
    "python -m solvers": {"Solve": _commands.COMMANDS},
    "python -m simulations": simulations.__main__.GROUPS,
    "python -m simulations table": {"Tables": TABLES},
}
PAGES = list(PROGRAMS)
for program, own in GROUPS.items():
    PAGES += [f"{program} {name}" for group in own.values() for name in group]
# examples of less than two seconds; make test-thorough runs the others, too
QUICK = {
    *(
        f"cactus-theory {name}"
        for name in ("solve", "audit", "compare", "generate", "trace", "expect", "promise")
    ),
    *(f"python -m solvers {name}" for name in ("optimal", "design", "block", "decode")),
    *(f"python -m simulations table {name}" for name in ("overspend", "measured")),
    "python -m paper_figures",
}
# an example that installs packages: make smollm-test runs it
INSTALLS = "python -m simulations smollm"
# what the example of ``check`` finds is a broken property
STATUS = {"cactus-theory check": 1}


def program_of(page: str) -> tuple[Callable[[list[str]], int], list[str]]:
    """Return the ``main`` of a command's program, and the words that follow."""
    program = next(program for program in PROGRAMS if f"{page} ".startswith(f"{program} "))
    return PROGRAMS[program], shlex.split(page.removeprefix(program))


def help_of(page: str, capsys: pytest.CaptureFixture[str]) -> str:
    main, words = program_of(page)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder that has what examples read: copies of what one of them writes."""
    (tmp_path / "simulations").symlink_to(ROOT / "simulations")
    for page in (*page_tables.PAGES, "paper_figures/data/price_travels.csv"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_bytes((ROOT / page).read_bytes())
    monkeypatch.chdir(tmp_path)
    yield


def test_there_are_at_most_29_commands() -> None:
    """Tables, benchmarks and parts of ``gpu-check`` are arguments, as figures are."""
    programs = [own for program, own in GROUPS.items() if program in PROGRAMS]
    names = [name for own in programs for group in own.values() for name in group]
    assert len(names) + 1 <= MOST  # and paper_figures
    assert {kind for own in programs for kind in own} == {"Solve", "Decode", "Measure", "Reproduce"}


@pytest.mark.parametrize("program", GROUPS)
def test_commands_stand_in_groups(program: str, capsys) -> None:
    said = help_of(program, capsys)
    for group, commands in GROUPS[program].items():
        lines = said.partition(f"\n{group}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in lines] == list(commands)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_ends_with_an_example(page: str, width: int, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    before, _, command = help_of(page, capsys).partition("\nexample:\n  ")
    assert before and command.replace(" \\\n", "").startswith(page)
    assert all(len(line) <= 80 for line in command.splitlines())


# a page with commands shows the example of the first
@pytest.mark.parametrize("page", [page for page in PAGES if page not in {*GROUPS, INSTALLS}])
def test_its_example_runs(page: str, checkout: None, capsys) -> None:
    if not (THOROUGH or page in QUICK):
        pytest.skip("seconds; run by make test-thorough")
    command = help_of(page, capsys).partition("\nexample:\n  ")[2]
    main, words = program_of(command.replace("\\\n", " "))
    assert main(words) == STATUS.get(page, 0), capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *"solve audit compare check trace generate".split()])
def test_help_is_printed_before_torch_is_imported(command: str) -> None:
    """``import torch`` takes two seconds of a processor, ``--help`` a tenth of one."""
    code = (
        "import sys\nfrom cactus_theory.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "heavy = {'torch', 'numpy', 'numba'} & {*sys.modules}\n"
        "print(*heavy, file=sys.stderr, end='')"
    )
    words = [sys.executable, "-c", code, *command.split(), "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


def test_help_lists_what_the_package_registers() -> None:
    """In a process of its own, as tests register more."""
    code = (
        "from cactus_theory.base import names\n"
        "from cactus_theory.divergences import list_divergences\n"
        "from cactus_theory.policies.registry import POLICIES\n"
        "from cactus_theory.verify.contract import verifiers\n"
        "assert names.POLICIES == POLICIES.names(), POLICIES.names()\n"
        "assert names.DIVERGENCES == list_divergences(), list_divergences()\n"
        "assert names.VERIFIERS == verifiers(), verifiers()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
