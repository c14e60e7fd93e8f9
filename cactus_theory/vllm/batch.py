r"""Verify the drafts of a batch in the layout of vLLM's V1 runner; needs torch, but not vLLM.

Rows are flat: the N drafted tokens of B requests follow one another. ``target_logits`` (N, V) have
temperature, top-k and top-p applied (−∞ for an excluded token). ``draft_probs`` (N, V) is the
distribution that the drafts were drawn from, the softmax of the draft's logits divided by the
temperature, without top-k and top-p, or None for a deterministic drafter. The emitted tokens are:

* for a request with drafts, the tokens that its policy emits for q = softmax(target_logits). A
  token with q = 0 is never emitted, even if its coin (the uniform random number) is exactly 0;
* if all drafted tokens were accepted, also the bonus token, which the engine has drawn from q;
* at a negative id, a placeholder that ends a request's draft, a token from q, whatever the policy.
  (Nothing was drafted there, so this is lossless; vLLM's function draws from (q − p)₊ instead.);
* for a greedy request (temperature 0), as in vLLM's function, the tokens of the target's (first)
  largest logits, up to the first that differs from the drafted token. Greedy requests with a policy
  charged in regret are verified apart, by rows at temperature 1 (:meth:`FlatBatch.parts`);
* for a request without drafts, its bonus token.

If all requests with drafts have the same number of drafts, no row is copied: the only new table is
softmax(target_logits), written once and kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.rows import softmax_in_order
from cactus_theory.policies import Policy
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier
from cactus_theory.verify.checks import assignment
from cactus_theory.verify.draw import Coins

PLACEHOLDER = -1


@dataclass(frozen=True)
class FlatBatch:
    """The arguments of one call of the runner's rejection sampler."""

    ids: Int[Tensor, "tokens"]
    counts: list[int]  # drafted tokens of each of B requests
    width: int  # most drafted tokens of one request
    draft_probs: Float[Tensor, "tokens vocab"] | None
    target_logits: Float[Tensor, "tokens vocab"]
    bonus: Int[Tensor, "batch"]  # drawn from the target after the last drafted token
    greedy: list[bool] | None  # whether each request has temperature 0; None: no request has
    generators: dict[int, torch.Generator]  # of requests with their own seed, by index
    # Requests whose draft rows were lost. Their drafted tokens are ignored and the next token is
    # drawn from q, which is lossless.
    unknown: frozenset[int] = frozenset()
    # Whether the batch has greedy requests that a policy judges by their rows at temperature 1. The
    # softmax then keeps the order of logits that rounding would make equal, so that the first
    # argmax of a row is the largest logit.
    relaxed: bool = False

    def parts(self, relaxed: Sequence[bool]) -> list[tuple[list[int], "FlatBatch"]]:
        """Split off the *relaxed* requests: the greedy ones whose drafts a regret policy judges.

        ``relaxed`` marks these requests. Return (indices of the requests, their batch) for each of
        the two parts that has requests. Relaxed requests get no draft rows: vLLM drafts for greedy
        requests by argmax, even where it returns rows for them beside sampled requests.
        """
        parts = list[tuple[list[int], FlatBatch]]()
        for are_relaxed in (False, True):
            rows = [row for row, is_relaxed in enumerate(relaxed) if is_relaxed == are_relaxed]
            if not rows:
                continue
            part = self if len(rows) == len(relaxed) else self._part(rows)
            if are_relaxed:
                # a policy judges these requests: ``greedy`` marks those that vLLM's rule decides
                deterministic = {"draft_probs": None, "unknown": frozenset()}
                part = replace(part, greedy=None, relaxed=True, **deterministic)
            parts.append((rows, part))
        return parts

    def _part(self, rows: Sequence[int]) -> "FlatBatch":
        """Return a batch of some requests, with copies of their rows."""
        owners = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        tokens = torch.isin(owners, torch.tensor(rows)).nonzero()[:, 0].to(self.ids.device)
        return replace(
            self,
            ids=self.ids[tokens],
            counts=[self.counts[row] for row in rows],
            draft_probs=None if self.draft_probs is None else self.draft_probs[tokens],
            target_logits=self.target_logits[tokens],
            bonus=self.bonus[rows],
            greedy=None if self.greedy is None else [self.greedy[row] for row in rows],
            generators={
                place: self.generators[row]
                for place, row in enumerate(rows)
                if row in self.generators
            },
            unknown=frozenset(place for place, row in enumerate(rows) if row in self.unknown),
        )

    @cached_property
    def drafted(self) -> list[int]:
        """Return the indices of the R requests with drafts."""
        return [row for row, count in enumerate(self.counts) if count]

    @cached_property
    def ragged(self) -> bool:
        """Return whether the requests with drafts have different numbers of drafted tokens."""
        return len({self.counts[row] for row in self.drafted}) > 1

    @cached_property
    def starts(self) -> list[int]:
        """Return the first index of each request with drafts in the flat tables."""
        starts = [0, *accumulate(self.counts)]
        return [starts[row] for row in self.drafted]

    @cached_property
    def target_rows(self) -> Float[Tensor, "R K1 vocab"]:
        """Return the target rows q; the row after a request's last drafted token is arbitrary."""
        logits = self.target_logits
        tokens, vocab = logits.shape
        if self.ragged:
            return self._padded(logits, 1, soften=True)
        flat = torch.empty(tokens + 1, vocab, dtype=torch.float32, device=logits.device)
        self._soften(logits, flat[:tokens])
        flat[tokens] = 0.0
        width = tokens // len(self.drafted)
        # the view gives each request one more row, which is the next request's first; the token
        # drawn from that row is discarded
        return flat.as_strided((len(self.drafted), width + 1, vocab), (width * vocab, vocab, 1))

    @cached_property
    def draft_rows(self) -> Float[Tensor, "R K vocab"] | None:
        """Return the draft rows p that the drafted tokens were drawn from, None without rows."""
        probs = self.draft_probs
        if probs is None or not self.ragged:
            return None if probs is None else probs.view(len(self.drafted), -1, probs.shape[-1])
        return self._padded(probs, 0)

    @cached_property
    def padded_ids(self) -> tuple[Int[Tensor, "R K"], Int[Tensor, "R"]]:
        """Return each request's ids, padded with −1, and their number, placeholders included."""
        counts = [self.counts[row] for row in self.drafted]
        device = self.ids.device
        lengths = torch.tensor(counts, device=device)
        if not self.ragged:
            return self.ids.long().view(len(counts), -1), lengths
        shape = len(counts), max(counts)
        ids = torch.full(shape, PLACEHOLDER, dtype=torch.int64, device=device)
        for place, (start, count) in enumerate(zip(self.starts, counts, strict=True)):
            ids[place, :count] = self.ids[start : start + count]
        return ids, lengths

    @cached_property
    def draft(self) -> Draft:
        """Return the draft for a verifier, without tokens of greedy and of ``unknown`` requests."""
        ids, lengths = self.padded_ids
        return Draft(ids.clamp(min=0), _counts(self, ids, lengths), self.draft_rows)

    def _soften(self, logits: Tensor, out: Tensor) -> None:
        if self.relaxed:
            softmax_in_order(logits, out)
        else:
            torch.softmax(logits, -1, out=out)

    def _padded(self, table: Tensor, extra_rows: int, soften: bool = False) -> Tensor:
        """Return flat rows, or their softmax, as one table a request, padded with zero rows."""
        shape = (len(self.drafted), max(self.counts) + extra_rows, table.shape[-1])
        rows = torch.empty(shape, dtype=torch.float32, device=table.device)
        for place, (row, start) in enumerate(zip(self.drafted, self.starts, strict=True)):
            count = self.counts[row]
            part = table[start : start + count]
            if soften:
                self._soften(part, rows[place, :count])
            else:
                rows[place, :count] = part
            rows[place, count:] = 0.0
        return rows

    @property
    def has_nan(self) -> bool:
        """Return whether some row is NaN (a softmax is NaN everywhere or nowhere)."""
        tables = (self.target_rows, self.draft_rows) if self.drafted else ()
        return any(rows is not None and bool(rows[..., 0].isnan().any()) for rows in tables)


