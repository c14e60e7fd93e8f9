"""Run the jobs of an experiment on the Dask cluster that ``--workers`` or ``--scheduler`` names."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    text = "processes of this machine, one thread each (this process alone)"
    group.add_argument("--workers", type=int, metavar="N", help=f"{text}; needs the extra cluster")
    text = "its workers need this checkout, and the models under the same names"
    group.add_argument("--scheduler", metavar="ADDRESS", help=f"Dask cluster to run on; {text}")


@contextmanager
def opened_client(args: argparse.Namespace) -> Iterator[Any]:
    """Yield a client of the cluster that flags name, None where they name none.

    Raises ValueError where Dask is not installed or no scheduler answers.
    """
    if args.workers is None and args.scheduler is None:
        yield None
        return
    try:
        from distributed import Client, LocalCluster  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            "--workers, --scheduler: dask is needed: pip install 'cactus-theory[cluster]'"
        ) from error
    if args.workers is not None:
        local = {"n_workers": args.workers, "threads_per_worker": 1, "dashboard_address": None}
        with LocalCluster(**local) as cluster, Client(cluster) as client:
            yield client
        return
    try:
        client = Client(args.scheduler)
    except (OSError, ValueError) as error:
        raise ValueError(f"--scheduler: no scheduler at {args.scheduler!r}: {error}") from error
    with client:
        yield client
