"""The hook of vLLM's V1 model runner: verify sampled and deterministic drafts by a policy.

:mod:`cactus_theory.vllm.install` puts the hook in the place of ``rejection_sample``, which
``RejectionSampler.forward`` looks up in its module. The hook verifies batches with a sampled
request, or with a greedy request whose policy is charged in regret. It leaves other batches, and
NaN logits, to the original function.

Each request's record (:class:`~cactus_theory.vllm.accounts.Request`) is kept by the request's id,
not by its place in a batch, until the request ends. If the policy that a request picked raises an
error, the lossless policy verifies the drafts of that step, and a warning is logged.

The bonus token is the token that the engine has already drawn. The uniform random numbers for
acceptance and recovery come from the device's default generator. A request with a ``seed`` has its
own generator, so its numbers do not depend on the batch; sampled drafts depend on the batch, as
drafters ignore the seed.

A step may lack the rows that some request's tokens were drawn from. vLLM then treats all tokens of
the batch as deterministic drafts, which keeps a lossless law but changes a lossy one. The hook
instead ignores the drafts of that request and draws its next token from the target; the other
requests keep their rows, and a warning is logged once.

The torch code also runs on CUDA, but no engine was run on CUDA. With greedy requests in a mixed
batch, and for the counters, the CPU waits for the device at every step.
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

LOSSY_RULES = ("synthetic_mode", "fly_window_size")  # optional arguments of vLLM's lossy rules


class Hook:
    """Verify the drafts of one process in the place of vLLM's ``rejection_sample``.

    Attributes
    ----------
    calls : number of calls by the runner, including those for all-greedy batches.
    runner : the runner that is sampling; None outside a step.
    counts_here : whether this process counts; only one of the processes that share a model does.
    requests : the record of each request, by its id.
    write : function that writes the readings of ended requests; None without readings.
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
        self.model = ""  # the name under which the model is served
        self.last_ends: Mapping[str, End] = {}  # last ends recorded by a scheduler of this process

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
        """Return the emitted tokens, (B, max_spec_len + 1) int32 padded with −1, as vLLM's does.

        Raises RuntimeError if a lossy rule of vLLM is also set.
        """
        self.calls += 1
        arguments = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens)
        arguments += (draft_probs, target_logits, bonus_token_ids, sampling_metadata)
        _check_no_lossy_rule(kwargs)
        size = len(num_draft_tokens)
        requests, greedy = self._running(size), None
        if not sampling_metadata.all_random:
            heat = sampling_metadata.temperature
            greedy = [True] * size if sampling_metadata.all_greedy else (heat == 0).tolist()
        policies = [request.policy for request in requests] or [self.settings.policy] * size
        pairs = zip(greedy or [False] * size, policies, strict=True)
        # greedy requests whose drafts a policy judges; of other greedy requests vLLM's rule decides
        relaxed = [is_greedy and policy.unit == REGRET for is_greedy, policy in pairs]
        if sampling_metadata.all_greedy and not any(relaxed):
            output = self.original(*arguments, *args, **kwargs)
            if self.settings.readings:
                self._count(requests, num_draft_tokens, output, greedy)
            return output
        rows, lost_rows = None, frozenset[int]()
        if not sampling_metadata.all_greedy:
            rows, lost_rows = self._draft_rows(draft_probs, num_draft_tokens)
        batch = FlatBatch(
            ids=draft_token_ids,
            counts=num_draft_tokens,
            width=max_spec_len,
            draft_probs=rows,
            target_logits=target_logits,
            bonus=bonus_token_ids.flatten(),
            greedy=greedy,
            generators=sampling_metadata.generators,
            unknown=lost_rows,
        )
        parts = batch.parts(relaxed)
        if not target_logits.is_cuda and any(part.has_nan for _, part in parts):
            self.warn_once("a step had NaN logits; vLLM's own function decides such steps")
            return self.original(*arguments, *args, **kwargs)
        output = draft_token_ids.new_empty((size, max_spec_len + 1), dtype=torch.int32)
        judged = [0] * size  # drafted tokens that were verified
        for places, part in parts:  # places: indices of the part's requests in the whole batch
            of_part = [requests[row] for row in places] if requests else []
            output[places], verdict = self._decide(part, of_part)
            for row, count in zip(places, _judged(part, verdict), strict=True):
                judged[row] = count
            if verdict is not None and of_part and self.counts_here:
                self.tally.add(part.draft, verdict, [of_part[row].policy for row in part.drafted])
        self._count(requests, judged, output, greedy)
        if self.reporter is not None and requests and self.counts_here:
            self.reporter.step()
        return output

    def meet(self, runner: Any) -> None:
        """Count a step without drafts: each request with a complete prompt gets one token."""
        self.runner, count = runner, len(runner.input_batch.req_ids)
        self._count(self._running(count), [0] * count)
        self.runner = None
        if self.reporter is not None and self.counts_here:
            self.reporter.step()

    def end(self, names: Iterable[str], ends: Mapping[str, End] | None = None) -> None:
        """Drop the records of requests that have ended or were aborted, and write their readings.

        ``ends`` has the scheduler's reasons and lengths. Once no request is left, counts are sent.
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
        """Count each request's tokens of a step: those of ``output``, or 1 by default.

        A request inside its prompt gets no token.
        """
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
        """Return the records of the running step's requests, or none for a dummy batch."""
        names = [] if self.runner is None else self.runner.input_batch.req_ids
        return [self._request(name) for name in names] if len(names) == count else []

    def _request(self, name: str) -> Request:
        state = self.runner.requests.get(name)
        params = getattr(state, "sampling_params", None)
        request = self.requests.get(name)
        if request is None or request.params is not params:  # new, or an id that is used again
            granted = self.settings.served(params, self.warn_once)
            request = self.requests[name] = Request(params, granted, self.settings)
        return request

    def _decide(self, batch: FlatBatch, requests: list[Request]) -> tuple[Tensor, Verdict | None]:
        """Return the emitted tokens and the verdict; after an error, those of the lossless policy.

        After an error the lossless policy verifies all requests of ``batch``. But if all of them
        have the server's default policy, the error is raised.
        """
        policies = [request.policy for request in requests] or [self.settings.policy]
        if all(policy is policies[0] for policy in policies):
            policies = policies[:1]
        followed = [requests[row].followed for row in batch.drafted] if requests else []
        booked = any(request.meter or request.cap is not None for request in requests)
        try:
            assignment = None
            if booked and followed:
                drafts = batch.target_rows, batch.draft, self.settings.verifier
                assignment = assigned(followed, policies_of(followed), *drafts)
            output, verdict = verify_flat(
                self.settings.verifier, policies, batch, assigned=assignment
            )
        except Exception as error:
            if all(policy is self.settings.policy for policy in policies):
                raise
            message = f"{type(error).__name__}: {error}"[:LONGEST_LINE]
            self.warn_once(f"{message}; drafts of this step are judged without loss")
            # without loss, the largest logits decide for relaxed greedy requests, too
            greedy = [True] * len(batch.counts) if batch.relaxed else batch.greedy
            batch = replace(batch, greedy=greedy)
            return verify_flat(self.settings.verifier, [self.settings.lossless], batch)
        if booked and verdict is not None:
            for place, row in enumerate(batch.drafted):
                emitted = int(verdict.num_accepted[place]) + 1
                # the engine draws the bonus token, which has no node and no charge
                nodes = verdict.nodes(place)[: min(emitted, batch.draft.lengths[place])]
                self.tally.take(requests[row].policy, requests[row].book(nodes, emitted))
        return output, verdict

    def _draft_rows(
        self, draft_probs: Tensor | None, counts: list[int]
    ) -> tuple[Tensor | None, frozenset[int]]:
        """Return the rows that the drafts were drawn from, and the requests whose rows are lost."""
        stored_rows = getattr(self.runner, "_draft_probs", None)  # used if vLLM passes no rows
        names = getattr(self.runner, "_draft_prob_req_ids", None)
        if draft_probs is not None or stored_rows is None or names is None or not any(counts):
            return draft_probs, frozenset()
        self.warn_once("some rows of sampled drafts were lost; these drafts are set aside")
        index = {name: number for number, name in enumerate(names)}  # of the request's rows
        rows, lost = [], set()
        for row, (name, count) in enumerate(
            zip(self.runner.input_batch.req_ids, counts, strict=True)
        ):
            if count and name in index:
                rows.append(stored_rows[index[name], :count])
            elif count:
                lost.add(row)  # zeros keep the flat layout; no token of this request is verified
                rows.append(torch.zeros_like(stored_rows[0, :count]))
        return torch.cat(rows), frozenset(lost)

    def warn_once(self, text: str) -> None:
        """Log a warning, once for each text, up to 100 texts."""
        if text not in self.warned and len(self.warned) < 100:
            self.warned.add(text)
            self.warn(f"cactus-theory: {text}")


def _check_no_lossy_rule(options: Mapping[str, Any]) -> None:
    for name in LOSSY_RULES:
        if options.get(name):
            raise RuntimeError(
                f"{name}: a rule of vLLM's own cannot decide together with a policy of "
                f"cactus-theory; got {options[name]!r}; unset it or CACTUS_POLICY"
            )


def _judged(batch: FlatBatch, verdict: Verdict | None) -> list[int]:
    """Return how many drafted tokens of each request were verified.

    Tokens of unknown requests and placeholders do not count.
    """
    lengths = () if verdict is None else batch.draft.lengths
    judged, greedy = dict(zip(batch.drafted, lengths, strict=True)), batch.greedy
    judged |= {row: count for row, count in enumerate(batch.counts) if greedy and greedy[row]}
    return [int(judged.get(row, 0)) for row in range(len(batch.counts))]