def verify_flat(
    verifier: Verifier,
    policies: Sequence[Policy],
    batch: FlatBatch,
    coins: Coins | None = None,
    assigned: Assignment | None = None,
) -> tuple[Int[Tensor, "batch width1"], Verdict | None]:
    """Return the emitted tokens, (B, width + 1) int32 padded with −1, and the verdict.

    The verdict is None if no request had drafts. Values are not validated.

    Parameters
    ----------
    verifier : the verifier, ``chain`` or ``block``.
    policies : one policy for all requests, or one for each request.
    batch : the arguments of the runner's call.
    coins : ((R, K), (R,)) numbers in [0, 1) for the R requests with drafts; None: drawn from the
        generators.
    assigned : the policy of each drafted token, which replaces ``policies``.
    """
    output = batch.ids.new_full((len(batch.counts), batch.width + 1), PLACEHOLDER).int()
    output[:, 0] = batch.bonus
    if not batch.drafted:
        return output, None
    ids, lengths = batch.padded_ids
    draft = batch.draft
    if assigned is None:
        row_policies = [policies[row] for row in batch.drafted] if len(policies) > 1 else policies
        assigned = assignment(row_policies, ids)
    verdict = verifier.decide(assigned, batch.target_rows, draft, *(coins or toss(batch)))
    rows = _with_bonus(batch, verdict, lengths)
    if batch.greedy is not None:
        rows = _with_greedy(batch, rows, ids)
    drafted = torch.tensor(batch.drafted, device=output.device)
    output[drafted, : rows.shape[1]] = rows.int()
    return output, verdict


