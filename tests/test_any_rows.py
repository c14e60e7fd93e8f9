"""Random calls of all that takes rows: whatever their precision, strides, shape, as in float64.

A call is made from its number alone, so that ``call(number)`` repeats what failed.
"""

import random
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.tensors import normalised
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.optimum.selection import KINDS
from cactus_theory.policies import Policy
from cactus_theory.policies.policy import PathState
from cactus_theory.verify import find_verifier
from tests.amounts import amount
from tests.rules import RULES

# the same numbers in another order of summation
RESUMMED = 1e-9
# how far coins may be moved for rows that are judged in float32: by what their sums may miss 1 by
MOVED = 1e-4
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAST_COIN, SURE = 1 - 2.0**-53, 1 - RESUMMED
# entries that sums, quotients and logarithms stumble over
ODD = (0.0, 0.0, 5e-324, 1e-309, 1e-40, 1e-8, 1.0)
SHAPES = ((), (1,), (3,), (2, 2), (0,), (2, 0))
LAYOUTS = ("plain", "transposed", "sliced", "in a graph")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
VERIFIERS = ("chain", "block", "tree")
CALLS, OFFERS = amount(400, 60_000), amount(300, 3000)


FOLLOWED: dict[str, list[Policy]] = {name: [] for name in VERIFIERS}
for followed, policy in product(VERIFIERS, RULES.values()):
    with suppress(ValueError):
        find_verifier(followed).check(policy)
        FOLLOWED[followed].append(policy)


