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
* ``GPUModelRunner._update_states``, wrapped: tells which requests have ended or were aborted;
* ``SamplingParams.verify``, wrapped: a request whose ``extra_args`` are not admitted is refused
  when it is submitted.

A :class:`Request` is kept by its id, not by its place in a batch, from its first step with drafts
to its end: its policy, built and tried once, and under a cap its account, which a preemption leaves
as it is; tokens that are computed again are not emitted again, and cost nothing. Its tokens are
those of rounds with a draft, at most what the answer has, so that the cap of
:class:`~cactus_theory.decoding.ledger.Ledger` holds at every length of the answer. If the policy of
a request raises in a step all the same, drafts of that step are judged without loss, and a warning
says so.

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

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._meter import Meter
from cactus_theory.decoding._verification import rows_of, verified_rows
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.policies import Policy, policy
from cactus_theory.verify import Assignment
from cactus_theory.verify.draft import Verified
from cactus_theory.vllm.admission import Admission
from cactus_theory.vllm.batch import FlatBatch, try_rows, verify_flat
from cactus_theory.vllm.metrics import Reporter, Tally
from cactus_theory.vllm.settings import LOG, LONGEST_LINE, Settings

LONGEST_NAME = 200  # characters of a request's id, which a client may choose


class Request:
    """One request: what it was admitted with, has been granted, has spent and has got.

    ``rules`` are the policies that may judge its tokens, one without a cap; ``account`` the
    ledger's books. The meter measures every row, where readings are asked for.
    """

    def __init__(self, params: Any, policy: Policy, cap: float | None, settings: Settings) -> None:
        self.params, self.policy, self.cap = params, policy, cap
        self.ledger = None if cap is None else Ledger(policy, cap)
        self.rules = (policy,) if self.ledger is None else self.ledger.rules
        self.judge = settings.verifier
        self.account = None if self.ledger is None else self.ledger.begin(())
        measured = bool(settings.readings)
        self.meter = Meter(self.rules, settings.divergence, settings.verifier) if measured else None
        self.drafted = self.accepted = self.emitted = 0

    def choice(
        self,
        drafted: Int[Tensor, "K"],
        target_probs: Float[Tensor, "K vocab"],
        draft_probs: Float[Tensor, "K vocab"],
    ) -> Int[Tensor, "K"]:
        """Return which of ``rules`` judges each token."""
        if self.ledger is None or self.account is None:
            return torch.zeros_like(drafted)
        return self.ledger.choose_by_rows(self.account, drafted, target_probs, draft_probs)

    def book(self, verified: Verified, place: int, choice: Int[Tensor, "K"]) -> None:
        """Enter what a round has emitted, at row ``place`` of what was verified."""
        count, accepted = verified.draft.lengths[place], int(verified.verdict.num_accepted[place])
        if not count:
            return
        charged = slice(0, min(accepted + 1, count))
        self.drafted, self.accepted = self.drafted + count, self.accepted + accepted
        self.emitted += accepted + 1
        rows = verified_rows(place, charged, verified, self.judge)
        if self.ledger is not None and self.account is not None:
            account = self.ledger.observe(self.account, rows)
            self.account = self.ledger.advance(account, [0] * (accepted + 1))
        if self.meter is not None:
            self.meter.add(rows.target_probs, rows.draft_probs, choice[charged], rows.path)
            self.meter.sums()  # rows of a step are not kept

    def reading(self, name: str) -> dict[str, Any]:
        """Return the request's own numbers."""
        assert self.meter is not None
        return {
            "request": name[:LONGEST_NAME],
            "policy": self.policy.spec,
            "cap": self.cap,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "emitted_divergence": self.meter.sums()[1],
            "divergence": self.meter.divergence.spec,
        }


