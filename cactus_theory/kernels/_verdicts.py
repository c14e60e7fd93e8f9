# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Kernels that decide which drafted tokens are accepted: chains token by token, blocks as a whole.

A chain is decided by q and p of the drafted tokens alone, except under a band: rows are read only
for tokens that q and p leave open. A block needs the alive ratio P down the path, and then one sum
per node (formulas as in :mod:`cactus_theory.verify.block`). Under a band, the rows of the
first node that may lower P and of all later nodes are solved at once, before P is computed: the
bands of kernels do not depend on P.
Parameters are the groups of ``buffers.py``; ``coin`` is the coin of a drafted token, float64 in
[0, 1); ``_rows.py`` describes all other values.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import policies
from cactus_theory.kernels._band import READ, part_of_rows, upper_edge
from cactus_theory.kernels._draws import ACCEPT, coins_of
from cactus_theory.kernels._rows import (
    draft_length,
    drafted_chances,
    number_of,
    take_turn,
    temperature_of,
)

SCALED, MIXED, CACTUS, CACTUS_EXACT, BAND = map(tl.constexpr, policies.KINDS)
# Newton steps from γ = 1 to the root at δ = 1e-6: ten or so halve the distance, the rest square it
EXACT_STEPS = tl.constexpr(20)
# verdicts on a drafted token: OPEN if its row must be read under a band
REFUSED, ACCEPTED, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def two_points(x, q_n):
    """Return the KL divergence of (x, 1 − x) from (q_n, 1 − q_n), float64."""
    return x * tl.log(x / q_n) + (1 - x) * tl.log((1 - x) / (1 - q_n))


@triton.jit
def exact_ceiling(q_n, above, delta):
    """Return the γ from q_n to ``above`` with D(γ‖q_n) = ``delta``, float64.

    D is :func:`two_points`. If D at ``above`` does not exceed ``delta``, the result is ``above``.
    Else Newton steps start there; as D is convex, every step stays above the root.
    """
    inner = (q_n > 0) & (q_n < 1) & (above > q_n) & (above < 1)
    q = tl.where(inner, q_n, 0.5)
    x = tl.where(inner, above, 0.75)
    for _ in range(EXACT_STEPS):
        slope = tl.log(x * (1 - q) / (q * (1 - x)))
        x = tl.maximum(x - tl.maximum(two_points(x, q) - delta, 0.0) / slope, q * 1.0000001)
    return tl.where(inner, x, q_n)


@triton.jit
def verdicts_of(q_n, p_n, coin, knob, KIND: tl.constexpr, DETERMINISTIC_ROW):
    """Return the verdicts on tokens, and the scale s of the residual after a rejected token.

    ``knob`` is ``KernelPolicy.knob``. DETERMINISTIC_ROW: whether p is one-hot. Under the
    band a verdict is OPEN if the row must be read, and REFUSED if no band accepts the token.
    """
    threshold = coin * p_n
    scale = tl.full(q_n.shape, 1.0, tl.float64)
    if KIND == SCALED:
        accepted = threshold < q_n * knob
    elif KIND == MIXED:
        accepted = (q_n > 0) & (threshold < knob * p_n + (1 - knob) * q_n)
    elif KIND == CACTUS:
        q = tl.minimum(q_n, 1.0)
        gamma = tl.minimum(q + tl.sqrt(2 * knob * q * (1 - q)), 1.0)  # the most that h_n may be
        accepted = threshold < gamma
        scale = tl.where(gamma > q, (1 - gamma) / tl.maximum(1 - q, 1e-37), 1.0)
    elif KIND == CACTUS_EXACT:
        inner = (q_n > 0) & (q_n < 1) & (threshold > q_n)
        # 0.75 and 0.5 keep logarithms finite where there is nothing to compare
        x = tl.where(inner, threshold, 0.75)
        within = inner & (two_points(x, tl.where(inner, q_n, 0.5)) < knob)
        accepted = (threshold < q_n) | within
        gamma = exact_ceiling(q_n, threshold, knob)
        scale = tl.where(gamma > q_n, (1 - gamma) / tl.maximum(1 - q_n, 1e-37), 1.0)
    else:
        lossless = threshold < q_n
        raised = q_n / (knob * (1 - q_n) + q_n)  # h_n if p is one-hot at n
        deterministic = tl.where(DETERMINISTIC_ROW, coin < raised, False)
        # accepted iff coin · p_n/q_n is below the band's upper edge, which is at most 1/knob
        within_reach = (q_n > 0) & (threshold * knob < q_n)
        accepted = lossless | deterministic
        opened = within_reach & (DETERMINISTIC_ROW == 0)
    is_number = (q_n == q_n) & (p_n == p_n)  # explicit, as the minimum of a device may drop a NaN
    accepted = accepted & is_number
    if KIND == BAND:
        return tl.where(accepted, ACCEPTED, tl.where(opened, OPEN, REFUSED)), scale
    return tl.where(accepted, ACCEPTED, REFUSED), scale


@triton.jit
def first_refusal(verdict, place, length):
    """Return how many of the first ``length`` tokens come before the first REFUSED token."""
    return tl.min(tl.where((place < length) & (verdict == REFUSED), place, length), 0)


