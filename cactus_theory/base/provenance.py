"""Provenance of a result, to be written beside it: command, day, versions and kind of machine."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch


def provenance(command: str) -> dict[str, str]:
    """Return the provenance of a result: command, UTC day, versions, kind of machine.

    Holds no host name, user or path beyond what ``command`` says.
    """
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": machine_kind(),
    }


def machine_kind() -> str:
    """Return cores, processor and torch threads, such as ``2-core AMD EPYC, 1 thread``."""
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"{os.cpu_count()}-core {_processor()}, {threads} thread{plural}"


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
