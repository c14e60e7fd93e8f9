"""Time a CUDA machine: the closed forms, one verification, whole decodes in the device's loop.

``gpu_check.json`` holds everything. The tables go by the names that the figure knows: copied into
``paper_figures/data``, they are what ``make figures`` draws. Whether the machine is right is for
``pytest -m gpu`` to say. ``--device cpu --tiny`` rehearses all of it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.files import first_line

from ..common.inputs import code_digest, command_line
from ..common.results import filled, package_version, provenance, write_csv, write_json
from . import decode, forms, verify
from .timing import Bench, Job, Row, copy_bandwidth

# what is timed: decodes say what a verification took, and so come after it
PARTS = {"forms": forms.jobs, "verify": verify.jobs, "decode": decode.jobs}
# the code that is timed
SOURCE = ("cactus_theory/**/*.py", "simulations/gpu_check/*.py")
DRIVER = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without")
    add("--device", default="cuda", help="cuda (default), or cpu for a rehearsal at tiny sizes")
    add("--tiny", action="store_true", help="the smallest sizes of everything")
    add("--minutes", type=float, default=4.0, help="for each part; what does not fit is named")
    add("--out", type=Path, default=Path("gpu_check"))
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Time the parts and write the tables; return 1 if something failed."""
    for name in args.parts:
        if name not in PARTS:
            raise ValueError(f"PART: must be among {', '.join(PARTS)}; got {name!r}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was timed (--device cpu --tiny rehearses it)")
        return 0
    device = torch.device(args.device)
    tiny = args.tiny or device.type == "cpu"
    bench = Bench(device, tiny, args.seed, copy_bandwidth(device, tiny))
    origin = provenance(command_line("gpu-check", add_arguments, args)) | facts(bench)
    problems: list[str] = []
    failed = False
    for name in [name for name in PARTS if not args.parts or name in args.parts]:
        bench.tables[name] = []
        failed |= fill(bench.tables[name], PARTS[name](bench), 60 * args.minutes, problems)
        if bench.tables[name]:
            write_csv(args.out / f"gpu_{name}.csv", filled(bench.tables[name]), origin)
        content = {"provenance": origin, "tables": bench.tables, "problems": problems}
        write_json(args.out / "gpu_check.json", content)
    print(f"written to {args.out}/: gpu_check.json and a CSV a part")
    return 1 if failed else 0


def fill(rows: list[Row], jobs: Iterable[Job], seconds: float, problems: list[str]) -> bool:
    """Run jobs in order, whichever fail; name those and those that the time is too short for.

    Returns whether one failed; too little memory or time is no failure.
    """
    until, failed = time.monotonic() + seconds, False
    for name, job in jobs:
        if time.monotonic() > until:
            problems.append(f"{name}: out of time")
            continue
        try:
            done = job()
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            problems.append(f"{name}: {first_line(error)}")
            continue
        except Exception as error:  # whatever a first run on a new machine meets
            failed = True
            problems.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            print(f"failed: {problems[-1]}", flush=True)
            continue
        rows += done
        for row in done:
            print("  ".join(map(_shown, filter(None, row.values()))), flush=True)
    return failed


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def facts(bench: Bench) -> dict[str, str]:
    """Return what the machine is: names, versions, clocks; on a CPU, that it is a rehearsal."""
    about = {"device": "cpu (rehearsal)", "source": code_digest(*SOURCE)}
    if bench.device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(bench.device)
        about |= {"cuda": str(torch.version.cuda), "driver": _driver(bench.device.index or 0)}
    for package in ("triton", "transformers"):
        about[package] = package_version(package) or "not there"
    about["copy_bandwidth"] = f"{bench.bandwidth:.0f} GB/s"
    return about | ({"tiny": "yes"} if bench.tiny else {})


def _driver(index: int) -> str:
    """Return what nvidia-smi says of the driver, clocks and power limit, if it is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, f"--id={index}", f"--query-gpu={DRIVER}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() or "unknown"