@triton.jit
def sum_of_parts(slot, read, sums, form: tl.constexpr):
    """Return the sums of rows, float64, from sums of parts; 0 where ``read`` is false."""
    part = tl.arange(0, form.most_parts)[None, :]
    at = slot.to(tl.int64)[:, None] * form.parts + part
    there = read[:, None] & (part < form.parts)
    return tl.sum(tl.load(sums + at, mask=there, other=0.0).to(tl.float64), 1)


@triton.jit
def judge(
    requests, target, draft, softmax, decision, band, knob, form: tl.constexpr, KIND: tl.constexpr
):
    """Write each request's number of accepted tokens and the scale of the residual. Grid: (B,).

    With ``band`` the count is only an upper bound. Rows to read are then marked in ``band``: the
    rows of OPEN tokens, and the row of the first token that no band accepts, whose band is needed
    if the token is reached and rejected. ``band`` is None if no token can be OPEN.
    """
    take_turn(form)
    b = tl.program_id(0)
    place = tl.arange(0, form.places)
    length = draft_length(b, requests, form)
    q_n, p_n, greedy = drafted_chances(b, length, requests, target, draft, softmax, form)
    seed, position = tl.load(requests.seeds + b), tl.load(requests.positions + b)
    coin = coins_of(seed, position, place, ACCEPT)
    ratio = number_of(knob)
    deterministic = greedy | form.deterministic
    verdict, scale = verdicts_of(q_n, p_n, coin, ratio, KIND, deterministic)
    count = first_refusal(verdict, place, length)
    tl.store(decision.accepted + b, count)
    if band is not None:
        tl.store(decision.scales + b, ratio * 0 + 1.0)  # ``scale_of`` multiplies by the edge a
        on = place < length
        slot = b * form.width + place
        opened = (verdict == OPEN) & (place < count)
        read = opened | (on & (place == count) & (deterministic == 0))
        tl.store(decision.verdicts + slot, verdict, mask=on)
        # an OPEN token's own ratio, at which ``band_judge`` needs E; else the middle of [1, 1/c]
        start = tl.where(opened, coin * p_n / tl.where(opened, q_n, 1.0), tl.sqrt(1 / ratio))
        tl.store(band.points + slot, start, mask=on)
        tl.store(band.flags + slot, read.to(tl.int32), mask=place < form.width)
    else:
        tl.store(decision.scales + b, tl.sum(tl.where(place == count, scale, 0.0), 0))


@triton.jit
def band_judge(requests, decision, band, form: tl.constexpr):
    """Decide OPEN tokens: accepted iff E < 0 at the token's ratio coin · p_n/q_n. Grid: (B,).

    The coin is below φ = b q_n/p_n iff the ratio is below the edge b, and E (``_band.py``) rises
    through 0 at b. Afterwards only the row of each request's first rejected token is marked to be
    solved.
    """
    take_turn(form)
    b = tl.program_id(0)
    length = draft_length(b, requests, form)
    place = tl.arange(0, form.places)
    slot = b * form.width + place
    on = place < length
    verdict = tl.load(decision.verdicts + slot, mask=on, other=ACCEPTED)
    flag = tl.load(band.flags + slot, mask=on, other=0)
    excess = sum_of_parts(slot, (flag & READ) != 0, band.excess, form)
    verdict = tl.where(verdict == OPEN, tl.where(excess < 0, ACCEPTED, REFUSED), verdict)
    count = first_refusal(verdict, place, length)
    tl.store(decision.accepted + b, count)
    tl.store(band.flags + slot, tl.where(place == count, flag, 0), mask=on)


@triton.jit
def block_entries(requests, target, draft, softmax, block, band, knob, form: tl.constexpr):
    """Write q_n and p_n of each drafted token, and mark the rows whose band must be solved.

    Grid: (B,). ``band`` is None if no row has a band to solve.
    """
    take_turn(form)
    b = tl.program_id(0)
    place = tl.arange(0, form.places)
    length = draft_length(b, requests, form)
    q_n, p_n, greedy = drafted_chances(b, length, requests, target, draft, softmax, form)
    on = place < length
    slot = b * form.width + place
    tl.store(block.q + slot, q_n, mask=on)
    tl.store(block.p + slot, p_n, mask=on)
    if band is not None:
        # P is 1 up to the first token with p_n > q_n, as h_n ≥ min(p_n, q_n)
        lowered = tl.min(tl.where(on & (p_n > q_n), place, form.width), 0)
        read = on & (place >= lowered) & (greedy == 0)
        tl.store(band.flags + slot, read.to(tl.int32), mask=place < form.width)
        tl.store(band.points + slot, tl.sqrt(1 / number_of(knob)) + q_n * 0, mask=on)


