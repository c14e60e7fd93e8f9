"""Run one simulation: ``python -m simulations NAME …``."""

import argparse
import importlib
import os
import sys

from cactus_theory.base.arguments import refuse_empty
from cactus_theory.base.terminal import ends_quietly, interrupted, one_line

# name: module, and what it does in a line
COMMANDS = {
    "train-pair": ("train_pair.command", "train and ship the target/draft pair"),
    "demo": ("demo", "the main job: log, solve, audit, decode, tabulate, draw"),
    "throughput": ("throughput.command", "policies and baselines end to end; resumes"),
    "trace": ("trace", "log all rows of a pair along real texts; resumes"),
    "replay": ("replay", "policies and verifiers on a trace, without its models"),
    "tune-check": ("tune_check", "the tuner's choice against its whole grid, measured"),
    "table": ("figures.command", "one table of a figure or a page (CSV); some resume"),
    "sweep": ("sweep.command", "a grid on one machine or a cluster; resumes after any kill"),
    "rules": ("rules", "what engines' lossy rules cost, what the bands do for that (CSV)"),
    "answers": ("answers", "lengths of Markov texts under lossy policies, exactly (CSV)"),
    "block-gap": ("block_gap", "policies against the best verification of a path, exactly"),
    "bench": ("bench", "time the closed forms against named alternatives"),
    "all": ("all_tables", "every committed CSV again; --quick takes minutes"),
    "kernels": ("gpu_check.kernels", "compile every kernel for a GPU that need not be here (CSV)"),
    "gpu-check": ("gpu_check.command", "time a CUDA machine: a verification, decodes (CSV)"),
}

# commands with threads of their own; the others have one, but for --threads and --inflate
OWN_THREADS = ("train-pair", "kernels", "gpu-check")

# what a command that was stopped by Ctrl-C has kept
RESUMED = (
    *("train-pair", "throughput", "trace", "tune-check", "sweep"),
    *("table drafters", "table ledger"),
)
GOES_ON = "what is finished is kept: the same command goes on from there"
MADE_AGAIN = {
    "all": "tables that are finished are kept in --out; --only makes the others",
    "gpu-check": "parts that are finished are in its tables",
}


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    chosen = arguments[0] if arguments else ""
    try:
        for name, (module, summary) in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            if chosen == name:  # import one simulation only: each has its own needs
                loaded = importlib.import_module(f"simulations.{module}")
                loaded.add_arguments(command)
                command.set_defaults(run=loaded.run, declare=loaded.add_arguments)
        args = parser.parse_args(arguments)
        refuse_empty(arguments)
        if chosen not in OWN_THREADS:
            threads = getattr(args, "threads", None)
            usual = 1 if getattr(args, "inflate", None) is None else os.cpu_count() or 1
            _set_threads(threads if isinstance(threads, int) else usual)
        code = args.run(args)
        if "cost" in args:
            print(f"speeds and costs: {args.cost}")
        return code
    except KeyboardInterrupt as error:
        named = {chosen, " ".join(arguments[:2])}
        kept = GOES_ON if named & {*RESUMED} else MADE_AGAIN.get(chosen)
        return interrupted(f"{parser.prog} {chosen}", str(error) or kept)
    except (ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError) as error:
        print(f"{parser.prog} {chosen}: {one_line(error)}", file=sys.stderr)
        return 2


def _set_threads(count: int) -> None:
    import torch  # no flag and no help needs it

    from cactus_theory.base import arguments as check

    torch.set_num_threads(check.threads(count))


if __name__ == "__main__":
    sys.exit(main())
