"""Work on rows leaves torch's pool of threads asleep, and every setting as it was."""

import os
import subprocess
import sys

import pytest

from cactus_theory.base import arguments as check
from tests.amounts import some

# the first operation that is shared among threads starts them, so that they can be counted
SCRIPT = """
import os, sys, threading, numpy as np, torch
import cactus_theory as ct
from cactus_theory.base.threads import one_thread
from cactus_theory.decoding.meter import Meter
from cactus_theory.verify import Chain
from cactus_theory.verify.node import nodes_of_rows

VOCAB = 40_000  # more than torch leaves to one thread


def threads():
    return len(os.listdir("/proc/self/task"))


if sys.argv[1] == "set":
    torch.set_num_threads(2)
shapes = (3, VOCAB), (3, VOCAB), (2, 4, VOCAB)
q, p, rows = (np.exp(2 * np.random.default_rng(0).normal(size=shape)) for shape in shapes)
q, p, rows = (torch.from_numpy(part / part.sum(-1, keepdims=True)) for part in (q, p, rows))
ids = torch.tensor([[5, 7, 9]] * 2)
coins = torch.full((2, 3), 0.9), torch.full((2,), 0.5)
rules = [ct.policy(spec) for spec in (
    "speculative", "band:price=1", "band:delta=0.1", "cactus:delta=0.1", "mixture:alpha=0.5",
)]
jobs = {
    "optimal_acceptance": lambda: ct.optimal_acceptance(q, p, delta=0.1),
    "by acceptance": lambda: ct.optimal_acceptance(q, p, acceptance=0.7, divergence="renyi:a=2"),
    "pooled_acceptance": lambda: ct.pooled_acceptance(q, p, delta=0.1),
    "selection_law": lambda: ct.selection_law(q, p, k=3),
}


def metered(rule):
    Meter().add(nodes_of_rows(Chain(), rule, q, p))


for rule in rules:
    jobs |= {
        f"{rule.spec} {name}": lambda rule=rule, job=job: job(rule)
        for name, job in {
            "emitted_law": lambda rule: ct.emitted_law(rule, q, p),
            "audit": lambda rule: ct.audit(rule, q, p),
            "meter": metered,
            "chain": lambda rule: ct.verify_chain(rule, rows, rows[:, 1:], ids, coins=coins),
            "block": lambda rule: ct.verify_block(rule, rows, rows[:, 1:], ids, coins=coins),
        }.items()
    }
# numba, whose libraries have threads of their own, loads with the first row
ct.emitted_law(rules[1], torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1]))
for name, job in jobs.items():
    before = threads()
    job()
    if threads() != before:
        print(name, "woke the pool")
        break
before = threads()
(rows + 1).exp()
print("control", threads() > before, torch.get_num_threads())
seen = []


def look():
    seen.append(torch.get_num_threads())


def elsewhere():
    own = threading.Thread(target=look)
    own.start()
    own.join()


try:
    with one_thread():
        look(), elsewhere()
        with one_thread():
            look()
        look()
        raise KeyError
except KeyError:
    look()
print(seen)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted on Linux")
@pytest.mark.parametrize("how", some(["set", "default"], 1))
def test_long_rows_leave_the_pool_asleep_and_every_setting_as_it_was(how):
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SCRIPT, how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "control True 2\n[1, 2, 1, 1, 2]\n"


@pytest.mark.parametrize("value", [2.5, "2.5", True, 0, 1025])
def test_threads_are_counted(value: object) -> None:
    with pytest.raises(ValueError, match="threads: must"):
        check.threads(value)
