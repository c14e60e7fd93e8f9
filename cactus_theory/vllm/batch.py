r"""Verify the drafts of a batch in the layout of vLLM's V1 runner; torch only.

Rows come flat: the N drafted tokens of B requests one after another, ``target_logits`` (N, V)
with temperature, top-k and top-p applied (−∞ where a token is excluded), ``draft_probs`` (N, V)
as softmax of the draft's logits over T, without top-k and top-p, which is the law the drafts were
drawn from, or None where the drafter is deterministic. What is emitted:

* a request with drafts follows its policy from q = softmax(target_logits). A token with q = 0 is
  never emitted, coin 0 included;
* where all are accepted, the bonus token that the engine has drawn from the target follows;
* a negative id ends a request's draft; the token there comes from q, whatever the policy. (A
  placeholder tells nothing about q, so this is lossless; stock code draws from (q − p)₊.);
* greedy requests (temperature 0) accept a drafted token iff it is the target's first largest
  logit, as stock code does, whatever the policy;
* requests without drafts get their bonus token.

Where all requests have the same number of drafts, no row is copied and the one table that is
written is softmax(target_logits), in memory that is kept.

:func:`try_rows` judges a few drafts so by a policy, before a request may use it in a step that it
shares with others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.arguments import normalised
from cactus_theory.base.reused_memory import scratch
from cactus_theory.decoding._verification import rows_at
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import Path
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier
from cactus_theory.verify._checks import assignment
from cactus_theory.verify.draft import Verified
from cactus_theory.verify.draw import Coins
from cactus_theory.vllm.settings import Settings

PLACEHOLDER = -1


@dataclass(frozen=True)
class FlatBatch:
    """A call of the runner's rejection sampler."""

    ids: Int[Tensor, "tokens"]
    counts: list[int]  # drafted tokens of each of B requests
    width: int  # most drafted tokens of one request
    draft_probs: Float[Tensor, "tokens vocab"] | None
    target_logits: Float[Tensor, "tokens vocab"]
    bonus: Int[Tensor, "batch"]  # drawn from the target after the last draft
    greedy: list[bool] | None  # whether the temperature is 0; None if it is for none
    generators: dict[int, torch.Generator]  # of the requests with a seed of their own, by index
    # Requests whose tokens were drawn from rows that were lost. Their drafts are not used: the next
    # token comes from q. What was drafted has no part in that, so it is exact.
    unknown: frozenset[int] = frozenset()

    @cached_property
    def drafted(self) -> list[int]:
        """Return the requests with drafts, R of them."""
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
        """Return softmax of the target's logits; a request's row after its last is arbitrary."""
        logits = self.target_logits
        tokens, vocab = logits.shape
        if self.ragged:
            return self._padded("vllm.target", logits, 1, soften=True)
        flat = scratch("vllm.target", (tokens + 1, vocab), torch.float32, logits.device)
        torch.softmax(logits, -1, out=flat[:tokens])
        flat[tokens] = 0.0
        width = tokens // len(self.drafted)
        # the row after a request's last is the next request's first; its draw is discarded
        return flat.as_strided((len(self.drafted), width + 1, vocab), (width * vocab, vocab, 1))

    @cached_property
    def draft_rows(self) -> Float[Tensor, "R K vocab"] | None:
        """Return the rows that the drafts were drawn from."""
        probs = self.draft_probs
        if probs is None or not self.ragged:
            return None if probs is None else probs.view(len(self.drafted), -1, probs.shape[-1])
        return self._padded("vllm.draft", probs, 0)

    @cached_property
    def padded_ids(self) -> tuple[Int[Tensor, "R K"], Int[Tensor, "R"]]:
        """Return drafted ids padded with −1, and how many there are, placeholders included."""
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
        """Return the draft for a verifier, without tokens of greedy and unknown requests."""
        ids, lengths = self.padded_ids
        return Draft(ids.clamp(min=0), _counts(self, ids, lengths), self.draft_rows)

    def _padded(self, slot: str, table: Tensor, extra_rows: int, soften: bool = False) -> Tensor:
        """Return flat rows, or their softmax, request by request, with zeros after them."""
        shape = (len(self.drafted), max(self.counts) + extra_rows, table.shape[-1])
        rows = scratch(slot, shape, torch.float32, table.device)
        for place, (row, start) in enumerate(zip(self.drafted, self.starts, strict=True)):
            count = self.counts[row]
            part = table[start : start + count]
            if soften:
                torch.softmax(part, -1, out=rows[place, :count])
            else:
                rows[place, :count] = part
            rows[place, count:] = 0.0
        return rows

    @property
    def has_nan(self) -> bool:
        """Return whether some row is not numbers (a softmax is NaN everywhere or nowhere)."""
        if not self.drafted:
            return False
        tables = (
            [self.target_rows] if self.draft_rows is None else [self.target_rows, self.draft_rows]
        )
        return any(bool(rows[..., 0].isnan().any()) for rows in tables)


