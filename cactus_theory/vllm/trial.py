"""Judge drafts by a policy before a request may use it in a step that it shares with others."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from cactus_theory.base.arguments import normalised
from cactus_theory.decoding._verification import rows_at
from cactus_theory.policies import Policy
from cactus_theory.policies._path import Path
from cactus_theory.verify.draw import Coins
from cactus_theory.vllm.batch import FlatBatch, verify_flat
from cactus_theory.vllm.settings import Settings

# target and draft: alike, apart, certain of one token each (the same, or not), holes in either,
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
# of an emitted law, which is float64 and may end a search for its knob at 1e-9
ROUNDING = 1e-6
DRAFTED = (0, 3, 3, 0, 1, 0, 2)
# at 0 a token is kept if that is possible, at the last one it is refused if that is
COINS = (0.0, 0.37, 1 - 2**-53)
# every row by itself at each coin, and two drafts of all of them
COUNTS = (1,) * (len(ROWS) * len(COINS)) + (len(ROWS),) * 2


@cache
def _batch(certain: bool) -> tuple[FlatBatch, Coins]:
    """Return the drafts and their coins."""
    copies = len(COINS) + 2
    target, draft = (torch.tensor(side).repeat(copies, 1) for side in zip(*ROWS, strict=True))
    batch = FlatBatch(
        ids=torch.tensor(DRAFTED * copies, dtype=torch.int32),
        counts=list(COUNTS),
        width=len(ROWS),
        draft_probs=None if certain else draft,
        target_logits=target.log(),
        bonus=torch.zeros(len(COUNTS), dtype=torch.int32),
        greedy=None,
        generators={},
    )
    coin = [own for own in COINS for _ in ROWS] + [0.0, COINS[1]]
    coins = torch.tensor(coin, dtype=torch.float64)
    return batch, (coins[:, None].repeat(1, len(ROWS)), coins)


def try_rows(rule: Policy, settings: Settings) -> None:
    """Verify a few drafts, sampled and certain, and measure them, as a step of the engine does.

    Raises
    ------
    ArithmeticError
        A token outside the vocabulary, or a divergence that is no number.
    Exception
        Whatever the policy raises.
    """
    for certain in (False, True):
        batch, coins = _batch(certain)
        # a batch of its own: its rows are in memory that is written anew
        output, seen = verify_flat(settings.verifier, [rule], replace(batch), coins)
        assert seen is not None
        if not bool(((output >= -1) & (output < len(ROWS[0][0]))).all()):
            raise ArithmeticError("a token outside the vocabulary")
        rows = slice(0, len(ROWS))
        _try_law(rule, settings, *rows_at(len(COUNTS) - 1, rows, seen))


def _try_law(rule: Policy, settings: Settings, q: Tensor, p: Tensor) -> None:
    """Raise ArithmeticError unless what a meter reads is a law, and its divergence a number."""
    q, p = normalised(q), normalised(p)
    path = Path(torch.ones(len(q), dtype=torch.float64), torch.zeros(len(q), dtype=torch.int64))
    law = settings.verifier.emitted(rule, q, p, path)
    least, off = float(law.amin()), float((law.sum(-1) - 1).abs().amax())
    if not (least >= -ROUNDING and off <= ROUNDING):
        raise ArithmeticError("a law that does not sum to 1")
    if bool(settings.divergence.value(law, q).isnan().any()):
        raise ArithmeticError("a divergence that is no number")
