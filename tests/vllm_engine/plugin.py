"""A plugin of the tests' own, loaded by vLLM beside the package's.

On a CPU ``expand_batch_to_tokens`` hands back memory that it has not written for temperature,
top-k and top-p of every sampled speculative step (vLLM issue 55005), so that the target law is
not defined. ``repair`` replaces it by what it should compute, here and nowhere in the package,
which refuses to serve on such a build.
"""

import contextlib


def repaired(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    values = x.where(x != replace_from, replace_to)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))


def repair() -> None:
    from vllm.v1.sample import rejection_sampler as module

    if module.expand_batch_to_tokens is not repaired:
        repaired.before = module.expand_batch_to_tokens
        module.expand_batch_to_tokens = repaired


@contextlib.contextmanager
def break_again():
    from vllm.v1.sample import rejection_sampler as module

    module.expand_batch_to_tokens = repaired.before
    try:
        yield
    finally:
        module.expand_batch_to_tokens = repaired


def age() -> None:
    """Rename a parameter of ``rejection_sample``, as a version of tomorrow might."""
    from vllm.v1.sample import rejection_sampler as module

    def rejection_sample(draft_ids, num_draft_tokens):
        raise AssertionError

    module.rejection_sample = rejection_sample