def verify_flat(
    verifier: Verifier,
    policies: Sequence[Policy],
    batch: FlatBatch,
    coins: Coins | None = None,
    assigned: Assignment | None = None,
) -> tuple[Int[Tensor, "batch width1"], Verified | None]:
    """Return (B, width + 1) int32 padded with −1, and what was verified (None: nothing was).

    ``policies`` has one policy for all requests or one for each; ``assigned``, of the requests
    with drafts, replaces them token by token, and ``coins`` ((R, K), (R,)) in [0, 1), R the
    requests with drafts, the generators. Values are not validated.
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
    verdict = verifier.verify(assigned, batch.target_rows, draft, *(coins or toss(batch)))
    rows = _with_bonus(batch, verdict, lengths)
    if batch.greedy is not None:
        rows = _with_greedy(batch, rows, ids)
    at = torch.tensor(batch.drafted, device=output.device)
    output[at, : rows.shape[1]] = rows.int()
    return output, Verified(assigned, batch.target_rows, draft, verdict)


def toss(batch: FlatBatch) -> Coins:
    """Return coins (R, K) and (R,), uniform on [0, 1), float64.

    A request with a generator of its own takes from it one number more than it has drafts: what it
    emits depends on no other request.
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
    """Return the numbers of drafted tokens to verify: 0 for greedy and unknown requests."""
    usable = (ids >= 0).long().cumprod(-1).sum(-1).minimum(lengths)
    barred = [
        row in batch.unknown or (batch.greedy is not None and batch.greedy[row])
        for row in batch.drafted
    ]
    if any(barred):
        usable = usable * ~torch.tensor(barred, device=usable.device)
    return usable if usable.is_cuda else usable.tolist()


def _with_bonus(batch: FlatBatch, verdict: Verdict, lengths: Tensor) -> Int[Tensor, "R K1"]:
    """Return the emitted tokens, with the engine's own after drafts accepted as a whole."""
    bonus = batch.bonus[torch.tensor(batch.drafted, device=lengths.device)].long()
    last = torch.where(verdict.num_accepted == lengths, bonus, verdict.last)
    return replace(verdict, last=last).output_token_ids


def _with_greedy(
    batch: FlatBatch, rows: Int[Tensor, "R K1"], ids: Int[Tensor, "R K"]
) -> Int[Tensor, "R K1"]:
    """Return the emitted tokens, with greedy requests decided by the target's largest logits."""
    assert batch.greedy is not None
    places = [place for place, row in enumerate(batch.drafted) if batch.greedy[row]]
    if not places:
        return rows
    best = rows.new_full((len(places), rows.shape[1]), PLACEHOLDER)
    for number, place in enumerate(places):
        row, start = batch.drafted[place], batch.starts[place]
        count = batch.counts[row]
        best[number, :count] = batch.target_logits[start : start + count].argmax(-1)
        best[number, count] = batch.bonus[row]
    drafted = ids[places]
    place = torch.arange(rows.shape[1], device=rows.device)
    accepted = (drafted == best[:, :-1]).long().cumprod(-1).sum(-1, keepdim=True)
    rows = rows.clone()
    rows[places] = torch.where(place <= accepted, best, PLACEHOLDER)
    return rows


