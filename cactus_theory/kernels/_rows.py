# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
r"""Softmax constants of rows of logits, summed by parts of the vocabulary.

A table of probabilities is never written. Each row is read once for its largest logit M and
S = Σ exp((l − M)/T), by one program per part of the vocabulary; probabilities are computed as
exp((l − M)/T)/S wherever they are needed. The length of a part depends on the vocabulary alone. So
a request gets the same bits in two batches with logits of one dtype if each stride is a multiple of
16 in both batches or in neither. Otherwise Triton compiles a different kernel, which may read and
sum in another order; a coin within rounding of its acceptance probability may then decide
differently.

Parameters of kernels are the groups of ``buffers.py``. Values: ``b``, a request; ``part``, a part
of the vocabulary; ``place``, of a drafted token, 0 to K − 1, and K for the bonus token; ``slot``,
b K + place; ``inverse``, 1/T; ``greedy``, whether T = 0; ``q_n`` and ``p_n``, a drafted token's
probabilities, float64; ``at``, an index of entries of a tensor; ``on`` and ``read``, masks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def take_turn(form: tl.constexpr):
    """Allow the launch of the next kernel, and wait for the writes of the kernel before."""
    if form.overlapping:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def draft_length(b, requests, form: tl.constexpr):
    """Return the number of a request's drafted tokens."""
    place = tl.arange(0, form.places)
    at = b.to(tl.int64) * requests.ids_step + place
    token = tl.load(requests.ids + at, mask=place < form.width, other=-1)
    ended = (token < 0) & (place < form.width)
    length = tl.min(tl.where(ended, place, form.width), 0).to(tl.int32)
    if requests.lengths is not None:
        length = tl.minimum(length, tl.load(requests.lengths + b).to(tl.int32))
    return length


@triton.jit
def tokens_at(b, place, requests):
    """Return pointers to the drafted tokens at ``place`` of request b."""
    return requests.ids + (b.to(tl.int64) * requests.ids_step + place)


@triton.jit
def row_at(b, place, rows):
    """Return pointers to the rows of logits at ``place`` of request b."""
    return rows.logits + (b.to(tl.int64) * rows.step + place.to(tl.int64) * rows.row_step)


