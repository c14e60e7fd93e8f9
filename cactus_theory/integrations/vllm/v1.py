"""The hook of vLLM's V1 model runner: sampled and certain drafts, chain and block.

What is replaced, once names of parameters and fields have been compared:

* ``vllm.v1.sample.rejection_sampler.rejection_sample``, which ``RejectionSampler.forward`` looks
  up among its module's names: ours for batches with a sampled request, the original for batches
  that are all greedy;
* ``GPUModelRunner._sample``, wrapped: tells the function above which requests it serves
  (``SamplingMetadata`` does not), and stops the engine if that function was not called;
* ``EngineArgs.create_engine_config``, wrapped: refuses what would bypass or contradict the hook
  before any process starts: model runner V2, ``rejection_sample_method`` other than ``standard``
  (``block`` is accepted and ignored by this runner, and turns draft probabilities off; ``fly``
  and ``synthetic`` are lossy rules of their own), a CPU build with vLLM issue 55005;
* ``SamplingParams.verify``, wrapped: a request with a bad ``extra_args["cactus"]`` is refused
  when it is submitted.

The bonus token is the one that the engine has drawn before; acceptance and recovery take numbers
of the default generator of the device, or of the request's own (``seed``). Those of a request do
not depend on its batch; drafts that are sampled do, since the drafter ignores seeds: only certain
drafts make a request's text reproducible. If a step lacks the rows that some request's tokens
were drawn from, vLLM treats the whole batch's tokens as certain: that keeps a lossless law and
changes a lossy one. Here that request's drafts are set aside and its next token is drawn from
the target, the others keep their rows, and a warning says so once. A batch with rows that are
not numbers goes to the original function. On CUDA the torch path runs (no engine was run there);
flags of mixed batches with greedy requests, and the counters, wait for the device at every step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cactus_theory.integrations.vllm import settings as reading
from cactus_theory.integrations.vllm.batch import FlatBatch, Verified, verify_flat
from cactus_theory.integrations.vllm.metrics import Reporter, Tally
from cactus_theory.integrations.vllm.settings import Settings
from cactus_theory.policies import Policy

REMEMBERED = 1024  # policies of requests
OWN_RULES = ("synthetic_mode", "fly_window_size")  # vLLM's lossy rules, among further arguments


class Hook:
    """Decides the drafts of one process.

    Attributes
    ----------
    calls : how often the runner has asked, all-greedy batches included.
    runner : the runner that is sampling; None outside a step.
    """

    def __init__(
        self, settings: Settings, original: Callable[..., Tensor], warn: Callable[[str], None]
    ) -> None:
        self.settings, self.original, self.warn = settings, original, warn
        self.calls = 0
        self.runner: Any = None
        self.tally = Tally(settings)
        self.reporter: Reporter | None = None
        self.counts_here = True
        self.warned: set[str] = set()
        self.parsed: dict[str, Policy] = {}

    def rejection_sample(
        self,
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return (B, max_spec_len + 1) int32 padded with −1, as the function it replaces."""
        self.calls += 1
        given = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens)
        given += (draft_probs, target_logits, bonus_token_ids, sampling_metadata)
        refuse_other_rules(kwargs)
        if sampling_metadata.all_greedy:
            return self.original(*given, *args, **kwargs)
        rows, unknown = self._draft_rows(draft_probs, num_draft_tokens)
        batch = FlatBatch(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            rows,
            target_logits,
            bonus_token_ids.flatten(),
            _greedy(sampling_metadata),
            sampling_metadata.generators,
            unknown,
        )
        if not target_logits.is_cuda and batch.has_nan:
            self._warn_once("a step had NaN logits; vLLM's own function decides such steps")
            return self.original(*given, *args, **kwargs)
        policies = self._policies(len(num_draft_tokens))
        output, seen = verify_flat(self.settings.verifier, policies, batch)
        self._report(seen)
        return output

    def _report(self, seen: Verified | None) -> None:
        if seen is not None and self.counts_here:
            self.tally.add(seen)
            if self.reporter is not None:
                self.reporter.step()

    def _policies(self, batch: int) -> list[Policy]:
        """Return one policy for all requests, or one for each."""
        own = [] if self.runner is None else self._extra_args()
        if len(own) != batch or own == [None] * batch:  # a dummy batch, or the usual one
            return [self.settings.policy]
        return [self.settings.policy if given is None else self.policy_of(given) for given in own]

    def _extra_args(self) -> list[Any]:
        """Return what each request of the running step asks for, None for nothing."""
        requests = self.runner.requests
        given = []
        for name in self.runner.input_batch.req_ids:
            params = requests[name].sampling_params if name in requests else None
            extra = getattr(params, "extra_args", None)
            given.append(extra.get(reading.ARGUMENT) if extra else None)
        return given

    def policy_of(self, given: Any) -> Policy:
        """Return a request's policy; a bad one was refused on submission, or is the server's."""
        words = repr(given)
        if words not in self.parsed:
            if len(self.parsed) >= REMEMBERED:
                self.parsed.clear()
            self.parsed[words] = self._read(given)
        return self.parsed[words]

    def _read(self, given: Any) -> Policy:
        try:
            return reading.of_request(self.settings, {reading.ARGUMENT: given})
        except ValueError as error:
            self._warn_once(f"{error}; the server's policy decides instead")
            return self.settings.policy

    def _draft_rows(
        self, draft_probs: Tensor | None, counts: list[int]
    ) -> tuple[Tensor | None, frozenset[int]]:
        """Return the rows the drafts were drawn from, and the requests whose rows were lost."""
        kept = getattr(self.runner, "_draft_probs", None)
        names = getattr(self.runner, "_draft_prob_req_ids", None)
        if draft_probs is not None or kept is None or names is None or not any(counts):
            return draft_probs, frozenset()
        self._warn_once("some rows of sampled drafts were lost; these drafts are set aside")
        place = {name: number for number, name in enumerate(names)}
        rows, unknown = [], set()
        for row, (name, count) in enumerate(
            zip(self.runner.input_batch.req_ids, counts, strict=True)
        ):
            if count and name in place:
                rows.append(kept[place[name], :count])
            elif count:
                unknown.add(row)
                rows.append(torch.zeros_like(kept[0, :count]))
        return torch.cat(rows), frozenset(unknown)

    def _warn_once(self, text: str) -> None:
        if text not in self.warned and len(self.warned) < 100:
            self.warned.add(text)
            self.warn(f"cactus-theory: {text}")


def refuse_other_rules(kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if vLLM's own lossy rules are asked for as well."""
    for name in OWN_RULES:
        if kwargs.get(name):
            raise RuntimeError(
                f"{name}: vLLM's own lossy rule cannot decide together with a policy of "
                "cactus-theory; unset it or CACTUS_POLICY"
            )


def _greedy(metadata: Any) -> list[bool] | None:
    if metadata.all_random or metadata.temperature is None:
        return None
    return (metadata.temperature == 0).tolist()