# trial rows of target and draft: alike, apart, one-hot (same token, or not), holes in either,
# probabilities that only float64 tells from 0
ROWS = (
    ((0.4, 0.3, 0.2, 0.1), (0.25, 0.25, 0.25, 0.25)),
    ((0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.4)),
    ((0.9999, 5e-5, 5e-5, 0.0), (0.0, 5e-5, 5e-5, 0.9999)),
    ((1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)),
    ((1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)),
    ((0.0, 0.5, 0.5, 0.0), (0.2, 0.2, 0.0, 0.6)),
    ((0.5, 0.5 - 1e-30, 1e-30, 0.0), (1e-30, 0.5, 0.5 - 1e-30, 0.0)),
)
# largest error of an emitted law, which is float64 and may end a search for its knob at 1e-9
LAW_ROUNDING = 1e-6
DRAFTED = (0, 3, 3, 0, 1, 0, 2)
# trial coins: at 0 a token is accepted if that is possible, at the last it is refused if possible
COINS = (0.0, 0.37, 1 - 2**-53)
# drafted tokens of each trial request: one row at each coin, and two drafts of all rows
TRIAL_COUNTS = (1,) * (len(ROWS) * len(COINS)) + (len(ROWS),) * 2


@cache
def _trial_batch(deterministic: bool) -> tuple[FlatBatch, Coins]:
    copies = len(COINS) + 2
    target, draft = (
        torch.tensor(side, device="cpu").repeat(copies, 1) for side in zip(*ROWS, strict=True)
    )
    batch = FlatBatch(
        ids=torch.tensor(DRAFTED * copies, dtype=torch.int32, device="cpu"),
        counts=list(TRIAL_COUNTS),
        width=len(ROWS),
        draft_probs=None if deterministic else draft,
        target_logits=target.log(),
        bonus=torch.zeros(len(TRIAL_COUNTS), dtype=torch.int32, device="cpu"),
        greedy=None,
        generators={},
    )
    coin = [value for value in COINS for _ in ROWS] + [0.0, COINS[1]]
    coins = torch.tensor(coin, dtype=torch.float64, device="cpu")
    return batch, (coins[:, None].repeat(1, len(ROWS)), coins)


def try_rows(policy: Policy, settings: Settings) -> None:
    """Verify a few sampled and deterministic drafts and measure them, as a step of the engine does.

    Raises what the policy raises, and ArithmeticError for a token outside the vocabulary or a
    divergence that is no number.
    """
    for deterministic in (False, True):
        batch, coins = _trial_batch(deterministic)
        # a batch of its own: its rows are in memory that is written anew
        output, verified = verify_flat(settings.verifier, [policy], replace(batch), coins)
        assert verified is not None
        if not bool(((output >= -1) & (output < len(ROWS[0][0]))).all()):
            raise ArithmeticError("a token outside the vocabulary")
        rows = slice(0, len(ROWS))
        _try_law(policy, settings, *rows_at(len(TRIAL_COUNTS) - 1, rows, verified))


def _try_law(policy: Policy, settings: Settings, q: Tensor, p: Tensor) -> None:
    """Raise ArithmeticError unless what a meter reads is a law, and its divergence a number."""
    q, p = normalised(q), normalised(p)
    path = Path(torch.ones(len(q), dtype=torch.float64, device=q.device))
    law = settings.verifier.emitted(policy, q, p, path)
    least, off = float(law.amin()), float((law.sum(-1) - 1).abs().amax())
    if not (least >= -LAW_ROUNDING and off <= LAW_ROUNDING):
        raise ArithmeticError("a law that does not sum to 1")
    if bool(settings.divergence.value(law, q).isnan().any()):
        raise ArithmeticError("a divergence that is no number")