@triton.jit
def part_at(b, place, part, rows, requests, form: tl.constexpr):
    """Return a part of the row of logits at ``place``, float32, −∞ beyond the row's end."""
    token = part * form.part + tl.arange(0, form.part)
    row = row_at(b, place, rows)
    return tl.load(row + token, mask=token < requests.vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def temperature_of(b, requests, form: tl.constexpr):
    """Return T, float32, and whether the request is greedy (T = 0, returned as 1)."""
    if form.per_row:
        heat = tl.load(requests.temperature + b)
    else:
        heat = tl.full((), requests.temperature, tl.float32)
    greedy = heat <= 0
    return tl.where(greedy, 1.0, heat), greedy


@triton.jit
def fall(logit, peak, inverse):
    """Return e^((l − M)/T) in float32, where ``peak`` is M and ``inverse`` is 1/T.

    The difference is taken first. l/T − M/T would be a single multiply-add, but would overflow in a
    part where every logit is masked by the least float32, and would lose l − M for M/T > 2^30.
    """
    return tl.exp2((logit - peak) * (inverse * LOG2_E))


@triton.jit
def number_of(knob):
    """Return the policy's knob, float64."""
    return tl.full((), knob.high, tl.float64) + tl.full((), knob.low, tl.float64)


@triton.jit
def store_sums(logit, part, at, inverse, sums, vocab, form: tl.constexpr):
    """Write max l, Σ exp((l − max l)/T) and the first token with max l, of one part's logits l."""
    most = tl.max(logit, 0)
    finite = tl.where(most == -float("inf"), 0.0, most)  # −∞ − (−∞) would be NaN
    tl.store(sums.most + at, most)
    tl.store(sums.whole + at, tl.sum(fall(logit, finite, inverse), 0))
    if form.greedy:
        token = part * form.part + tl.arange(0, form.part)
        tl.store(sums.likeliest + at, tl.min(tl.where(logit == most, token, vocab), 0))


@triton.jit
def sum_rows(requests, target, draft, softmax, form: tl.constexpr):
    """Write max l and Σ exp((l − max l)/T) of one part of a target or draft row.

    Grid: (B times the rows of a request, C); a request's target rows come before its draft rows.
    """
    take_turn(form)
    row, part = tl.program_id(0), tl.program_id(1)
    b, which = row // form.rows, row % form.rows
    place = which % form.width
    length = draft_length(b, requests, form)
    if place >= length:
        return
    heat, _ = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    if form.deterministic:
        logit = part_at(b, place, part, target, requests, form)
        inverse = inverse * target.power
    else:
        if which < form.width:
            logit = part_at(b, place, part, target, requests, form)
            inverse = inverse * target.power
        else:
            logit = part_at(b, place, part, draft, requests, form)
    at = row.to(tl.int64) * form.parts + part
    store_sums(logit, part, at, inverse, softmax, requests.vocab, form)


@triton.jit
def row_sums(row, on, inverse, softmax, form: tl.constexpr):
    """Return M and S, float64 (n,), of the rows with index ``row`` (n,) in ``softmax``.

    Rows where ``on`` is false are not read. S is NaN if a row is no distribution. Also writes M and
    1/S, float32.
    """
    part = tl.arange(0, form.most_parts)[None, :]
    at = row.to(tl.int64)[:, None] * form.parts + part
    read = on[:, None] & (part < form.parts)
    most = tl.load(softmax.most + at, mask=read, other=-float("inf")).to(tl.float64)
    total = tl.load(softmax.whole + at, mask=read, other=0.0).to(tl.float64)
    peak = tl.max(most, 1)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    whole = tl.sum(total * tl.exp((most - peak[:, None]) * inverse), 1)
    whole = tl.where(whole > 0, whole, float("nan"))
    tl.store(softmax.peaks + row, peak.to(tl.float32), mask=on)
    tl.store(softmax.weights + row, (1.0 / whole).to(tl.float32), mask=on)
    return peak, whole


@triton.jit
def likeliest(row, on, peak, softmax, form: tl.constexpr):
    """Return the first token with the largest logit ``peak`` of each row (n,) of ``softmax``."""
    part = tl.arange(0, form.most_parts)[None, :]
    at = row.to(tl.int64)[:, None] * form.parts + part
    read = on[:, None] & (part < form.parts)
    most = tl.load(softmax.most + at, mask=read, other=-float("inf")).to(tl.float64)
    # the largest int32, above every id, stands for no token
    token = tl.load(softmax.likeliest + at, mask=read, other=2147483647)
    return tl.min(tl.where(most == peak[:, None], token, 2147483647), 1)


@triton.jit
def drafted_chances(b, length, requests, target, draft, softmax, form: tl.constexpr):
    """Return q_n and p_n of a request's drafted tokens, float64, and whether T = 0.

    q_n and p_n have shape (``form.places``,), and are NaN if a row is no distribution: every policy
    rejects such a token. Also writes M and 1/S of the rows.
    """
    place = tl.arange(0, form.places)
    on = place < length
    token = tl.load(tokens_at(b, place, requests), mask=on, other=-1)
    known = on & (token >= 0) & (token < requests.vocab)
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat.to(tl.float64)
    row = b * form.rows + place
    colder = inverse * target.power
    peak, total = row_sums(row, on, colder, softmax, form)
    at = row_at(b, place, target) + token
    logit = tl.load(at, mask=known, other=-float("inf")).to(tl.float64)
    q_n = tl.exp((logit - peak) * colder) / total
    p_n = tl.where(known, 1.0, 0.0).to(tl.float64)
    if not form.deterministic:
        peak_p, total_p = row_sums(row + form.width, on, inverse, softmax, form)
        at = row_at(b, place, draft) + token
        logit = tl.load(at, mask=known, other=-float("inf")).to(tl.float64)
        p_n = tl.where(greedy, p_n, tl.exp((logit - peak_p) * inverse) / total_p)
    if form.greedy:
        best = likeliest(row, on, peak, softmax, form)
        likely = tl.where(token == best, 1.0, 0.0)
        # ``total`` is NaN if the row is no distribution
        q_n = tl.where(greedy, tl.where(total == total, likely, total), q_n)
    return q_n, p_n, greedy
