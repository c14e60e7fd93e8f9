"""Run a function of the device's memory again and again: as a CUDA graph, or as it is.

Only what is here differs between a GPU and a CPU.
"""

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
# runs before a capture: libraries choose kernels and take workspace at the first ones
WARM_UP = 2


def captures(device: torch.device) -> bool:
    """Return whether rounds run as CUDA graphs there."""
    return device.type == "cuda"


class Repeated(Generic[Result]):
    """``compute(end)``, captured once for every ``end``.

    ``compute`` reads and writes tensors at fixed addresses, never waits for the device, and may
    run any number of times on the same inputs. Its result is overwritten by the next call.
    """

    def __init__(self, compute: Callable[[int], Result], device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.captured: dict[int, tuple[Any, Result]] = {}
        self.pool: Any = None

    def prepare(self, end: int) -> bool:
        """Capture the computation for ``end`` unless that was done; return whether it was now."""
        if not captures(self.device) or end in self.captured:
            return False
        self.captured[end] = self._capture(end)
        return True

    def __call__(self, end: int) -> Result:
        """Return the result for the inputs that are in memory now."""
        if not captures(self.device):
            return self.compute(end)
        self.prepare(end)
        graph, result = self.captured[end]
        graph.replay()
        return result

    def _capture(self, end: int) -> tuple[Any, Result]:
        """Return a graph that shares the memory of the ones before, and where its result lies."""
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self.compute(end)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.compute(end)
        self.pool = graph.pool()
        return graph, result


def never_waits(job: Callable[[], Any], device: torch.device) -> bool:
    """Return whether a job on a CUDA device runs without waiting for it; True elsewhere."""
    if not captures(device):
        return True
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            job()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return True
