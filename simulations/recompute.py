"""Recompute every committed CSV by its own command, into --out; --list shows the commands.

--quick takes small settings: the same columns from fewer rows, to see that every command works.
Nothing in paper_figures is touched. A command that fails is told, and the others go on. Each
command's output is in OUT/logs, the seconds it took in OUT/seconds.csv; commands that resume
take up what is in OUT/made, so name another folder to begin anew. Numbers of a GPU are made by
gpu-check.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base.files import FolderLock
from cactus_theory.base.tables import text_table
from cactus_theory.base.terminal import Progress

from .common.inputs import DATA, ROOT
from .common.results import publish, read_csv, write_bytes


@dataclass(frozen=True)
class Entry:
    """A command, or several in turn, and the tables they make."""

    # names in paper_figures/data without the suffix; ``name=other`` if the command calls it so
    tables: str
    full: str  # commands, separated by ``;``
    quick: str
    took: str = ""  # how long the full one took, and where; empty if nobody has measured it

    @property
    def names(self) -> dict[str, str]:
        """Return committed name → name that the command gives it, in order."""
        pairs = (word.partition("=") for word in self.tables.split())
        return {name: other or name for name, _, other in pairs}

    @property
    def name(self) -> str:
        """Return the name of its first table."""
        return next(iter(self.names))

    @property
    def needs_shared(self) -> bool:
        """Return whether it reads models that are not part of the checkout."""
        return "{shared}" in self.full

    def commands(self, quick: bool, **places: str) -> Iterator[list[str]]:
        """Yield the words of each command, with ``places`` for what stands in braces."""
        for line in (self.quick if quick else self.full).split(";"):
            yield [word.format(**places) for word in line.split()]


_STORIES = "--target {shared}/models/stories260K --draft {shared}/models/stories-xs-281K"
_CHAT = f"{_STORIES} --prompts {{shared}}/prompts/mt_bench.jsonl"
_TALES = f"{_STORIES} --prompts {{root}}/simulations/data/stories.jsonl"
_LONG = "--num-draft-tokens 16 --max-new-tokens 128"
_SPEED = (
    "throughput --out {made}/run --publish {made} --policies speculative "
    "tempered:temperature=0.9 truncated:top_p=0.95 mixture:alpha=0.5 typical "
    "cactus:delta=0.0001 cactus:delta=0.0003 cactus:delta=0.001 cactus:delta=0.002 "
    "cactus:delta=0.005 cactus:delta=0.01 cactus:delta=0.03 cactus:delta=0.1 cactus:delta=1 "
    "band:price=8 band:price=4 band:price=3 band:price=2 band:price=1.5 band:price=1 "
    "band:price=0.7 band:price=0.5 band:price=0.35 band:delta=0.05 "
    "--baselines plain hf_plain hf_assisted --repeats 6 --metered 2"
)
_FEW = "--num-prompts 2 --max-new-tokens 32 --batch 1 --num-draft-tokens 3 --repeats 2 --metered 1"
_SPEED_QUICK = (
    "throughput --out {made}/run --publish {made} --policies speculative cactus:delta=0.0003 "
    f"cactus:delta=0.1 band:price=8 band:price=0.5 --baselines plain hf_plain hf_assisted {_FEW}"
)
_PATHS = (
    "throughput --out {made}/run --publish {made} --policies band:price=1.5 soft_band:price=1.5 "
    "band:price=0.9 soft_band:price=0.9 band:price=0.6 soft_band:price=0.6 --verifier chain block "
    "--baselines plain --compare soft_band:price@block band:price --seed 7"
)
_TUNED = "tune-check --out {made}/run --publish {csv}"
_RULES = "--work {made}/run --out {csv}"
_RULES_QUICK = (
    "--cycles 6 --ahead 2 --max-new-tokens 8 --num-draft-tokens 3 --greedy-prompts 2 " + _RULES
)
_LEVELS = "--levels 0.003 0.01 0.03 0.06 0.1 0.15"
_TREES = "--vocab 3 --num-draft-tokens 4 --seed 1 2 3 --distance 1.5"
_KNOBS = " ".join([
    "--policy speculative",
    *(f"{band}:price={p}" for p in (6, 3, 1.8, 1.2, 0.8, 0.5) for band in ("band", "soft_band")),
    *(f"cactus:delta={delta}" for delta in (0.0003, 0.002, 0.01, 0.03, 0.1, 0.3)),
])  # fmt: skip
_TEXTS = " ".join([
    "--vocab 3 --distance 2.5 --seed 1 --policy speculative",
    *(f"{band}:price={p}" for band in ("band", "soft_band") for p in (8, 4, 2, 1.4, 1, 0.7, 0.5)),
    *(f"cactus:delta={delta}" for delta in (0.0003, 0.002, 0.01, 0.03, 0.1, 0.3)),
    *(f"mixture:alpha={alpha}" for alpha in (0.1, 0.25, 0.5, 0.8)),
])  # fmt: skip

# Which command makes which committed CSV, with full and with small settings; a test compares them
# with paper_figures/data. A new CSV is one more line. What braces stand for:
#   {csv}     the file of the entry's (first) table
#   {made}    a folder of the entry's own, in which {csv} lies
#   {root}    the checkout
#   {shared}  a folder with other models and prompts (--shared); entries that name it are left
#             out where it is missing
ENTRIES = (
    Entry("overspend", "table overspend --out {csv}",
          "table overspend --points 21 --out {csv}", took="2 s"),
    Entry("acceptance_kl", "table frontier --out {csv}",
          "table frontier --tokens-each 2 --out {csv}", took="40 s"),
    Entry("design_example", "table design-example --out {csv}",
          "table design-example --points 3 --num-prompts 2 --out {csv}", took="22 s"),
    Entry("constant_price", "table constant-price --out {csv}",
          "table constant-price --decodes 1 --max-new-tokens 8 --out {csv}", took="5 min"),
    Entry("policies band_row", "demo --out {made}/demo --publish {made}",
          "demo --num-prompts 2 --max-new-tokens 16 --num-draft-tokens 3 --repeats 1 "
          "--out {made}/demo --publish {made}", took="74 s"),
    Entry("throughput throughput_equal_kl", _SPEED, _SPEED_QUICK, took="16 min"),
    Entry("throughput_blocks=throughput throughput_blocks_equal_kl=throughput_equal_kl",
          f"{_PATHS} --num-draft-tokens 8 --batch 1 --repeats 8", f"{_PATHS} {_FEW}",
          took="3 min"),
    Entry("blocks",
          f"trace {_LONG} --cycles 1500 --out {{made}}/pair16; "
          f"table blocks {{made}}/pair16 --out {{made}}",
          "table blocks {root}/simulations/data/trace --num-draft-tokens 2 "
          "--levels 0.06 --out {made}", took="5 min"),
    Entry("blocks_stories=blocks",
          f"trace {_TALES} {_LONG} --cycles 1500 --eos-token-ids 1 --out {{made}}/stories16; "
          "table blocks {made}/stories16 --num-draft-tokens 4 8 "
          "--out {made}",
          f"trace {_TALES} --num-draft-tokens 4 --max-new-tokens 16 --cycles 60 "
          "--out {made}/stories; "
          "table blocks {made}/stories --num-draft-tokens 2 --levels 0.06 --out {made}",
          took="2 min"),
    *(Entry(f"blocks_{kind}=blocks",
            f"trace --drafter {kind} --cycles 1300 --out {{made}}/{kind}; "
            f"table blocks {{made}}/{kind} {_LEVELS} --num-draft-tokens 8 --out {{made}}",
            f"trace --drafter {kind} --cycles 20 --max-new-tokens 32 --num-draft-tokens 4 "
            f"--out {{made}}/{kind}; "
            f"table blocks {{made}}/{kind} --num-draft-tokens 4 --levels 0.01 --out {{made}}",
            took=took)
      for kind, took in (("greedy", "45 s"), ("ngram", "21 s"))),
    Entry("rules", f"rules {_RULES}", f"rules {_RULES_QUICK}", took="82 s of one core"),
    Entry("rules_stories", f"rules {_TALES} --eos-token-ids 1 {_RULES}",
          f"rules {_TALES} --eos-token-ids 1 {_RULES_QUICK}", took="53 s of one core"),
    Entry("trees_walk", "trees --parts walk --out {made}", "trees --parts walk --out {made}",
          took="12 s"),
    Entry("trees_left", "trees --parts left --temperature 1 0.5 --out {made}",
          "trees --parts left --num-prompts 2 --max-new-tokens 4 --temperature 1 --out {made}",
          took="40 s of one core"),
    *(Entry(f"trees{end}{first} trees{end}_passes{second}{more}",
            f"trees {inputs} --out {{made}}",
            f"trees {inputs} --num-prompts 2 --max-new-tokens 12 --num-draft-tokens 4 2 "
            "--siblings 2 --path-lengths 8 --prices 4 0.5 --temperature 1 --out {made}",
            took="10 and 3 min of a busy core")
      for end, first, second, more, inputs in (
          ("", "", "", " trees_ideas", "--parts shapes ideas"),
          ("_stories", "=trees", "=trees_passes", "", f"{_TALES} --num-prompts 8 --parts shapes"))),
    Entry("block_gap", f"block-gap {_TREES} {_KNOBS} --out {{csv}}",
          "block-gap --vocab 2 --num-draft-tokens 2 --policy speculative band:price=1 --out {csv}",
          took="6 s"),
    Entry("sequence_kl", f"markov {_TEXTS} --length 8 --num-draft-tokens 3 --out {{csv}}",
          f"markov {_TEXTS} --length 4 --num-draft-tokens 2 --out {{csv}}", took="3 s"),
    Entry("solver_error", "table solver-error --out {csv}",
          "table solver-error --vocab 10 100 --seeds 0 --out {csv}", took="28 s"),
    Entry("ledger ledger_answers", "table ledger --repeats 2 --work {made}/run --out {made}",
          "table ledger --cap 0.05 --price 1 --max-new-tokens 16 --repeats 1 --work {made}/run "
          "--out {made}", took="80 s"),
    Entry("tune", _TUNED,
          f"{_TUNED} --kl-per-token 0.05 --batch 1 --num-draft-tokens 2 4 --policies band:price "
          "--cycles 60 --max-new-tokens 16 --num-prompts 2 --repeats 1", took="98 min"),
    Entry("drafters",
          "train-pair --drafter recurrent --distil-steps 1300 --overlap-steps 700 --pool-chunks 6 "
          "--pool-share 0.5 --draft-rate 0.003 --head-layers 1 --head-width 192 "
          "--work-dir {made}/work --out {made}/one-layer; "
          "table drafters --drafters {root}/simulations/pair/draft {root}/simulations/pair/block "
          "{root}/simulations/pair/recurrent {made}/one-layer ngram --num-prompts 16 "
          "--num-draft-tokens 2 3 4 6 --policies speculative "
          "band:price=1.5 band:price=0.8 --max-new-tokens 64 --repeats 1 --out {made}",
          "table drafters --num-prompts 2 --max-new-tokens 8 --num-draft-tokens 3 --repeats 1 "
          "--out {made}"),
    Entry("bench_theory", "bench theory --out {csv}",
          "bench theory --repeats 1 --programs 1 --out {csv}", took="21 s"),
    Entry("bench_verify", "bench verify --out {csv}", "bench verify --repeats 1 --out {csv}",
          took="17 s"),
    Entry("bench_decode", "bench decode --out {csv}", "bench decode --repeats 1 --out {csv}",
          took="100 s"),
    Entry("bench_decode_stories", f"bench decode {_CHAT} --out {{csv}}",
          f"bench decode {_CHAT} --repeats 1 --out {{csv}}", took="56 s"),
)  # fmt: skip


# what comes of an entry
DONE, LEFT_OUT, FAILED = "done", "left out", "failed"
# what is known of the times in entries.py
TIMES = (
    "(times: one run of each full command, 2026-11-22; the tables made then name a 2-core Intel "
    "Xeon.\nOf overspend and design_example, whose tables are older, the machine is unknown)"
)
# of a machine with other work to do, the second says more
CLOCKS = ("seconds", "processor_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add("--quick", action="store_true", help="small settings: minutes, not an hour")
    add("--list", action="store_true", help="print the commands and run none")
    add("--only", nargs="+", metavar="NAME", help="tables, by name without .csv")
    add("--shared", type=Path, default=ROOT / "shared", metavar="DIR",
        help="where models/stories260K, models/stories-xs-281K and prompts/ are")  # fmt: skip
    add("--out", type=Path, default=Path("build/all"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Run the commands one after the other; return 1 if any failed."""
    entries = _entries(args.only)
    if args.list:
        print(listed(entries, args.quick))
        return 0
    rows: list[dict[str, Any]] = []
    with FolderLock(args.out), Progress("recomputing", len(entries)) as progress:
        for entry in entries:
            progress.update(len(rows), entry.name)
            start = np.array(_clocks())
            state, note = recompute(entry, args)
            seconds = dict(zip(CLOCKS, (_clocks() - start).tolist(), strict=True))
            rows.append({"name": entry.name} | seconds | {"state": state, "note": note})
            progress.update(len(rows), entry.name)
    publish(args, rows, args.out / "seconds.csv")
    print(_table(rows))
    print(f"tables in {args.out}")
    return 1 if any(row["state"] == FAILED for row in rows) else 0