def toss(batch: FlatBatch) -> Coins:
    """Draw the coins (R, K) and (R,): random numbers, uniform on [0, 1), float64.

    A request with its own generator takes one number for each drafted token and one more, so that
    its tokens do not depend on the other requests of the batch.
    """
    width = max(batch.counts)
    device = batch.target_logits.device
    uniform = torch.rand(len(batch.drafted), width + 1, dtype=torch.float64, device=device)
    for place, row in enumerate(batch.drafted):
        source = batch.generators.get(row)
        if source is None:
            continue
        count = batch.counts[row]
        numbers = torch.rand(count + 1, generator=source, dtype=torch.float64, device=source.device)
        uniform[place, :count] = numbers[:count].to(device)
        uniform[place, width] = numbers[count]
    return uniform[:, :width], uniform[:, width]


def _counts(batch: FlatBatch, ids: Tensor, lengths: Tensor) -> list[int] | Tensor:
    """Return how many drafted tokens of each request with drafts a policy verifies.

    Tokens from a placeholder on do not count, nor do those of greedy requests and of requests in
    ``unknown``.
    """
    usable = (ids >= 0).long().cumprod(-1).sum(-1).minimum(lengths)
    without_draft = [
        row in batch.unknown or (batch.greedy is not None and batch.greedy[row])
        for row in batch.drafted
    ]
    if any(without_draft):
        usable = usable * ~torch.tensor(without_draft, device=usable.device)
    return usable if usable.is_cuda else usable.tolist()


def _with_bonus(batch: FlatBatch, verdict: Verdict, lengths: Tensor) -> Int[Tensor, "R K1"]:
    """Return the emitted tokens, with the engine's bonus token after fully accepted drafts."""
    bonus = batch.bonus[torch.tensor(batch.drafted, device=lengths.device)].long()
    last = torch.where(verdict.num_accepted == lengths, bonus, verdict.last)
    return replace(verdict, last=last).output_token_ids


def _with_greedy(
    batch: FlatBatch, rows: Int[Tensor, "R K1"], ids: Int[Tensor, "R K"]
) -> Int[Tensor, "R K1"]:
    """Return the emitted tokens, with those of greedy requests replaced by the likeliest tokens.

    A greedy request gets the token of the largest logit at each place, up to the first that differs
    from the drafted token. If none differs, the engine's bonus token follows.
    """
    assert batch.greedy is not None
    places = [place for place, row in enumerate(batch.drafted) if batch.greedy[row]]
    if not places:
        return rows
    best = rows.new_full((len(places), rows.shape[1]), PLACEHOLDER)
    for tokens, place in zip(best, places, strict=True):
        request, start = batch.drafted[place], batch.starts[place]
        count = batch.counts[request]
        tokens[:count] = batch.target_logits[start : start + count].argmax(-1)
        tokens[count] = batch.bonus[request]  # kept below only if all drafted tokens are accepted
    accepted = (ids[places] == best[:, :-1]).long().cumprod(-1).sum(-1, keepdim=True)
    columns = torch.arange(rows.shape[1], device=rows.device)
    rows = rows.clone()
    rows[places] = torch.where(columns <= accepted, best, PLACEHOLDER)
    return rows
