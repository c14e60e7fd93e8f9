"""Run one engine in a process of its own: ``python run.py JOB.json OUT.json``.

A job has ``engine`` (arguments of ``LLM``) and ``requests`` (each: prompt, how many times,
arguments of ``SamplingParams``, perhaps the first of as many seeds). It may also ask for
``starts`` that must be refused, for ``bad`` extra arguments of requests, to answer ``alone``,
one by one, to set an environment ``late``, after this process has read its own, and to wait until
other processes have ``settled`` the counts of so many answers. The answer has the tokens of every
request, the counters of this process, and all that was refused.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from tests.vllm_engine import plugin


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins

    if job.get("late"):
        load_general_plugins()
        os.environ.update(job["late"])
    stopped = [refused_start(**start) for start in job.get("starts", ())]
    engine = LLM(**job["engine"])
    prompts, params = asked(job["requests"])
    bad = [SamplingParams(max_tokens=2, extra_args=extra) for extra in job.get("bad", ())]
    refused = [refusal(engine, prompts[0], own) for own in bad]
    size = 1 if job.get("alone") else len(prompts)
    done = []
    for first in range(0, len(prompts), size):
        part = slice(first, first + size)
        done += engine.generate(prompts[part], params[part], use_tqdm=False)
    answer = {
        "tokens": [list(one.outputs[0].token_ids) for one in done],
        "stopped": stopped,
        "refused": refused,
        "counters": settled(job["settled"]) if job.get("settled") else counters(),
        "preemptions": preemptions(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


def asked(requests):
    """Return prompts and parameters of every request."""
    from vllm import SamplingParams

    prompts, params = [], []
    for request in requests:
        own = dict(request["params"], detokenize=False, ignore_eos=True)
        for number in range(request["times"]):
            seed = {} if "seeds" not in request else {"seed": request["seeds"] + number}
            prompts.append({"prompt_token_ids": request["prompt"]})
            params.append(SamplingParams(**own, **seed))
    return prompts, params


def refused_start(engine, fault):
    """Return the line that stops a server with these arguments."""
    from vllm.engine.arg_utils import EngineArgs

    back = plugin.break_again() if fault else contextlib.nullcontext()
    try:
        with back:
            EngineArgs(**engine).create_engine_config()
    except SystemExit as error:
        return str(error)


def refusal(engine, prompt, params):
    """Return the error of a request that must be refused."""
    try:
        engine.generate([prompt], params, use_tqdm=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def counters() -> dict[str, dict[str, float]]:
    """Return what /metrics would show in this process: each name's sums by policy."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry
    from vllm.v1.sample import rejection_sampler

    hook = getattr(rejection_sampler.rejection_sample, "__self__", None)
    if getattr(hook, "reporter", None) is not None:
        hook.reporter.send()
    found = {}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples:
            if sample.name.startswith(("cactus:", "vllm:spec_decode")):
                sums = found.setdefault(sample.name, {})
                policy = sample.labels.get("policy", "")
                sums[policy] = sums.get(policy, 0.0) + sample.value
    return found


def settled(answers: int) -> dict[str, dict[str, float]]:
    """Return the same once an engine of another process has sent what so many answers took.

    A step may send all rows before the next one tells that the last answer has ended.
    """
    for _ in range(100):
        found = counters()
        measured, verified, ended = (
            found.get(f"cactus:{name}", {})
            for name in (
                "measured_rows_total",
                "verified_rows_total",
                "answer_divergence_nats_count",
            )
        )
        if measured == verified and sum(ended.values()) == answers:
            break
        time.sleep(0.1)
    return found


def preemptions() -> float:
    """Return how often a request was preempted in this process."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    samples = [own for metric in get_prometheus_registry().collect() for own in metric.samples]
    return sum(own.value for own in samples if own.name == "vllm:num_preemptions_total")


if __name__ == "__main__":  # engines in processes of their own import this file
    main()
