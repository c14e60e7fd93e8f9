"""Run one simulation: ``python -m simulations COMMAND …``."""

import argparse
import importlib
import sys

from cactus_theory.base.terminal import REPORTED, ends_quietly, importing, interrupted, one_line

with importing("python -m simulations"):
    from cactus_theory.base.arguments import refuse_empty
    from cactus_theory.base.files import check_writable
    from cactus_theory.base.help_pages import add_commands
    from cactus_theory.base.specs import blamed

# group: name: what it does in a line, flags of a small run, and its module
GROUPS = {
    "Decode": {
        "demo": ("the main job: log, solve, audit, decode, tabulate, draw",
                 "--policy speculative --policy band:price=1 --num-prompts 2 "
                 "--max-new-tokens 16 --num-draft-tokens 3 --repeats 1 "
                 "--out build/example/demo", "demo"),
        "answers": ("policies on whole answers: sums and ratios by prompt, scores; resumes",
                    "--num-prompts 3 --answers 2 --max-new-tokens 4 --batch 3 "
                    "--out build/example/answers", "answers"),
        "throughput": ("policies and baselines end to end; resumes",
                       "--policy speculative --policy band:price=1 --num-prompts 2 "
                       "--max-new-tokens 16 --batch 1 --num-draft-tokens 3 --repeats 2 --metered 1 "
                       "--out build/example/throughput", "throughput"),
    },
    "Measure": {
        "price-travels": ("knobs that spend given nats, law by law; nats spent elsewhere; resumes",
                          "--num-prompts 8 --batch 8 --max-new-tokens 8 --nats 0.05 "
                          "--laws speculative --policy band:price --elsewhere tempered "
                          "--out build/example/price-travels", "price_travels"),
        "greedy": ("rules of greedy decoding at equal regret, along strict texts; resumes",
                   "--num-prompts 3 --max-new-tokens 12 --num-draft-tokens 2 3 "
                   "--out build/example/greedy", "greedy"),
        "references": ("every rule along answers that people wrote, exact in its laws; resumes",
                       "--num-answers 4 --policy band:price=1 --policy band:price=1,tilt=0.08 "
                       "--out build/example/references", "references"),
    },
    "Reproduce": {
        "all": ("every committed CSV again; --quick takes minutes",
                "--quick --only overspend --out build/example/all", "all_tables"),
        "table": ("one table of a figure or a page (CSV)",
                  "overspend --points 21 --out build/example/overspend.csv", "figures.command"),
        "bench": ("time the closed forms against named alternatives",
                  "verify --repeats 1 --out build/example/bench.csv", "bench"),
        "train-pair": ("train and ship the target/draft pair; resumes",
                       "--corpus simulations/common --held-out 0.5 --target-layers 1 "
                       "--steps 2 --draft-steps 2 --distil-steps 2 --overlap-steps 2 "
                       "--pool-chunks 1 --pool-rows 4 --batch-size 4 --length 32 "
                       "--overlap-rows 4 "
                       "--work-dir build/example/train-pair --out build/example/train-pair/out",
                       "train.pair"),
        "train-head": ("train an EAGLE-3 head for a target; resumes",
                       "--target simulations/pair/target --corpus simulations/common "
                       "--held-out 0.5 --pieces 2 --piece-texts 8 --answer-tokens 16 "
                       "--draft-vocab 300 --places 2 "
                       "--first-steps 2 --steps 2 --overlap-steps 2 --batch-size 4 "
                       "--work-dir build/example/train-head --out build/example/train-head/head",
                       "train.head"),
        "smollm": ("make the folder of a published chat model (93 MB)",
                   "--out build/smollm2-135m-instruct", "smollm"),
        "gpu-check": ("try a CUDA machine in five minutes: laws, verification, decodes (CSV)",
                      "verify --device cpu --out build/example/gpu_check", "gpu_check.command"),
    },
}  # fmt: skip
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

# flags that name a file or folder that is written
WRITTEN = ("out", "work", "work_dir")

# commands with threads of their own; the others have one, but for --threads
OWN_THREADS = ("throughput", "train-pair", "train-head", "gpu-check")

# of a command whose summary says that it resumes, and of others that keep something
GOES_ON = "what is finished is kept: the same command goes on from there"
MADE_AGAIN = {
    "all": "tables that are finished are kept in --out; --only makes the others",
    "gpu-check": "rows that are finished are in its tables",
}


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    add_commands(parser, GROUPS, _declare, "COMMAND")
    chosen = arguments[0] if arguments else ""
    try:
        args = parser.parse_args(arguments)
        refuse_empty(arguments)
        if chosen not in OWN_THREADS:
            threads = getattr(args, "threads", None)
            _set_threads(threads if isinstance(threads, int) else 1)
        for name in WRITTEN:
            path = getattr(args, name, None)
            check_writable(f"--{name.replace('_', '-')}", path, folders=True)
        return args.run(args)
    except KeyboardInterrupt as error:
        summary, *_ = COMMANDS.get(chosen, ("",))
        kept = GOES_ON if summary.endswith("resumes") else MADE_AGAIN.get(chosen)
        return interrupted(f"{parser.prog} {chosen}", str(error) or kept)
    except (Exception, SystemExit) as error:
        if (said := blamed(error)) is None and not isinstance(error, REPORTED):
            raise
        print(f"{parser.prog} {chosen}: {one_line(said or error)}", file=sys.stderr)
        return 2


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    loaded = importlib.import_module(f"simulations.{COMMANDS[name][-1]}")
    parser.description = loaded.__doc__
    loaded.add_arguments(parser)
    parser.set_defaults(run=loaded.run, declare=loaded.add_arguments)


def _set_threads(count: int) -> None:
    import torch  # no flag and no help needs it

    from cactus_theory.base import arguments as check

    torch.set_num_threads(check.threads(count))


if __name__ == "__main__":
    sys.exit(main())
