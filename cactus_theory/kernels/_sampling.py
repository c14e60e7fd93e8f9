# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""The noise of drafted tokens: one token from each row of logits, by an exponential race."""

import triton
import triton.language as tl

from cactus_theory.kernels import _streams
from cactus_theory.kernels._noise import bits_of, exponential, tokens_of
from cactus_theory.kernels._race import contest, foremost
from cactus_theory.kernels._rows import temperature_of

DRAFT = tl.constexpr(_streams.DRAFT)


@triton.jit
def race_alone(
    logits, temperature, seeds, positions, keys, tokens, row_step, vocab, scalar, place,
    PARTS: tl.constexpr, PART: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write the winner of one part of each row. Grid: (rows, PARTS)."""
    b, part = tl.program_id(0), tl.program_id(1)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    row = logits + b.to(tl.int64) * row_step
    counter = part * (PART // 4) + tl.arange(0, PART // 4)
    drawn = bits_of(tl.load(seeds + b), counter.to(tl.uint32), tl.load(positions + b), place, DRAFT)
    best = tl.full((PART // 4,), -float("inf"), tl.float64)
    winner = tl.full((PART // 4,), 2147483647, tl.int32)
    for k in tl.static_range(4):
        token = tokens_of(counter, k)
        logit = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))  # wins: no token is drawn then
        delay = tl.where(greedy, 0.0, tl.log(exponential(drawn[k])))
        best, winner = contest(best, winner, logit.to(tl.float64) * inverse - delay, token)
    most, first = foremost(best, winner)
    tl.store(keys + b * PARTS + part, most)
    tl.store(tokens + b * PARTS + part, first)


@triton.jit
def pick_alone(keys, tokens, out, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Write the winner of all parts, −1 where the row is no distribution. Grid: (rows,)."""
    b = tl.program_id(0)
    part = tl.arange(0, MOST_PARTS)
    at = b * PARTS + part
    key = tl.load(keys + at, mask=part < PARTS, other=-float("inf"))
    most, token = foremost(key, tl.load(tokens + at, mask=part < PARTS, other=2147483647))
    tl.store(out + b, tl.where(tl.abs(most) < float("inf"), token, -1).to(tl.int64))