def recompute(entry: Entry, args: argparse.Namespace) -> tuple[str, str]:
    """Run an entry's commands and put its tables under ``args.out``; return state and a note."""
    if entry.needs_shared and not (args.shared / "models").is_dir():
        return LEFT_OUT, f"needs models in {args.shared} (--shared)"
    folder = (args.out / "made" / ("quick" if args.quick else "full") / entry.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    csv = folder / f"{entry.names[entry.name]}.csv"
    places = {"made": folder, "csv": csv, "root": ROOT, "shared": args.shared.resolve()}
    log = args.out / "logs" / f"{entry.name}.txt"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    for words in entry.commands(args.quick, **{name: str(path) for name, path in places.items()}):
        if code := _run(words, log):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return FAILED, f"status {code}: {lines[-1]}"
    return _collect(entry, folder, args.out)


def listed(entries: Sequence[Entry], quick: bool) -> str:
    """Return each entry's tables, how long it took, and its commands."""
    lines = [] if quick else [TIMES]
    for entry in entries:
        took = "" if quick else f"  ({entry.took or 'not measured'})"
        needs = "  [not in a clone: needs --shared DIR with other models]" * entry.needs_shared
        lines.append(f"{' '.join(entry.names)}{took}{needs}")
        for words in entry.commands(quick, csv="OUT.csv", made="OUT", root=".", shared="shared"):
            lines.append(f"    python -m simulations {' '.join(words)}")
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    total = {"name": "all", "state": "", "note": ""}
    total |= {clock: sum(row[clock] for row in rows) for clock in CLOCKS}
    heads = ("method", "", "seconds", "of a\nprocessor", "policy")
    cells = [
        [row["name"], row["state"], *(f"{row[clock]:.1f}" for clock in CLOCKS), row["note"]]
        for row in [*rows, total]
    ]
    return text_table(heads, cells)


def _clocks() -> tuple[float, float]:
    """Return the wall clock, and the processor seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), used.ru_utime + used.ru_stime


def _entries(names: Sequence[str] | None) -> list[Entry]:
    tables = {name for entry in ENTRIES for name in entry.names}
    if unknown := set(names or ()) - tables:
        raise ValueError(
            f"--only: must be among {', '.join(sorted(tables))}; got {', '.join(sorted(unknown))}"
        )
    return [entry for entry in ENTRIES if names is None or set(entry.names) & set(names)]


def _run(words: Sequence[str], log: Path) -> int:
    """Run a command with its output in ``log``; return its status."""
    with log.open("a", encoding="utf-8") as file:
        print(f"$ python -m simulations {' '.join(words)}", file=file, flush=True)
        command = [sys.executable, "-m", "simulations", *words]
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode


def _collect(entry: Entry, folder: Path, out: Path) -> tuple[str, str]:
    """Copy the tables that were made; say where their columns are not the committed ones."""
    notes = []
    for name, other in entry.names.items():
        if not (folder / f"{other}.csv").is_file():
            return FAILED, f"{name}: no such table was made"
        write_bytes(out / f"{name}.csv", (folder / f"{other}.csv").read_bytes())
        if _columns(out / f"{name}.csv") != _columns(DATA / f"{name}.csv"):
            notes.append(f"{name}: columns are not those of the committed table")
    return DONE, "; ".join(notes)


def _columns(path: Path) -> list[str]:
    return list(read_csv(path)[0][0])
