# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Where rows lie, and their sums of exponentials, by parts.

A row is never written back: it is read once for its largest logit M and S = Σ exp((l − M)/T),
by programs that take a part of the vocabulary each, and probabilities are exp((l − M)/T)/S
wherever they are needed. A part's length depends on the vocabulary alone, so that a request
gets the same bits in every batch: of logits of one dtype, and of rows whose strides are or are
not multiples of 16 alike. Triton compiles another kernel for other ones, which may read and sum
in another order, and a coin within rounding of its probability may then fall otherwise.
"""

import triton
import triton.language as tl


@triton.jit
def drafted(
    b, ids, lengths, ids_step, WIDTH: tl.constexpr, PLACES: tl.constexpr, FLAT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return where a request's drafted tokens start in a flat layout, and how many they are."""
    if FLAT:
        end = tl.load(lengths + b).to(tl.int64)
        start = tl.load(lengths + b - 1, mask=b > 0, other=0).to(tl.int64)
        length = tl.minimum(end - start, WIDTH).to(tl.int32)
    else:
        start = b.to(tl.int64)
        place = tl.arange(0, PLACES)
        token = tl.load(ids + start * ids_step + place, mask=place < WIDTH, other=-1)
        length = tl.min(tl.where((token < 0) & (place < WIDTH), place, WIDTH), 0).to(tl.int32)
        if HAS_LENGTHS:
            length = tl.minimum(length, tl.load(lengths + b).to(tl.int32))
    return start, length


@triton.jit
def target_at(b, place, start, batch_step, row_step, FLAT: tl.constexpr):
    """Return the offset of the target's row after ``place`` drafted tokens."""
    if FLAT:
        return (start + b + place) * row_step
    return start * batch_step + place.to(tl.int64) * row_step


@triton.jit
def draft_at(place, start, batch_step, row_step, FLAT: tl.constexpr):
    """Return the offset of the row that drafted token ``place`` was drawn from."""
    if FLAT:
        return (start + place) * row_step
    return start * batch_step + place.to(tl.int64) * row_step


@triton.jit
def token_at(place, start, ids_step, FLAT: tl.constexpr):
    """Return the offset of a drafted token."""
    if FLAT:
        return start + place
    return start * ids_step + place


@triton.jit
def temperature_of(b, temperature, scalar, PER_ROW: tl.constexpr):
    """Return 1/T and whether the row is greedy (T = 0, then 1)."""
    heat = tl.full((), scalar, tl.float32)
    if PER_ROW:
        heat = tl.load(temperature + b).to(tl.float32)
    greedy = heat <= 0
    return 1.0 / tl.where(greedy, 1.0, heat), greedy


