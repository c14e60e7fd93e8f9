"""Time one call of the hook against vLLM's own function, in one process, taking turns.

``.venv-vllm/bin/python -m tests.vllm_engine.bench [--vocab 512 32000 151936] [--calls 60]``; one
thread, 8 requests of 4 drafts. Milliseconds a call: the median, and the mean, which has in it
the rows that the meter works off together every so many calls.
"""

import argparse
import statistics
import time
from types import SimpleNamespace

import torch

from cactus_theory.vllm import settings
from cactus_theory.vllm.metrics import Reporter
from cactus_theory.vllm.model_runner_v1 import Hook

BATCH, DRAFTS = 8, 4
WARM = 3  # calls whose time is not looked at
NEVER = float("inf")  # seconds between lines of the log
CASES = (
    ("speculative", "chain", "off"),
    ("speculative", "chain", "16"),
    ("band:price=2.0", "chain", "off"),
    ("band:price=2.0", "chain", "16"),
    ("band:price=2.0", "chain", "1"),
    ("speculative", "block", "16"),
    ("band:price=2.0", "block", "16"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 32_000, 151_936])
    parser.add_argument("--calls", type=int, default=60)
    given = parser.parse_args()
    from vllm.platforms import current_platform

    torch.set_num_threads(1)
    current_platform.register_triton_kernel_overrides()
    for vocab in given.vocab:
        call, overlap = arguments(vocab)
        print(f"V = {vocab:,}, Σ min(p, q) = {overlap:.2f}: median and mean ms of {given.calls}")
        for name, seconds in timed(kinds(), call, given.calls).items():
            own = [1e3 * one for one in seconds[WARM:]]
            print(f"  {name:36s}{statistics.median(own):9.2f}{statistics.mean(own):9.2f}")


def kinds():
    """Return vLLM's function, as it runs on this machine, and hooks around it."""
    from prometheus_client import CollectorRegistry
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.rejection_sample
    found = {"vLLM's own": stock}
    batch = SimpleNamespace(req_ids=[str(number) for number in range(BATCH)])
    for policy, verifier, meter in CASES:
        asked = {"POLICY": policy, "VERIFIER": verifier, "METER": meter}
        own = settings.read({f"CACTUS_{name}": value for name, value in asked.items()})
        hook = Hook(own, stock, print)
        prompts = SimpleNamespace(np=[False] * BATCH)
        hook.runner = SimpleNamespace(
            input_batch=batch, requests={}, discard_request_mask=prompts
        )  # fmt: skip
        hook.reporter = Reporter(hook.tally, print, NEVER, registry=CollectorRegistry())
        found[f"{policy}, {verifier}, meter {meter}"] = hook.rejection_sample
    return found


def arguments(vocab):
    """Return the arguments of a call on peaked rows, and how much their laws overlap."""
    g = torch.Generator().manual_seed(0)
    rows = BATCH * DRAFTS
    logits = 2.0 * torch.randn(rows, vocab, generator=g)
    top = torch.randint(vocab, (rows,), generator=g)
    logits[torch.arange(rows), top] += 14.0 if vocab > 4096 else 7.0
    probs = (logits + 0.7 * torch.randn(rows, vocab, generator=g)).softmax(-1)
    ids = torch.multinomial(probs, 1, generator=g)[:, 0].int()
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(BATCH), generators={}
    )
    ends = torch.arange(DRAFTS, rows + 1, DRAFTS, dtype=torch.int32)
    bonus = torch.zeros(BATCH, 1, dtype=torch.int32)
    call = (ids, [DRAFTS] * BATCH, DRAFTS, ends, probs, logits, bonus, metadata)
    return call, float(torch.minimum(logits.softmax(-1), probs).sum(-1).mean())


def timed(functions, call, calls):
    seconds = {name: [] for name in functions}
    for _ in range(calls):
        for name, function in functions.items():
            start = time.perf_counter()
            function(*call)
            seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