@triton.jit
def block_walk(requests, block, band, knob, form: tl.constexpr, KIND: tl.constexpr):
    """Write the alive ratio P and the scale s of the residual (s q − p)₊ at each node.

    Also writes the residual's mass where no row has to be read for it (``closed``), and the last
    node with P = 1, or the block's last node if its coin passes (``sure``). Grid: (B,).
    """
    take_turn(form)
    b = tl.program_id(0)
    seed, position = tl.load(requests.seeds + b), tl.load(requests.positions + b)
    length = draft_length(b, requests, form)
    _, greedy = temperature_of(b, requests, form)
    deterministic = greedy | form.deterministic
    ratio = number_of(knob)
    ratio_alive = ratio * 0 + 1.0  # 1 as float64, the type of the values that replace it
    last = length * 0
    for place in range(form.width):
        slot = b * form.width + place
        on = place < length
        q_n = tl.load(block.q + slot, mask=on, other=1.0)
        p_n = tl.load(block.p + slot, mask=on, other=1.0)
        h_n, lower = q_n, ratio * 0 + 1.0  # lossless, unless a band replaces them
        if band is not None:
            upper = upper_edge(slot, band, form)
            marked = on & (tl.load(band.flags + slot, mask=on, other=0) != 0)
            raised = tl.minimum(tl.maximum(p_n, upper * ratio * q_n), upper * q_n)
            h_n = tl.where(marked, raised, tl.maximum(p_n, q_n))
            lower = tl.where(marked, upper * ratio, 1.0)
        if KIND == BAND:
            h_n = tl.where(deterministic, q_n / (ratio * (1 - q_n) + q_n), h_n)
        tl.store(block.alive + slot, ratio_alive, mask=on)
        scale = ratio_alive * lower
        tl.store(block.scales + slot, scale, mask=on)
        # the residual's mass is at most s, so that a node passes with at most s/(s + 1 − P): a coin
        # above needs no row
        coin = coins_of(seed, position, b * 0 + (place - 1), ACCEPT)
        fails = coin * (scale + 1 - ratio_alive) >= scale
        closed = tl.where(deterministic, ratio_alive * (1 - h_n), tl.where(fails, 0.0, -1.0))
        tl.store(block.closed + slot, closed, mask=on)
        divisor = tl.where(p_n > 0, p_n, 1.0)
        next_alive = tl.where(h_n > 0, tl.where(p_n > 0, ratio_alive * h_n / divisor, 1.0), 0.0)
        is_number = (q_n == q_n) & (p_n == p_n) & (next_alive == next_alive)
        next_alive = tl.where(is_number & (ratio_alive > 0), next_alive, 0.0)
        ratio_alive = tl.where(on, tl.minimum(1.0, next_alive), ratio_alive)
        last = tl.where(on & (ratio_alive == 1.0), place + 1, last)
    final = coins_of(seed, position, length - 1, ACCEPT)
    tl.store(block.sure + b, tl.where((length > 0) & (final < ratio_alive), length, last))


@triton.jit
def shortfall(requests, target, draft, softmax, block, form: tl.constexpr):
    """Write one part of Σ (s q − p)₊ for each node that needs the sum. Grid: (B K, C)."""
    take_turn(form)
    row, part = tl.program_id(0), tl.program_id(1)
    b, place = row // form.width, row % form.width
    length = draft_length(b, requests, form)
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    # the path ends at ``sure`` or later, so that no coin of a node up to there is read
    if (place >= length) | (place <= tl.load(block.sure + b)) | greedy:
        return
    if tl.load(block.closed + row) >= 0:  # the mass is known, or not needed
        return
    q, p = part_of_rows(b, place, part, inverse, requests, target, draft, softmax, form)
    scale = tl.load(block.scales + row).to(tl.float32)
    left = tl.sum(tl.maximum(scale * q - p, 0.0), 0)
    tl.store(block.lefts + row.to(tl.int64) * form.parts + part, left)


@triton.jit
def block_judge(requests, block, decision, form: tl.constexpr):
    """Write the last node whose coin passes, and the scale of the node's residual. Grid: (B,).

    ``block.sure`` is the last node whose coin is known to pass. The coin of a later node passes if
    it is below R/(R + 1 − P), with R the mass of the node's residual.
    """
    take_turn(form)
    b = tl.program_id(0)
    length = draft_length(b, requests, form)
    node = tl.arange(0, form.places)
    slot = b * form.width + node
    sure = tl.load(block.sure + b)
    inner = (node > sure) & (node < length)
    alive = tl.load(block.alive + slot, mask=inner, other=1.0)
    mass = tl.load(block.closed + slot, mask=inner, other=0.0)
    mass = tl.where(mass < 0, 0.0, mass) + sum_of_parts(slot, inner & (mass < 0), block.lefts, form)
    denominator = mass + tl.where(alive == 1, 1.0, 1 - alive)
    threshold = tl.where(alive == 1, 1.0, mass / denominator)
    seed, position = tl.load(requests.seeds + b), tl.load(requests.positions + b)
    passes = inner & (coins_of(seed, position, node - 1, ACCEPT) < threshold)
    count = tl.maximum(sure, tl.max(tl.where(passes, node, 0), 0))
    tl.store(decision.accepted + b, count)
    scale = tl.load(block.scales + slot, mask=node < length, other=0.0)
    tl.store(decision.scales + b, tl.sum(tl.where(node == count, scale, 0.0), 0))
