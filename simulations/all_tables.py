"""Recompute every committed CSV by the command in its head, into --out.

This takes hours. --quick makes the same columns from fewer rows, to test that every command works.
If a command fails, this is printed, and the other commands still run; their output is in OUT/made.
Some commands resume from files in --out, so name another folder to begin anew. Numbers of a GPU
are made by gpu-check. A CSV whose head names a commit was made by the command at that commit.
--shared has the folders models/ and prompts/.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .common.inputs import DATA, ROOT
from .common.results import read_csv, write_bytes


@dataclass(frozen=True)
class Entry:
    """A command, with the flags that are not in the head of its CSV; for braces see ``command``."""

    tables: str  # names of the command's tables; ``name=other`` if the command writes ``other``
    quick: str = ""  # flags of a small run
    out: str = "--out {made}"
    inputs: str = ""  # paths of input files, of which the head has only the last parts

    @property
    def names(self) -> dict[str, str]:
        """Return committed name → name that the command gives to the table, in order."""
        pairs = (word.partition("=") for word in self.tables.split())
        return {name: other or name for name, _, other in pairs}

    @property
    def needs_shared(self) -> bool:
        return "{shared}" in self.inputs

    def command(self, quick: bool, made: Path, shared: Path) -> list[str]:
        """Return the words of the command.

        ``made`` is the folder of this entry's output, ``{csv}`` the first table's file there, and
        ``shared`` the folder with further models and prompts.
        """
        name, other = next(iter(self.names.items()))
        places = {"root": ROOT, "shared": shared, "made": made, "csv": made / f"{other}.csv"}
        files = {Path(path).name: path for path in self.inputs.split()}
        head = read_csv(DATA / f"{name}.csv")[1]["command"].split()[3:]
        last = " ".join([*(files.get(word, word) for word in head), self.out])
        words = f"{last} {self.quick}" if quick else last
        return [word.format(**places) for word in words.split()]


CSV = "--out {csv}"
FEW_LAWS = "--num-prompts 4 --batch 4 --max-new-tokens 8 --nats 0.05 --policy band:price"
FEW_RULES = "--num-answers 2 --max-new-tokens 8 --policy band:price=1"
SOLVED = "{shared}/prompts/gsm8k_test.jsonl {shared}/prompts/humaneval.jsonl"
FEW_TEXTS = "--num-prompts 2 --max-new-tokens 8"
MODELS = "{shared}/models/stories260K {shared}/models/stories-xs-281K"
PAIR = "{root}/simulations/pair"
SMOLLM = "{root}/build/smollm2-135m-instruct"
HEAD = f"{SMOLLM} {{root}}/simulations/smollm_head"
FACTS = f"{HEAD} {{root}}/simulations/data/facts.jsonl"

# a new CSV needs an entry here; a test compares the entries with paper_figures/data
ENTRIES = (
    Entry("overspend", "--points 21", CSV),
    Entry("acceptance_kl", "--tokens-each 2", CSV),
    Entry("price_travels same_nats", FEW_LAWS),
    Entry("price_travels_stories=price_travels same_nats_stories=same_nats", FEW_LAWS,
          inputs=f"{MODELS} {{root}}/simulations/data/endings.jsonl"),
    Entry("price_travels_smollm2_4bit=price_travels same_nats_smollm2_4bit=same_nats",
          f"{FEW_LAWS} --elsewhere tempered", inputs=f"{SMOLLM} {{shared}}/prompts/mt_bench.jsonl"),
    Entry("price_travels_smollm2_skip3=price_travels", FEW_LAWS,
          inputs=f"{SMOLLM} {{shared}}/prompts/mt_bench.jsonl"),
    Entry("answers answers_by_prompt=by_prompt", FEW_TEXTS,
          inputs=f"{HEAD} {{shared}}/prompts/mt_bench_gsm8k.jsonl"),
    Entry("answers_facts=answers answers_facts_by_prompt=by_prompt", FEW_TEXTS,
          inputs=FACTS),
    Entry("answers_ifeval=answers answers_ifeval_by_prompt=by_prompt", FEW_TEXTS,
          inputs=f"{HEAD} {{shared}}/prompts/ifeval.jsonl"),
    Entry("references", FEW_RULES,
          inputs=f"{HEAD} {SOLVED}"),
    Entry("references_ngram=references", FEW_RULES, inputs=f"{SMOLLM} {SOLVED}"),
    Entry("facts=references", FEW_RULES, inputs=FACTS),
    Entry("greedy", FEW_TEXTS, inputs=f"{HEAD} {{shared}}/prompts/mt_bench.jsonl"),
    Entry("greedy_facts=answers", FEW_TEXTS, inputs=FACTS),
    Entry("greedy_ifeval=answers greedy_ifeval_by_prompt=by_prompt", FEW_TEXTS,
          inputs=f"{HEAD} {{shared}}/prompts/ifeval.jsonl"),
    Entry("greedy_ifeval_chain=answers greedy_ifeval_chain_by_prompt=by_prompt", FEW_TEXTS,
          inputs=f"{HEAD} {{shared}}/prompts/ifeval.jsonl"),
    Entry("greedy_ngram=greedy", FEW_TEXTS, inputs=f"{SMOLLM} {{shared}}/prompts/mt_bench.jsonl"),
    Entry("policies band_row equal_nats",
          "--num-prompts 2 --max-new-tokens 16 --num-draft-tokens 3 --repeats 1"),
    Entry("bench_theory", "--repeats 1", CSV),
    Entry("bench_verify", "--repeats 1", CSV),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="small settings: minutes, not hours")
    add("--only", nargs="+", metavar="NAME", help="tables, by name without .csv")
    add("--shared", type=Path, default=ROOT / "shared", help="where models/ and prompts/ are")
    add("--out", type=Path, default=Path("build/all"))


def run(args: argparse.Namespace) -> int:
    tables = {name for entry in ENTRIES for name in entry.names}
    if unknown := sorted(set(args.only or ()) - tables):
        raise ValueError(f"--only: must be among {', '.join(sorted(tables))}; got {unknown}")
    failed = 0
    for entry in ENTRIES:
        if args.only and not set(entry.names) & set(args.only):
            continue
        start = time.monotonic()
        try:
            state = recompute(entry, args)
        except RuntimeError as error:
            failed, state = 1, f"failed: {error}"
        print(f"{' '.join(entry.names)}: {state} ({time.monotonic() - start:.1f} s)", flush=True)
    return failed


def recompute(entry: Entry, args: argparse.Namespace) -> str:
    """Run an entry's command, copy its tables to ``args.out``, and return the outcome in words.

    Raises RuntimeError if the command fails, or if a table is missing or has other columns.
    """
    if entry.needs_shared and not (args.shared / "models").is_dir():
        return f"left out, needs models in {args.shared} (--shared)"
    if SMOLLM in entry.inputs and not Path(SMOLLM.format(root=ROOT)).is_dir():
        return "left out, needs make smollm"
    mode, name = "quick" if args.quick else "full", next(iter(entry.names))
    made = args.out.resolve() / "made" / mode / name
    made.mkdir(parents=True, exist_ok=True)
    words = entry.command(args.quick, made, args.shared.resolve())
    with (made / "printed.txt").open("a+", encoding="utf-8", errors="replace") as log:
        command = [sys.executable, "-m", "simulations", *words]
        if code := subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            log.seek(0)
            raise RuntimeError(f"status {code}, {log.read().strip().rpartition(chr(10))[2]}")
    for name, other in entry.names.items():
        if not (made / f"{other}.csv").is_file():
            raise RuntimeError(f"no table {name} was made")
        if columns(made / f"{other}.csv") != columns(DATA / f"{name}.csv"):
            raise RuntimeError(f"{name} has other columns than the committed table")
        write_bytes(args.out / f"{name}.csv", (made / f"{other}.csv").read_bytes())
    return "done"


def columns(path: Path) -> list[str]:
    return list(read_csv(path)[0][0])
