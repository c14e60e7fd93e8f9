"""Run one engine in a process of its own: ``python run.py JOB.json OUT.json``.

A job has ``engine`` (arguments of ``LLM``), ``requests`` (each: prompt, how many, arguments of
``SamplingParams``), and whether to answer requests one by one (``alone``). The answer has the
tokens of every request, the counters of this process, and what was refused.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins

    if job.get("late"):  # settings that only processes started from now on will see
        load_general_plugins()
        os.environ.update(job["late"])
    engine = LLM(**job["engine"])
    prompts, params = [], []
    for request in job["requests"]:
        own = dict(request["params"], detokenize=False, ignore_eos=True)
        for number in range(request["times"]):
            seed = {} if "seeds" not in request else {"seed": request["seeds"] + number}
            prompts.append({"prompt_token_ids": request["prompt"]})
            params.append(SamplingParams(**own, **seed))
    refused = []
    for bad in job.get("bad", []):
        try:
            engine.generate(prompts[:1], SamplingParams(max_tokens=2, extra_args=bad))
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    if job.get("alone"):
        done = [
            engine.generate([one], [own], use_tqdm=False)[0] for one, own in zip(prompts, params)
        ]
    else:
        done = engine.generate(prompts, params, use_tqdm=False)
    answer = {
        "tokens": [list(one.outputs[0].token_ids) for one in done],
        "refused": refused,
        "counters": counters(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


def counters() -> dict[str, float]:
    """Return the counters that /metrics would show in this process."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry
    from vllm.v1.sample import rejection_sampler

    hook = getattr(rejection_sampler.rejection_sample, "__self__", None)
    if getattr(hook, "reporter", None) is not None:
        hook.reporter.prometheus.send()
    found = {}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples:
            if sample.name.startswith(("cactus:", "vllm:spec_decode")):
                found[f"{sample.name}{sorted(sample.labels.items())}"] = sample.value
    return found


if __name__ == "__main__":  # engines in processes of their own import this file
    main()