def distributions(draw: random.Random, count: int, vocab: int) -> torch.Tensor:
    """Return float64 rows (count, V), some of them odd, deterministic or even."""
    rows = torch.ones(count, vocab, dtype=torch.float64)
    for row in rows:
        odd, even = draw.random() < 0.4, draw.random() < 0.2
        for token in range(0 if even else vocab):
            row[token] = draw.choice(ODD) if odd and draw.random() < 0.5 else draw.random() ** 3
        row[draw.randrange(vocab)] += 0.5
    return rows / rows.sum(-1, keepdim=True)


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same rows (..., V) on other strides."""
    if layout == "transposed":
        return rows.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "sliced":
        return torch.stack([rows, torch.full_like(rows, torch.nan)], -1).flatten(-2)[..., ::2]
    return rows.clone().requires_grad_() if layout == "in a graph" else rows


def pair(draw: random.Random, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows q and p of a shape, each in a precision and a layout."""
    vocab, device, dtype = draw.choice((2, 3, 5, 9)), draw.choice(DEVICES), draw.choice(DTYPES)
    dtypes = dtype, dtype if draw.random() < 0.7 else draw.choice(DTYPES)
    rows = [distributions(draw, torch.Size(shape).numel(), vocab) for _ in dtypes]
    if draw.random() < 0.1:
        rows[1] = rows[0]
    q, p = (
        laid_out(part.reshape(*shape, vocab).to(device, dtype), draw.choice(LAYOUTS))
        for part, dtype in zip(rows, dtypes, strict=True)
    )
    return q, p


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether an answer is that in float64, and in no graph."""
    same = found.shape == expected.shape and found.dtype == torch.float64
    near = same and torch.allclose(found, expected, RESUMMED, RESUMMED, equal_nan=True)
    return near and not found.requires_grad


def ask_policy(draw: random.Random) -> bool:
    """Ask a policy about rows, and again about each row alone, in float64."""
    rule = draw.choice([*RULES.values()])
    q, p = pair(draw, draw.choice(SHAPES))
    *shape, vocab = q.shape
    every = torch.arange(vocab, device=q.device).expand(q.shape)
    n = torch.full(shape, draw.randrange(vocab), device=q.device)
    methods = {"acceptance": (q, p, every), "residual": (q, p, n), "emitted": (q, p)}
    path = draw.choice([None, PathState(n.double() * 0 + 1)])
    # a row h has the precision of its rows
    wide = (rows.detach().double() for rows in (q, p))
    methods |= {"acceptance_row": (q, p), "target": (*wide, path)}
    name = draw.choice([*methods])
    given = methods[name]
    if name == "residual" and bool((rule.acceptance(q, p, n[..., None]) > SURE).any()):
        return True  # of what is rejected but by rounding there is no residual
    found = getattr(rule, name)(*given)
    places = product(*map(range, shape))
    alone = [getattr(rule, name)(*(one_of(part, at) for part in given)) for at in places]
    return found is None or not alone or agrees(found, torch.stack(alone).reshape(found.shape))


def one_of(part, at: tuple[int, ...]):
    """Return one row of an argument, plain and in float64."""
    if isinstance(part, PathState):
        return PathState(part.alive[at])
    row = part.detach()[at].clone() if isinstance(part, torch.Tensor) else part
    return row.double() if getattr(row, "is_floating_point", bool)() else row


def ask_function(draw: random.Random) -> bool:
    """Call a public function on rows, and on float64 copies of them divided by their sums."""
    rule, price = draw.choice([*RULES.values()]), draw.choice((0.3, 1.0, 4.0))
    q, p = pair(draw, draw.choice(SHAPES))
    exact = [normalised(rows.detach()) for rows in (q, p)]
    if draw.choice(("law", "optimum")) == "law":
        laws = (ct.emitted_law(rule, *rows) for rows in ((q, p), exact))
        accepted = (ct.audit(rule, *rows).acceptance for rows in ((q, p), exact))
        return agrees(*laws) and agrees(*accepted)
    best, expected = (ct.optimal_acceptance(*rows, price=price) for rows in ((q, p), exact))
    return agrees(best.acceptance, expected.acceptance) and agrees(best.lower, expected.lower)


def ask_verifier(draw: random.Random) -> bool:
    """Verify rows, and float64 copies with the same coins: the same tokens, one at least."""
    name, batch, width = draw.choice(VERIFIERS), draw.choice((0, 1, 3)), draw.choice((0, 1, 2, 3))
    rule = draw.choice(FOLLOWED[name])
    q, p = pair(draw, (batch, width + 1))
    p, vocab = p[:, :width], q.shape[-1]
    drawn = [draw.choices(range(vocab), row)[0] for rows in p.tolist() for row in rows]
    ids = torch.tensor(drawn, dtype=torch.int64, device=q.device).reshape(batch, width)
    parents = (torch.arange(width, device=q.device) - 1).expand(ids.shape).clone()
    if beside := width > 1 and draw.random() < 0.5:  # the last token is deterministic, at the text
        parents[:, -1], ids[:, -1] = -1, (ids[:, 0] + 1) % vocab
    sampled = (parents >= 0) | (torch.arange(width, device=q.device) == 0)
    tossed = [draw.choice((0.0, 0.5, LAST_COIN, draw.random())) for _ in range(7 * batch)]
    coins = torch.tensor(tossed, dtype=torch.float64, device=q.device).reshape(batch, 7)
    # sums of half precision miss 1 by so much that what a policy leaves may be rounding alone
    half = any(rows.dtype not in DECIDED for rows in (q, p))
    draws, validate = (width + 1 - beside) if batch else 1, draw.random() < 0.5 or half
    exact = [(normalised if validate else torch.Tensor.double)(rows.detach()) for rows in (q, p)]
    most = RESUMMED if validate or q.dtype == p.dtype == torch.float64 else MOVED
    # a draw of 0 draws the first token with any mass, in other precisions one of rounding alone
    least = 0.0 if q.dtype == p.dtype == torch.float64 else most

    def verify(rows: Any, validate=False, move=(0.0, 0.0)):
        # below 1 by more than rounding: what only rounding refuses, anything may replace
        accept = (coins[:, :width] + move[0]).clamp(0, 1 - 2 * most)
        draw = (coins[:, 3:] + move[1]).clamp(least, LAST_COIN)
        options = {"validate": validate, "coins": (accept, draw[:, 0])}
        if name in ("chain", "block"):
            call = getattr(ct, f"verify_{name}")
            return call(rule, *rows, ids, **options).output_token_ids
        options |= {"coins": (accept, draw[:, :draws]), "sampled": sampled}
        return ct.verify_tree(rule, rows[0], rows[1], ids, parents, **options).output_token_ids

    found = verify((q, p), validate)
    same = (verify(exact) == found).all(-1)
    for move in product((-most, 0.0, most), repeat=2) if not bool(same.all()) else ():
        same |= (verify(exact, move=move) == found).all(-1)
    return bool(same.all()) and bool((found[:, 0] >= 0).all())


ASK = (ask_policy, ask_policy, ask_function, ask_verifier)


def call(number: int) -> str:
    """Return what is wrong with the call of this number, nothing if it is right."""
    try:
        right = ASK[number % len(ASK)](random.Random(number))
    except Exception as error:
        return f"call({number}): {type(error).__name__}: {error}"
    return "" if right else f"call({number}): another answer than in float64"


@pytest.mark.parametrize("kind", range(len(ASK)))
def test_rows_of_any_kind_are_answered_as_in_float64(kind):
    wrong = list(filter(None, map(call, range(kind, CALLS, len(ASK)))))
    assert not wrong, f"{len(wrong)} calls: {wrong[:5]}"


def offer(number: int) -> str:
    """Return what is wrong with a selection law of odd rows, nothing if it is a law."""
    draw = random.Random(number)
    q, p = distributions(draw, 2, draw.choice((2, 3, 5, 9)))
    kind, deterministic = draw.choice(KINDS), [draw.randrange(len(q))]
    k = draw.randint(1, 3)
    with np.errstate(all="raise", under="raise" if kind == "iid" else "ignore"):
        law = ct.selection_law(q, p, k, kind, None if kind == "iid" else deterministic)
    sound = bool((law >= 0).all()) and abs(float(law.sum()) - 1) < RESUMMED
    return "" if sound else f"offer({number}): {kind} {law.tolist()}"


def test_selection_laws_of_odd_rows_are_laws():
    """Zeros and denormals among them, whatever numpy warns of."""
    assert not list(filter(None, map(offer, range(OFFERS))))