@triton.jit
def sum_rows(
    target, draft, ids, lengths, temperature, part_max, part_sum, part_arg,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Write max l and Σ exp((l − max l)/T) of one part of one row.

    Grid: (rows, PARTS); a request's K target rows, then its K draft rows.
    """
    rows: tl.constexpr = WIDTH if CERTAIN else 2 * WIDTH
    row, part = tl.program_id(0), tl.program_id(1)
    b, which = row // rows, row % rows
    place = which % WIDTH
    start, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    if place >= length:
        return
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    if CERTAIN:
        base = target + target_at(b, place, start, target_batch, target_row, FLAT)
        logit = tl.load(base + token, mask=inside, other=-float("inf")).to(tl.float32)
    else:
        if which < WIDTH:
            base = target + target_at(b, place, start, target_batch, target_row, FLAT)
            logit = tl.load(base + token, mask=inside, other=-float("inf")).to(tl.float32)
        else:
            other = draft + draft_at(place, start, draft_batch, draft_row, FLAT)
            logit = tl.load(other + token, mask=inside, other=-float("inf")).to(tl.float32)
    most = tl.max(logit, 0)
    finite = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp((logit - finite) * inverse), 0)
    at = row.to(tl.int64) * PARTS + part
    tl.store(part_max + at, most)
    tl.store(part_sum + at, total)
    if GREEDY:
        tl.store(part_arg + at, tl.min(tl.where(logit == most, token, vocab), 0))


@triton.jit
def merged(row, on, inverse, part_max, part_sum, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Return M and S (float64) of rows by their number; S is NaN if a row is no distribution."""
    part = tl.arange(0, MOST_PARTS)[None, :]
    at = row[:, None] * PARTS + part
    read = on[:, None] & (part < PARTS)
    most = tl.load(part_max + at, mask=read, other=-float("inf")).to(tl.float64)
    total = tl.load(part_sum + at, mask=read, other=0.0).to(tl.float64)
    peak = tl.max(most, 1)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    whole = tl.sum(total * tl.exp((most - peak[:, None]) * inverse), 1)
    return peak, tl.where(whole > 0, whole, float("nan"))


@triton.jit
def likeliest(row, on, peak, part_max, part_arg, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Return the first token that has a row's largest logit."""
    part = tl.arange(0, MOST_PARTS)[None, :]
    at = row[:, None] * PARTS + part
    read = on[:, None] & (part < PARTS)
    most = tl.load(part_max + at, mask=read, other=-float("inf")).to(tl.float64)
    token = tl.load(part_arg + at, mask=read, other=2147483647)
    return tl.min(tl.where(most == peak[:, None], token, 2147483647), 1)


@triton.jit
def entries(
    b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
    peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr, FLAT: tl.constexpr,
    CERTAIN: tl.constexpr, PER_ROW: tl.constexpr, GREEDY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return q_n and p_n of a request's drafted tokens, float64, and whether it is greedy.

    They are NaN where a row is no distribution, and such a token is refused by every policy.
    Writes M and 1/S of its rows, those of the draft ROWS further on.
    """
    inverse32, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    heat = tl.full((), scalar, tl.float32)
    if PER_ROW:
        heat = tl.load(temperature + b).to(tl.float32)
    inverse = 1.0 / tl.where(greedy, 1.0, heat).to(tl.float64)
    on = place < length
    rows: tl.constexpr = WIDTH if CERTAIN else 2 * WIDTH
    known = on & (token >= 0) & (token < vocab)
    row = (b * rows + place).to(tl.int64)
    peak, total = merged(row, on, inverse, part_max, part_sum, PARTS, MOST_PARTS)
    at = target_at(b, place, start, target_batch, target_row, FLAT)
    logit = tl.load(target + at + token, mask=known, other=-float("inf")).to(tl.float64)
    q_n = tl.exp((logit - peak) * inverse) / total
    slot = b * WIDTH + place
    tl.store(peaks + slot, peak.to(tl.float32), mask=on)
    tl.store(weights + slot, (1.0 / total).to(tl.float32), mask=on)
    p_n = tl.where(known, 1.0, 0.0).to(tl.float64)
    if not CERTAIN:
        peak_p, total_p = merged(row + WIDTH, on, inverse, part_max, part_sum, PARTS, MOST_PARTS)
        where = draft_at(place, start, draft_batch, draft_row, FLAT)
        logit_p = tl.load(draft + where + token, mask=known, other=-float("inf")).to(tl.float64)
        p_n = tl.where(greedy, p_n, tl.exp((logit_p - peak_p) * inverse) / total_p)
        tl.store(peaks + ROWS + slot, peak_p.to(tl.float32), mask=on)
        tl.store(weights + ROWS + slot, (1.0 / total_p).to(tl.float32), mask=on)
    if GREEDY:
        best = likeliest(row, on, peak, part_max, part_arg, PARTS, MOST_PARTS)
        likely = tl.where(token == best, 1.0, 0.0)
        q_n = tl.where(greedy, tl.where(total == total, likely, total), q_n)
    return q_n, p_n, greedy
