"""Plugins of the tests' own, loaded by vLLM beside the package's.

``repair``: on a CPU ``expand_batch_to_tokens`` hands back memory that it has not written for
temperature, top-k and top-p of every sampled speculative step (vLLM issue 55005), so that the
target law is not defined. It is replaced by what it should compute, here and nowhere in the
package, which refuses to serve on such a build.

``age``: renames a parameter of ``rejection_sample``, as a version of tomorrow might.
"""

import os

import torch


def repaired(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    values = torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))


def repair() -> None:
    if os.environ.get("TESTS_LEAVE_THE_FAULT"):
        return
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = repaired


def age() -> None:
    if not os.environ.get("TESTS_AGE"):
        return
    from vllm.v1.sample import rejection_sampler

    def rejection_sample(draft_ids, num_draft_tokens):
        raise AssertionError

    rejection_sampler.rejection_sample = rejection_sample
