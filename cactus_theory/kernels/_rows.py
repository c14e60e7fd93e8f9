# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
r"""Where rows lie and their sums of exponentials, by parts; what the parameters of kernels are.

A row is never written back: it is read once for its largest logit M and S = Σ exp((l − M)/T),
by programs that take a part of the vocabulary each, and probabilities are exp((l − M)/T)/S
wherever they are needed. A part's length depends on the vocabulary alone, so that a request
gets the same bits in every batch: of logits of one dtype, and of rows whose strides are or are
not multiples of 16 alike. Triton compiles another kernel for other ones, which may read and sum
in another order, and a coin within rounding of its probability may then fall otherwise.

Parameters of all kernels and of the functions they call; ``_launch.py`` passes them by name. B
requests draft up to K tokens of a vocabulary V each, R = B K rows in C parts; flat, N in all.

Read:

* ``target``, ``draft`` : logits, (B, K + 1, V) and (B, K, V), or flat (N + B, V) and (N, V).
* ``ids`` : drafted tokens, int64, (B, K), −1 after the last, or flat (N,).
* ``lengths`` : (B,) drafted tokens of each request, read if HAS_LENGTHS, or running counts if FLAT.
* ``temperature`` : T, float32 (B,), read if PER_ROW; else T is ``scalar``.
* ``seeds``, ``positions`` : int64 (B,), of which random numbers are functions.

Written and read again, the tensors of a :class:`Workspace` (its dtypes):

* ``part_max``, ``part_sum``, ``part_arg`` : (B, 2, K, C), or (B, K, C) if CERTAIN: a part's largest
  logit, Σ exp((l − largest)/T) and first token of that logit; target rows, then draft rows.
* ``peaks``, ``weights`` : (2, R), M and 1/S of the target's rows and of the draft's.
* ``verdicts`` : (R,), whether a drafted token is REFUSED, KEPT or OPEN.
* ``accepted``, ``scales`` : (B,), how many tokens are accepted, and s of the residual (s q − p)₊.
* ``sums``, ``edges``, ``flags`` : (2, 2, R, C), (2, 3, R) and (2, R), two buffers which Newton
  steps read and write in turns: E and E′ by parts; the point and its bracket's ends, upper edges
  of a band; bits of READ, LOW_SEEN, HIGH_SEEN.
* ``chances`` : (2, R), q_n and p_n of the drafted tokens of a block.
* ``alive``, ``row_scales``, ``closed`` : (R,), of a block's nodes: the alive ratio P, s of the
  residual, the residual's mass if the draft is certain of its token (else −1).
* ``ends``, ``sure`` : (B,), P after the last drafted token, the last node that is always reached.
* ``lefts`` : (R, C), a part of Σ (s q − p)₊ of a node.
* ``left_keys``, ``left_tokens``, ``whole_keys``, ``whole_tokens`` : (B, C), the winner of each part
  and its key, by the residual and by the whole row.

Emitted: ``output`` (B, K + 1) and ``counts`` (B,), int64.

Numbers:

* ``target_batch``, ``draft_batch``, ``ids_step``, ``output_step`` : elements from one request to
  the next; ``target_row``, ``draft_row``, ``row_step`` : from one row to the next.
* ``vocab`` : V. ``scalar`` : T of all requests. ROWS : R.
* ``high``, ``low`` : float32, the policy's knob is their sum (:class:`KernelPolicy`).

Constants: WIDTH K; PARTS C; PART the tokens of a part; PLACES, OUTPUTS and MOST_PARTS the least
powers of two from K, K + 1 and C on; FLAT the flat layout; HAS_LENGTHS padded ``lengths``; CERTAIN
no draft rows; PER_ROW a temperature a request; GREEDY whether some T may be 0; SOLVED whether
rows have bands to be solved; BLOCK whether a block is verified; FROM the buffer of Newton steps to
read; KIND how the policy decides.

Values: ``b`` a request; ``part``; ``place`` a drafted token's, 0 to K − 1, K for the bonus token;
``start``, ``length`` of :func:`draft_span`; ``slot`` b K + place; ``inverse`` 1/T; ``greedy``
T = 0; ``q_n``, ``p_n`` a drafted token's probabilities, float64; ``on``, ``read`` masks.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def draft_span(
    b, ids, lengths, ids_step, WIDTH: tl.constexpr, PLACES: tl.constexpr, FLAT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return where a request's drafted tokens start, and how many they are.

    The start counts tokens in a flat layout, requests in a padded one.
    """
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
    """Return the offset of the target's row after ``place`` drafted tokens.

    The steps are ``target_batch`` and ``target_row``.
    """
    if FLAT:
        return (start + b + place) * row_step
    return start * batch_step + place.to(tl.int64) * row_step


