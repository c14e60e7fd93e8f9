"""Hold a round of decoding to one use of every uniform number.

If the token that replaces a refused one is drawn with the number that drew the refused one, or
with the one that refused it, every single row still looks right: only the joint law of what is
drafted and what is emitted is wrong.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._decode import Opening
from cactus_theory.decoding._round import Decode
from cactus_theory.decoding._sampling import Coins, Uniforms
from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.policies import Policy
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier

# the likeliest drafted tokens, and of the tokens that follow each, that are looked at
MOST = 16
# shares thinner than this are left out: models round differently in other batches
THIN = 1e-3
# rows that are also decoded as a batch of one, which tosses its coins elsewhere
SINGLY = 4
# drafts of a batch whose numbers are counted
WANTED = (3, 1, 2)


class _Watching(Verifier):
    """A verifier that remembers what it was shown."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.name = verifier, verifier.name  # type: ignore[misc]
        self.q: Tensor | None = None
        self.draft: Draft | None = None

    def coins(self, drafted: int) -> int:
        return self.verifier.coins(drafted)

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        probs = None if draft.probs is None else draft.probs.clone()
        self.q = target_probs.clone()
        self.draft = Draft(draft.token_ids.clone(), list(draft.lengths), probs)
        return self.verifier.verify(assigned, target_probs, draft, accept, draw)


def check_every_number_is_used_once(verifier: Verifier) -> None:
    """Toss coins from streams of different numbers; raise AssertionError if one comes twice."""
    for wanted in (WANTED, WANTED[:1]):
        coins = Coins(len(wanted), 0, torch.device("cpu"))
        coins.streams = [_stream(1 + torch.arange(64.0).double()) for _ in wanted]
        draft, accept, draw = coins.toss(wanted, verifier.coins)
        for row, own in enumerate(wanted):
            used = torch.cat(
                [draft[row, :own], accept[row, : verifier.coins(own)], draw[row : row + 1]]
            )
            if len(used.unique()) < len(used) or bool((used == 0).any()):
                raise AssertionError(
                    "coins: a uniform number must be used once; a row used numbers "
                    f"{used.tolist()} of its stream, for drafts, acceptance and draw"
                )


def _stream(numbers: Float[Tensor, "count"]) -> Uniforms:
    """Return a stream of given numbers."""
    return lambda count: numbers[:count]


def check_one_round(
    drafter: Drafter,
    target_model: Any,
    prompt: Sequence[int],
    temperature: float,
    verifier: Verifier,
    policy: Policy,
) -> None:
    """Decode one round of one drafted token with every combination of coins; compare.

    The first number of a row's stream draws the drafted token n, the second accepts or refuses
    it, the third draws the token after it: the combinations are cells of mass
    p_n × Pr(accepted or not | n) × its law of the next token, so this is the joint law of
    (drafted, accepted, next), enumerated.
    """
    decode = _OneRound(drafter, target_model, list(prompt), temperature, verifier, policy)
    _, shown = decode([[0.5, 0.5, 0.5]])
    if shown.draft is None or not shown.draft.lengths[0]:
        return
    probs = shown.draft.probs
    drafted = [(int(shown.draft.token_ids[0, 0]), 0.5)]
    if probs is not None:
        drafted = _middles(probs[0, 0])
    _, shown = decode([[u, 0.5, 0.5] for _, u in drafted])
    assert shown.q is not None and shown.draft is not None
    law = verifier.law(Assignment((policy,)), shown.q.double(), shown.draft)
    numbers, due = [], []
    for row, (token, u) in enumerate(drafted):
        accepted = float(law.stop[row, 1])
        for count, v, share in (
            (0, (1 + accepted) / 2, 1 - accepted),
            (1, accepted / 2, accepted),
        ):
            if share > THIN:
                for following, w in _middles(law.last[row, count]):
                    numbers.append([u, v, w])
                    due.append([token][:count] + [following])
    _compare(decode(numbers)[0], due, numbers)
    for one, own in list(zip(numbers, due, strict=True))[:: max(1, len(due) // SINGLY)]:
        _compare(decode([one])[0], [own], [one])


def _middles(row: Float[Tensor, "vocab"]) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a row, each with the coin in the middle of its share."""
    row = row.double() / row.double().sum()
    middle = row.cumsum(-1) - row / 2
    best = row.topk(min(MOST, len(row))).indices
    return [(int(token), float(middle[token])) for token in best if row[token] > THIN]


def _compare(found: list[list[int]], due: list[list[int]], numbers: list[list[float]]) -> None:
    for own, expected, coins in zip(found, due, numbers, strict=True):
        if own != expected:
            raise AssertionError(
                "coins: what is drafted, what is accepted and what follows must have numbers of "
                f"their own; with {coins} for the three, {expected} is due and {own} was emitted"
            )


class _OneRound:
    """Decode one round of at most one drafted token, a row for each list of numbers."""

    def __init__(
        self,
        drafter: Drafter,
        target_model: Any,
        prompt: list[int],
        temperature: float,
        verifier: Verifier,
        policy: Policy,
    ) -> None:
        self.drafter, self.target_model, self.prompt = drafter, target_model, prompt
        self.temperature, self.verifier, self.policy = temperature, verifier, policy

    def __call__(self, numbers: list[list[float]]) -> tuple[list[list[int]], _Watching]:
        """Return the new tokens of every row, and what the verifier was shown."""
        watching = _Watching(self.verifier)
        options = DecodeOptions(
            policy=self.policy,
            num_draft_tokens=1,
            max_new_tokens=2,
            temperature=self.temperature,
            verifier=watching,
            meter=False,
        )
        ids = torch.tensor([self.prompt] * len(numbers))
        opening = Opening(self.target_model, self.drafter, ids, options)
        streams = [_stream(torch.tensor(own, dtype=torch.float64)) for own in numbers]
        opening.coins.streams = streams
        return Decode(opening).round(), watching
