"""Run vLLM's own model runner V2 functions on a CPU: ``python runner_v2.py JOB.json OUT.json``.

Triton interprets them, so that real code stands on both sides of ours: temperature, truncation,
noise of drafted tokens and rejection. What needs a GPU to be made (its buffers) is replaced by
plain tensors. JOB.json is a list. A job has ``policy`` and ``verifier`` of the
server, ``heat`` and ``cuts`` of the requests, ``method`` (``standard`` or ``block``),
``deterministic`` (the logits processor) or not (the hook), ``lengths`` of the requests in turn,
``requests``, ``seed``, and logits ``target`` and ``draft``. An answer has what every request
drafted and emitted.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

FIRST = 40  # tokens of each text


def let_triton_in():
    """Import vLLM as if its build were not for CPUs, which go without Triton."""
    import vllm.platforms

    vllm.platforms.vllm_version_matches_substr = lambda part: False
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        sys.exit("vLLM does not see Triton")


def buffer(values):
    return SimpleNamespace(np=values.numpy(), gpu=values)


class Batch:
    """Requests with the same rows, each in a slot of its own."""

    def __init__(self, job):
        count = job["requests"]
        generator = torch.Generator().manual_seed(job["seed"])
        self.target, self.draft = (torch.tensor(job[name]) for name in ("target", "draft"))
        self.width, self.vocab = self.draft.shape
        self.slots = torch.randperm(count, generator=generator).int()
        self.seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
        self.heat = torch.full((count,), job["heat"])
        turns = torch.tensor(job["lengths"])
        self.lengths = turns[torch.arange(count) % len(turns)]
        self.rows = self.lengths + 1
        self.of_row = torch.repeat_interleave(torch.arange(count), self.rows)
        self.local = torch.cat([torch.arange(int(own)) for own in self.rows]).int()
        self.ends = torch.cat([self.rows.new_zeros(1), self.rows.cumsum(0)]).int()
        self.pos = FIRST - 1 + self.local.long()

    def drafted(self, deterministic):
        """Return (requests, K): the likeliest tokens, or those that the engine's noise draws."""
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        count = len(self.slots)
        if deterministic:
            return self.draft.argmax(-1).expand(count, -1)
        every = [
            gumbel_sample(
                row.expand(count, -1).contiguous(), self.slots, self.heat, self.seeds,
                torch.full((count,), FIRST - 1 + place), apply_temperature=True, is_drafting=True,
            )
            for place, row in enumerate(self.draft)
        ]  # fmt: skip
        return torch.stack(every, 1)


def sampler_of(batch, job):
    """Return what the runner's sampler is to its methods, with our processor if it is asked."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    count = len(batch.slots)
    states = SamplingStates.__new__(SamplingStates)
    states.vocab_size = batch.vocab
    states.temperature, states.seeds = buffer(batch.heat), buffer(batch.seeds.clone())
    states.top_k = buffer(torch.full((count,), batch.vocab, dtype=torch.int32))
    states.top_p, states.min_p = buffer(torch.ones(count)), buffer(torch.zeros(count))
    states.seeds_set, states.num_logprobs = np.zeros((2, count), dtype=np.int32)
    params = SamplingParams(temperature=job["heat"], **job.get("cuts", {}))
    processors = []
    if job["deterministic"]:
        from cactus_theory.vllm.logits_processor import CactusLogitsProcessor, server_settings

        server_settings.cache_clear()
        nothing = dict.fromkeys(("all_token_ids", "prompt_len", "prefill_len", "total_len"))
        state = LogitsProcRequestState(torch.device("cpu"), count, batch.vocab, **nothing)
        drafts = SimpleNamespace(
            draft_sample_method="greedy", rejection_sample_method=job["method"],
            num_speculative_tokens=batch.width,
        )  # fmt: skip
        own = CactusLogitsProcessor(SimpleNamespace(speculative_config=drafts), state)
        own.validate_params(params)
        processors = [own]
    for slot in range(count):
        for one in (states, *processors):
            one.add_request(slot, params)
    states.seeds.np[:] = batch.seeds.numpy()
    for own in processors:
        own.apply_staged_writes()
    sampler = Sampler.__new__(Sampler)
    sampler.sampling_states, sampler.logits_processors = states, processors
    sampler.needs_logits_processing = np.ones(count, dtype=bool)
    sampler.thinking_budget_state = SimpleNamespace(apply=lambda logits, ctx: None)
    sampler.use_fp64_gumbel = False
    return sampler


def verified(batch, job):
    """Return the drafted and the emitted tokens."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

    drafted = batch.drafted(job["deterministic"])
    fed = torch.zeros(len(batch.local), dtype=torch.int32)
    later = batch.local > 0
    fed[later] = drafted[batch.of_row[later], batch.local[later].long() - 1].int()
    runner = module.RejectionSampler.__new__(module.RejectionSampler)
    runner.sampler, runner.watermark_key = sampler_of(batch, job), None
    runner.num_speculative_steps, runner.synthetic_conditional_rates = batch.width, None
    runner.use_block_verification = job["method"] == "block"
    runner.fly_window_size, runner.fly_entropy_threshold, runner.fly_entropy_top_k = 0, 0.3, 3
    hook = None
    draft_logits = None
    if not job["deterministic"]:
        from cactus_theory.vllm import model_runner_v2, settings

        hook = model_runner_v2.install(settings.read())
        draft_logits = batch.draft.expand(len(batch.slots), -1, -1).contiguous()
        os.environ.pop("TRITON_INTERPRET")  # ours in torch: interpreted, it takes minutes
    _, sampled, counts = runner._verify(
        batch.target[batch.local.long()], draft_logits, fed, batch.pos, batch.ends, batch.slots,
        batch.slots.numpy(), batch.slots[batch.of_row], batch.local, batch.lengths.numpy(), fed,
    )  # fmt: skip
    assert hook is None or hook.calls == 1
    emitted = [row[:own] for row, own in zip(sampled.tolist(), counts.tolist(), strict=True)]
    return drafted.tolist(), emitted


def main():
    let_triton_in()
    import vllm

    from cactus_theory.vllm import model_runner_v2

    answers = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        for name in ("policy", "verifier"):
            os.environ[f"CACTUS_{name.upper()}"] = str(job[name])
        os.environ["TRITON_INTERPRET"] = "1"
        drafted, emitted = verified(Batch(job), job)
        model_runner_v2.remove()
        answers.append({"version": vllm.__version__, "drafted": drafted, "emitted": emitted})
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