@triton.jit
def draft_at(place, start, batch_step, row_step, FLAT: tl.constexpr):
    """Return the offset of the row that drafted token ``place`` was drawn from.

    The steps are ``draft_batch`` and ``draft_row``.
    """
    if FLAT:
        return (start + place) * row_step
    return start * batch_step + place.to(tl.int64) * row_step


@triton.jit
def token_at(place, start, ids_step, FLAT: tl.constexpr):
    """Return the offset of a drafted token in ``ids``."""
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
def fall(logit, peak, inverse):
    """Return e^((l − M)/T) in float32: two operations and a power of two.

    The difference comes first. l/T − M/T would be one multiply-add, but a part of which every
    logit is masked by the least float32 has no such product, and M/T beyond 2^30 has lost l − M.
    """
    return tl.exp2((logit - peak) * (inverse * LOG2_E))


@triton.jit
def knob_of(high, low):
    """Return the policy's knob as float64."""
    return tl.full((), high, tl.float64) + tl.full((), low, tl.float64)


@triton.jit
def sum_rows(
    target, draft, ids, lengths, temperature, part_max, part_sum, part_arg,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Write max l and Σ exp((l − max l)/T) of one part of one row of drafted tokens.

    Grid: (2 ROWS, PARTS), or (ROWS, PARTS) if CERTAIN; a request's target rows come first.
    """
    rows: tl.constexpr = WIDTH if CERTAIN else 2 * WIDTH
    row, part = tl.program_id(0), tl.program_id(1)
    b, which = row // rows, row % rows
    place = which % WIDTH
    start, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
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
    total = tl.sum(fall(logit, finite, inverse), 0)
    at = row.to(tl.int64) * PARTS + part
    tl.store(part_max + at, most)
    tl.store(part_sum + at, total)
    if GREEDY:
        tl.store(part_arg + at, tl.min(tl.where(logit == most, token, vocab), 0))


@triton.jit
def row_sums(row, on, inverse, part_max, part_sum, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Return M and S, float64, of the rows that ``part_max`` has at ``row`` (n,), where ``on``.

    S is NaN if a row is no distribution.
    """
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
    """Return the first token that has the largest logit, ``peak`` (n,), of such rows."""
    part = tl.arange(0, MOST_PARTS)[None, :]
    at = row[:, None] * PARTS + part
    read = on[:, None] & (part < PARTS)
    most = tl.load(part_max + at, mask=read, other=-float("inf")).to(tl.float64)
    token = tl.load(part_arg + at, mask=read, other=2147483647)
    return tl.min(tl.where(most == peak[:, None], token, 2147483647), 1)


@triton.jit
def drafted_chances(
    b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
    peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr, FLAT: tl.constexpr,
    CERTAIN: tl.constexpr, PER_ROW: tl.constexpr, GREEDY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return q_n and p_n of a request's drafted tokens, float64, and whether it is greedy.

    ``place`` and ``token`` are (PLACES,). They are NaN where a row is no distribution, and such a
    token is refused by every policy. Writes M and 1/S of its rows.
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
    peak, total = row_sums(row, on, inverse, part_max, part_sum, PARTS, MOST_PARTS)
    at = target_at(b, place, start, target_batch, target_row, FLAT)
    logit = tl.load(target + at + token, mask=known, other=-float("inf")).to(tl.float64)
    q_n = tl.exp((logit - peak) * inverse) / total
    slot = b * WIDTH + place
    tl.store(peaks + slot, peak.to(tl.float32), mask=on)
    tl.store(weights + slot, (1.0 / total).to(tl.float32), mask=on)
    p_n = tl.where(known, 1.0, 0.0).to(tl.float64)
    if not CERTAIN:
        peak_p, total_p = row_sums(row + WIDTH, on, inverse, part_max, part_sum, PARTS, MOST_PARTS)
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