def reporter_of(where: str, log: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Return what writes a reading as a line of JSON: to the log, or to the end of a file."""

    def write(reading: dict[str, Any]) -> None:
        line = json.dumps(reading)
        if where == LOG:
            return log(f"Cactus reading: {line}")
        try:
            with Path(where).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # a full disk must not end the engine
            log(f"cactus-theory: a reading was not written: {error}")

    return write


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
        self.admission = Admission(settings, try_rows)
        self.lossless = policy("speculative")
        self.calls = 0
        self.runner: Any = None
        self.tally = Tally(settings)
        self.reporter: Reporter | None = None
        self.counts_here = True
        self.warned: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.write: Callable[[dict[str, Any]], None] | None = None

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
        refuse_other_rules(kwargs)
        if sampling_metadata.all_greedy:
            return self.original(*arguments, *args, **kwargs)
        # before the batch has rows: a policy is tried in the memory that they will be in
        requests = self._running(len(num_draft_tokens))
        rows, lost_rows = self._draft_rows(draft_probs, num_draft_tokens)
        batch = FlatBatch(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            rows,
            target_logits,
            bonus_token_ids.flatten(),
            _greedy(sampling_metadata),
            sampling_metadata.generators,
            lost_rows,
        )
        if not target_logits.is_cuda and batch.has_nan:
            self._warn_once("a step had NaN logits; vLLM's own function decides such steps")
            return self.original(*arguments, *args, **kwargs)
        output, verified = self._decide(batch, requests)
        if verified is not None and self.counts_here:
            self.tally.add(verified)
            if self.reporter is not None:
                self.reporter.step()
        return output

    def end(self, names: Iterable[str]) -> None:
        """Forget requests that have ended or were aborted, and report what they got."""
        for name in names:
            request = self.requests.pop(name, None)
            if request is not None and request.meter is not None and self.write is not None:
                self.write(request.reading(name))

    def _running(self, count: int) -> list[Request]:
        """Return the requests of the running step; none for a dummy batch."""
        names = [] if self.runner is None else self.runner.input_batch.req_ids
        if len(names) != count:
            return []
        return [self._request(name) for name in names]

    def _request(self, name: str) -> Request:
        """Return what is known of a request, from its first step on."""
        state = self.runner.requests.get(name)
        params = getattr(state, "sampling_params", None)
        request = self.requests.get(name)
        if request is None or request.params is not params:  # new, or asked anew under the same id
            request = self.requests[name] = self._new_request(params)
        return request

    def _new_request(self, params: Any) -> Request:
        """Return a new request; one that was not refused where it was submitted is lossless."""
        extra = getattr(params, "extra_args", None)
        try:
            policy, cap = self.admission.policy_of(extra), self.admission.cap_of(extra)
        except ValueError as error:
            self._warn_once(f"{error}; the request is served without loss")
            policy, cap = self.lossless, None
        return Request(params, policy, cap, self.settings)

    def _decide(self, batch: FlatBatch, requests: list[Request]) -> tuple[Tensor, Verified | None]:
        """Return what is emitted; policies of requests that raise are replaced for the step."""
        policies = [request.policy for request in requests] or [self.settings.policy]
        if all(rule is policies[0] for rule in policies):
            policies = policies[:1]
        booked = any(
            request.ledger is not None or request.meter is not None for request in requests
        )
        choices: list[Tensor] = []
        try:
            choices = _choices(batch, requests) if booked and batch.drafted else []
            assigned = _assigned(batch, requests, choices) if choices else None
            output, verified = verify_flat(self.settings.verifier, policies, batch, None, assigned)
        except Exception as error:
            if all(rule is self.settings.policy for rule in policies):
                raise
            message = f"{type(error).__name__}: {error}"[:LONGEST_LINE]
            self._warn_once(f"{message}; drafts of this step are judged without loss")
            return verify_flat(self.settings.verifier, [self.lossless], replace(batch))
        for place, choice in enumerate(choices):
            assert verified is not None
            requests[batch.drafted[place]].book(verified, place, choice)
        return output, verified

    def _draft_rows(
        self, draft_probs: Tensor | None, counts: list[int]
    ) -> tuple[Tensor | None, frozenset[int]]:
        """Return the rows the drafts were drawn from, and the requests whose rows were lost."""
        rows_by_name = getattr(self.runner, "_draft_probs", None)
        names = getattr(self.runner, "_draft_prob_req_ids", None)
        if draft_probs is not None or rows_by_name is None or names is None or not any(counts):
            return draft_probs, frozenset()
        self._warn_once("some rows of sampled drafts were lost; these drafts are set aside")
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

    def _warn_once(self, text: str) -> None:
        if text not in self.warned and len(self.warned) < 100:
            self.warned.add(text)
            self.warn(f"cactus-theory: {text}")


def refuse_other_rules(kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if vLLM's own lossy rules are asked for as well."""
    for name in LOSSY_RULES:
        if kwargs.get(name):
            raise RuntimeError(
                f"{name}: vLLM's own lossy rule cannot decide together with a policy of "
                "cactus-theory; unset it or CACTUS_POLICY"
            )


def _choices(batch: FlatBatch, requests: list[Request]) -> list[Tensor]:
    """Return which of its own rules judges each token of the requests with drafts."""
    choices = []
    for place, (row, count) in enumerate(zip(batch.drafted, batch.draft.lengths, strict=True)):
        drafted = batch.draft.token_ids[place]
        choice = torch.zeros_like(drafted)
        if count:
            nodes = slice(0, count)
            rows = rows_of(place, nodes, nodes, batch.target_rows, batch.draft)
            choice[nodes] = requests[row].choice(drafted[nodes], *rows)
        choices.append(choice)
    return choices


def _assigned(batch: FlatBatch, requests: list[Request], choices: list[Tensor]) -> Assignment:
    """Return one list of policies for the batch, and which of them judges each token."""
    policies: list[Policy] = []
    rows = []
    for request, choice in zip((requests[row] for row in batch.drafted), choices, strict=True):
        policies += [policy for policy in request.rules if policy not in policies]
        rows.append(choice.new_tensor([policies.index(policy) for policy in request.rules])[choice])
    return Assignment(tuple(policies), torch.stack(rows))


def _greedy(metadata: Any) -> list[bool] | None:
    if metadata.all_random or metadata.temperature is None:
        return None
    return (metadata.temperature == 0).tolist()
