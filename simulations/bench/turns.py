"""Time the laws of rows and steps in two checkouts, each in a process that lives on, in turns.

``--before`` is another checkout of this project: a job is timed there and here in pairs, whose
ratios do not drift with the machine. Rows are dense float32 ones.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
# of a small model, of SmolLM2 and of Qwen 3
VOCABULARIES = (2_048, 49_152, 151_936)
BATCH, WIDTH, LAWS = 8, 5, 40
CHAINS = (
    "band:price=1", "speculative", "cactus:delta=0.1", "lenience:lenience=0.5",
    "mixture:alpha=0.5", "typical", "fuzzy:threshold=0.5",
)  # fmt: skip
BLOCKS = ("band:price=1", "cactus:delta=0.1", "speculative")
METERED = ("band:price=1", "band:delta=0.1", "cactus:delta=0.1", "lenience:lenience=0.5")
SOFTMAX = "softmax of the target rows"
# batches of fresh rows that a job goes through
FRESH = 3
HEADS = {
    "job": "job", "vocabulary": "V", "before": "ms\nbefore", "milliseconds": "ms",
    "ratio": "new/old", "low": "90 %\nfrom", "high": "to", "softmaxes": "softmaxes",
}  # fmt: skip


def measure(repeats: int, before: Path) -> Iterator[dict[str, Any]]:
    """Yield a dictionary per job: median milliseconds, their median ratio and its 90 % interval."""
    workers = [_worker(root) for root in (before, ROOT)]
    softmax = 1.0
    for vocab, name in ((each, name) for each in VOCABULARIES for name in jobs()):
        if name.startswith(("replay", "expect")) and vocab != VOCABULARIES[0]:
            continue
        times = [[_timed(worker, vocab, name) for worker in workers] for _ in range(repeats)]
        before, now = (statistics.median(column) for column in zip(*times[1:], strict=True))
        ratios = sorted(new / old for old, new in times[1:])
        softmax = now if name == SOFTMAX else softmax
        rank = _rank(len(ratios))
        row = {"job": name, "vocabulary": vocab, "before": before, "milliseconds": now}
        row |= {"ratio": statistics.median(ratios), "low": ratios[rank], "high": ratios[-1 - rank]}
        row |= {"pairs": len(ratios)}
        per_row = name.startswith(("meter", "emitted_law"))
        share = _rows_of(name) / (BATCH * (WIDTH + 1))
        yield row | {"softmaxes": now / (share * softmax) if per_row else ""}
    for worker in workers:
        worker.communicate()


def _rank(count: int, level: float = 0.9) -> int:
    """Return how many of the sorted values lie below a distribution-free interval of the median."""
    tail, term, rank = 0.0, 0.5**count, 0
    while (tail := tail + term) <= (1 - level) / 2:
        term *= (count - rank) / (rank + 1)
        rank += 1
    return max(rank - 1, 0)


def _rows_of(name: str) -> int:
    return LAWS if "batch" in name else BATCH if name.startswith("meter") else 1


def _worker(root: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve())]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=root, env=environment, **pipes)


def _timed(worker: subprocess.Popen[str], vocab: int, name: str) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps([vocab, name]) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def rows(
    vocab: int, batch: int, seed: int, width: int = WIDTH, noise: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor, Tensor]:
    """Return float32 rows of target and draft, drafted tokens, coins, logits, memory for a row.

    ``noise`` is that of the draft's logits.
    """
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, width + 1, vocab, generator=source)
    stray = noise * torch.randn(batch, width, vocab, generator=source)
    q, p = logits.softmax(-1), (logits[:, :-1] + stray).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).view(batch, width)
    coins = torch.rand(batch, width + 1, generator=source, dtype=torch.float64)
    return q, p, ids, (coins[:, :width], coins[:, width]), logits, torch.empty_like(q)


def jobs() -> dict[str, Callable[[Any], Any]]:
    """Return functions of rows by name; those of the shipped trace read none."""
    import cactus_theory as ct
    from cactus_theory.decoding._meter import Meter
    from cactus_theory.traces import expect, replay
    from cactus_theory.verify import find_verifier

    def verified(verify: Any, policy: Any, batch: Any) -> None:
        verify(policy, *batch[:3], coins=batch[3], validate=False)

    try:
        from cactus_theory.verify.node import nodes_of_rows
    except ImportError:  # a tree from before nodes
        nodes_of_rows = None  # type: ignore[assignment]

    def metered(policy: Any, batch: Any) -> None:
        rows = batch[0][:, 1], batch[1][:, 1]
        if nodes_of_rows is not None:
            return Meter().add(nodes_of_rows(find_verifier("chain"), policy, *rows))
        meter: Any = Meter((policy,))  # type: ignore[arg-type]
        meter.add(*rows, None)
        meter.sums()

    def laws(policy: Any, count: int, batch: Any) -> None:
        q, p = (part[:, :WIDTH].flatten(0, 1)[:count] for part in batch[:2])
        ct.emitted_law(policy, q, p, normalise=True)

    found: dict[str, Callable[[Any], Any]] = {
        SOFTMAX: lambda batch: torch.softmax(batch[4], -1, out=batch[5])
    }
    for spec in CHAINS:
        found[f"chain {spec}"] = partial(verified, ct.verify_chain, ct.policy(spec))
    for spec in BLOCKS:
        found[f"block {spec}"] = partial(verified, ct.verify_block, ct.policy(spec))
    for spec in METERED:
        found[f"meter of rows {spec}"] = partial(metered, ct.policy(spec))
    for spec in METERED[:3]:
        found[f"emitted_law of a batch {spec}"] = partial(laws, ct.policy(spec), LAWS)
        found[f"emitted_law {spec}"] = partial(laws, ct.policy(spec), 1)
    trace = Path(ct.__file__).resolve().parents[1] / "simulations" / "data" / "trace"  # its own
    for verifier in ("chain", "block"):
        for name, function in (("replay", replay), ("expect", expect)):
            job = partial(function, trace, METERED[0], verifier)
            found[f"{name} {verifier} {METERED[0]}"] = lambda _, job=job: job()
    return found


def work() -> None:
    """Time the jobs that the standard input names, each called once before it is first timed."""
    torch.set_num_threads(1)
    known: dict[int, Any] = {}
    for line in sys.stdin:
        vocab, name = json.loads(line)
        if vocab not in known:
            batches = [rows(vocab, BATCH, seed) for seed in range(FRESH)]
            known = {vocab: (jobs(), batches, {})}
        functions, batches, calls = known[vocab]
        number = calls[name] = calls.get(name, -1) + 1
        with torch.inference_mode():
            started = time.perf_counter()
            functions[name](batches[number % FRESH])
            print(1e3 * (time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    work()
