"""The hook of vLLM's V1 model runner: sampled and deterministic drafts, chain and block.

:mod:`cactus_theory.vllm.install` puts it where ``RejectionSampler.forward`` looks up
``rejection_sample`` among its module's names: ours for batches with a sampled request, or a greedy
one whose policy is charged in regret; the original for others, and for what is not numbers.

A :class:`~cactus_theory.vllm.accounts.Request` is kept by its id, not by its place in a batch, from
its first step with drafts to its end. If its policy raises in a step all the same, drafts of that
step are judged without loss, and a warning says so.

The bonus token is the one that the engine has drawn before; acceptance and recovery take numbers
of the default generator of the device, or of the request's own (``seed``). Those of a request do
not depend on its batch; drafts that are sampled do, since the drafter ignores seeds. If a step
lacks the rows that some request's tokens were drawn from, vLLM treats the whole batch's tokens as
deterministic: that keeps a lossless law and changes a lossy one. Here that request's drafts are set
aside and its next token is drawn from the target, the others keep their rows, and a warning says so
once. On CUDA the torch path runs (no engine was run there); flags of mixed batches with greedy
requests, and the counters, wait for the device at every step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.assignment import assigned, policies_of
from cactus_theory.divergences.regret import REGRET
from cactus_theory.verify.draft import Verdict
from cactus_theory.vllm.accounts import End, Request
from cactus_theory.vllm.batch import FlatBatch, verify_flat
from cactus_theory.vllm.metrics import Reporter, Tally
from cactus_theory.vllm.settings import LONGEST_LINE, Settings

LOSSY_RULES = ("synthetic_mode", "fly_window_size")  # vLLM's lossy rules, among further arguments


class Hook:
    """Decides the drafts of one process.

    ``calls`` counts how often the runner has asked, all-greedy batches included; ``runner`` is the
    one that is sampling, None outside a step; ``write`` takes the readings of requests that have
    ended, in one of the processes that share a model.
    """

    def __init__(
        self, settings: Settings, original: Callable[..., Tensor], warn: Callable[[str], None]
    ) -> None:
        self.settings, self.original, self.warn = settings, original, warn
        self.calls = 0
        self.runner: Any = None
        self.tally = Tally(self.settings)
        self.reporter: Reporter | None = None
        self.counts_here = True
        self.warned: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.write: Callable[[dict[str, Any]], None] | None = None
        self.model = ""  # the name that the model is served by
        self.last_ends: Mapping[str, End] = {}  # what a scheduler of this process has told last

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
        arguments = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens)
        arguments += (draft_probs, target_logits, bonus_token_ids, sampling_metadata)
        for name in LOSSY_RULES:
            if kwargs.get(name):
                raise RuntimeError(
                    f"{name}: a rule of vLLM's own cannot decide together with a policy of "
                    f"cactus-theory; got {kwargs[name]!r}; unset it or CACTUS_POLICY"
                )
        # before the batch has rows: a policy is tried in the memory that they will be in
        size = len(num_draft_tokens)
        requests, greedy = self._running(size), None
        if not sampling_metadata.all_random:
            heat = sampling_metadata.temperature
            greedy = [True] * size if sampling_metadata.all_greedy else (heat == 0).tolist()
        policies = [request.policy for request in requests] or [self.settings.policy] * size
        flags = zip(greedy or [False] * size, policies, strict=True)
        relaxed = [own and policy.unit == REGRET for own, policy in flags]
        if sampling_metadata.all_greedy and not any(relaxed):
            output = self.original(*arguments, *args, **kwargs)
            if self.settings.readings:
                self._count(requests, num_draft_tokens, output, greedy)
            return output
        rows, lost_rows = None, frozenset[int]()
        if not sampling_metadata.all_greedy:
            rows, lost_rows = self._draft_rows(draft_probs, num_draft_tokens)
        batch = FlatBatch(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            rows,
            target_logits,
            bonus_token_ids.flatten(),
            greedy,
            sampling_metadata.generators,
            lost_rows,
        )
        parts = batch.parts(relaxed)
        if not target_logits.is_cuda and any(part.has_nan for _, part in parts):
            self.warn_once("a step had NaN logits; vLLM's own function decides such steps")
            return self.original(*arguments, *args, **kwargs)
        output = draft_token_ids.new_empty((size, max_spec_len + 1), dtype=torch.int32)
        judged = [0] * size
        for places, part in parts:
            own = [requests[row] for row in places] if requests else []
            output[places], verdict = self._decide(part, own)
            for row, count in zip(places, _judged(part, verdict), strict=True):
                judged[row] = count
            if verdict is not None and own and self.counts_here:
                self.tally.add(part.draft, verdict, [own[row].policy for row in part.drafted])
        self._count(requests, judged, output, greedy)
        if self.reporter is not None and requests and self.counts_here:
            self.reporter.step()
        return output

    def meet(self, runner: Any) -> None:
        """Take note of requests in a step without drafts: most get a token."""
        self.runner, count = runner, len(runner.input_batch.req_ids)
        self._count(self._running(count), [0] * count)
        self.runner = None
        if self.reporter is not None and self.counts_here:
            self.reporter.step()

    def end(self, names: Iterable[str], ends: Mapping[str, End] | None = None) -> None:
        """Forget requests that have ended or were aborted, and report what they got.

        ``ends`` has what the scheduler says. Once no request is left, all counts are sent.
        """
        known = [name for name in names if name in self.requests]
        for name in known:
            request = self.requests.pop(name)
            if request.meter is not None and self.write is not None:
                self.write(request.reading(name, (ends or {}).get(name, (None, None)), self.model))
                if not request.strict:
                    self.tally.of(request.policy).answers.append(request.meter.sums()[1])
        if known and not self.requests and self.reporter is not None and self.counts_here:
            self.reporter.send()

    def _count(
        self, requests: Sequence[Request], counts: Sequence[int],
        output: Tensor | None = None, greedy: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """Count each request's step, which emits nothing if its prompt goes on in the next one."""
        if not requests or not (self.counts_here or self.settings.cap is not None):
            return
        emitted = [1] * len(counts) if output is None else (output >= 0).sum(-1).tolist()
        partial = self.runner.discard_request_mask.np
        for row, request in enumerate(requests):
            request.greedy |= greedy is not None and greedy[row]
            if counts[row] or not partial[row]:
                request.step(counts[row], emitted[row] - 1)
                if not counts[row] and not request.strict and self.counts_here:
                    self.tally.add_undrafted(request.policy)

    def _running(self, count: int) -> list[Request]:
        """Return the requests of the running step; none for a dummy batch."""
        names = [] if self.runner is None else self.runner.input_batch.req_ids
        return [self._request(name) for name in names] if len(names) == count else []

    def _request(self, name: str) -> Request:
        state = self.runner.requests.get(name)
        params = getattr(state, "sampling_params", None)
        request = self.requests.get(name)
        if request is None or request.params is not params:  # new, or asked anew under the same id
            granted = self.settings.served(params, self.warn_once)
            request = self.requests[name] = Request(params, granted, self.settings)
        return request

    def _decide(self, batch: FlatBatch, requests: list[Request]) -> tuple[Tensor, Verdict | None]:
        """Return the emitted tokens; policies of requests that raise are replaced for the step."""
        policies = [request.policy for request in requests] or [self.settings.policy]
        if all(policy is policies[0] for policy in policies):
            policies = policies[:1]
        followed = [requests[row].followed for row in batch.drafted] if requests else []
        booked = any(request.meter or request.cap is not None for request in requests)
        try:
            judges = None
            if booked and followed:
                told = batch.target_rows, batch.draft, self.settings.verifier
                judges = assigned(followed, policies_of(followed), *told)
            output, verdict = verify_flat(self.settings.verifier, policies, batch, None, judges)
        except Exception as error:
            if all(policy is self.settings.policy for policy in policies):
                raise
            message = f"{type(error).__name__}: {error}"[:LONGEST_LINE]
            self.warn_once(f"{message}; drafts of this step are judged without loss")
            strict = [True] * len(batch.counts) if batch.relaxed else batch.greedy
            batch = replace(batch, greedy=strict)
            return verify_flat(self.settings.verifier, [self.settings.lossless], batch)
        if booked and verdict is not None:
            for place, row in enumerate(batch.drafted):
                emitted = int(verdict.num_accepted[place]) + 1
                # the engine draws what follows a whole draft
                nodes = verdict.nodes(place)[: min(emitted, batch.draft.lengths[place])]
                self.tally.take(requests[row].policy, requests[row].book(nodes, emitted))
        return output, verdict

    def _draft_rows(
        self, draft_probs: Tensor | None, counts: list[int]
    ) -> tuple[Tensor | None, frozenset[int]]:
        """Return the rows the drafts were drawn from, and the requests whose rows were lost."""
        rows_by_name = getattr(self.runner, "_draft_probs", None)
        names = getattr(self.runner, "_draft_prob_req_ids", None)
        if draft_probs is not None or rows_by_name is None or names is None or not any(counts):
            return draft_probs, frozenset()
        self.warn_once("some rows of sampled drafts were lost; these drafts are set aside")
        place = {name: number for number, name in enumerate(names)}
        rows, lost = [], set()
        for row, (name, count) in enumerate(
            zip(self.runner.input_batch.req_ids, counts, strict=True)
        ):
            if count and name in place:
                rows.append(rows_by_name[place[name], :count])
            elif count:
                lost.add(row)
                rows.append(torch.zeros_like(rows_by_name[0, :count]))
        return torch.cat(rows), frozenset(lost)

    def warn_once(self, text: str) -> None:
        """Warn of something, once."""
        if text not in self.warned and len(self.warned) < 100:
            self.warned.add(text)
            self.warn(f"cactus-theory: {text}")


def _judged(batch: FlatBatch, verdict: Verdict | None) -> list[int]:
    """Return the drafted tokens of each request; unknown ones and placeholders are none."""
    lengths = () if verdict is None else batch.draft.lengths
    judged, greedy = dict(zip(batch.drafted, lengths, strict=True)), batch.greedy
    return [count if greedy and greedy[row] else int(judged.get(row, 0))
            for row, count in enumerate(batch.counts)]  # fmt: skip
