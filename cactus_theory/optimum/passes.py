"""Passes over one row, compiled by numba: sums, laws and their costs, draws, residuals.

A band g = clip(p, A q, U q) is P times the emitted row h; P is the alive ratio.
:mod:`cactus_theory.optimum.band_row` describes bands, and loads all files of compiled loops when
the first row is solved. Sums are float64 whatever the rows' dtype, and most passes need no memory.
In a band, a token with q below LEAST (a denormal number, whose p/q may overflow) counts as a token
with q = 0. Loops whose terms are sums, products, quotients and
``log_of`` are vectorised, several tokens at once; math.log takes one token at a time.
"""

import math
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from cactus_theory.base import tolerances
from cactus_theory.base.files import first_line
from cactus_theory.base.tolerances import LEAST

caching, serialize = map(import_module, ("numba.core.caching", "numba.core.serialize"))  # untyped
Row = np.ndarray
# boxes: the least q of the head, ids of tokens that must not fall, and their ceilings C
Boxes = tuple[float, Row, Row]
# A, U, P in the row's units, and boxes
Band = tuple[float, float, float, Boxes]
# √½ as an int64: a number's bits minus these begin with the exponent of the nearest power of 2
ROOT_BITS, MANTISSA = 0x3FE6A09E667F3BCD, 52
# tokens whose masses are added up in one block, before a draw looks at single tokens
BLOCK = 512
# entries of a row whose charges are added up at once, so that they stay in the CPU's cache
CHARGED = 2**11
# files that compiled loops depend on: a loop holds code and constants of other files
FILES = [Path(tolerances.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
SOURCES = sha256(b"".join(file.read_bytes() for file in FILES)).digest()


class _Entries(caching.IndexDataCacheFile):
    """numba's cache files of one loop; a damaged file or a full disk costs only a warning and time.

    Entries carry a digest of code and signature. Without the digest machine code with a changed
    byte, or machine code for other types, might run and return wrong numbers.
    """

    said = False

    def load(self, key: Any) -> Any:
        with self._unless_broken():
            if (signed := caching.IndexDataCacheFile.load(self, key)) is not None:
                digest, entry = signed
                if sha256(entry + repr(key).encode()).digest() != digest:
                    raise ValueError("an entry was changed")
                return pickle.loads(entry)

    def save(self, key: Any, data: Any) -> None:
        with self._unless_broken():
            entry = serialize.dumps(data)
            signed = sha256(entry + repr(key).encode()).digest(), entry
            caching.IndexDataCacheFile.save(self, key, signed)

    @contextmanager
    def _unless_broken(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # of pickles, of the disk
            if not _Entries.said:
                _Entries.said = True
                warnings.warn(
                    f"numba's cache in {self._cache_path} cannot be used ({type(error).__name__}: "
                    f"{first_line(error)}); loops are compiled anew, to the same numbers. If this "
                    "is said again, delete the folder, make room, or set NUMBA_CACHE_DIR",
                    RuntimeWarning,
                    stacklevel=3,
                )
            with suppress(OSError):
                self.flush()  # newly compiled code then replaces the damaged files


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function compiled by numba and kept in numba's cache if the cache can be written.

    Sums in the function may be added up in any order (SIMD). Infinities and NaN are kept, and x/0
    gives ∞ or NaN.
    """
    loop: Any = njit(nogil=True, fastmath={"reassoc", "contract"}, error_model="numpy")(function)
    with suppress(RuntimeError):  # numba finds no folder that can be written
        loop._cache = cache = caching.FunctionCache(function)
        cache._cache_file = _Entries(cache.cache_path, cache._impl.filename_base, SOURCES)
    return loop


@compiled
def log_of(t: float) -> float:
    """Return ln t of a normal number t, to a relative 4e-16, by a series that vectorises.

    If t = m 2^e, √½ ≤ m < √2 and s = (m − 1)/(m + 1), then ln t = e ln 2 + 2(s + s³/3 + s⁵/5 + …).
    """
    bits = np.float64(t).view(np.int64)
    exponent = (bits - np.int64(ROOT_BITS)) >> np.int64(MANTISSA)
    m = np.int64(bits - (exponent << np.int64(MANTISSA))).view(np.float64)
    s = (m - 1) / (m + 1)
    z = s * s
    tail = 2 / 13 + z * (2 / 15 + z * (2 / 17 + z * (2 / 19 + z * (2 / 21))))
    tail = z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * (2 / 9 + z * (2 / 11 + z * tail)))))
    return np.float64(exponent) * math.log(2.0) + (2 * s + s * tail)


@compiled
def sums_of(q: Row, p: Row) -> tuple[float, float]:
    """Return Σq and Σp."""
    mass = drafted = 0.0
    for i in range(q.size):
        mass += np.float64(q[i])
        drafted += np.float64(p[i])
    return mass, drafted


@compiled
def largest_of(q: Row, p: Row) -> float:
    """Return the largest p/q of tokens with q of at least LEAST."""
    largest = 0.0
    for i in range(q.size):
        ratio = np.float64(p[i]) / np.float64(q[i]) if np.float64(q[i]) >= LEAST else 0.0
        largest = ratio if ratio > largest else largest
    return largest


@compiled
def outer_sums(
    q: Row, p: Row, cost: Row, lower: float, upper: float
) -> tuple[float, float, float, float, float, float]:
    """Return Σ q, Σ p and Σ ``cost`` over p/q < ``lower``, then the same over p/q > ``upper``."""
    q_low = p_low = c_low = q_high = p_high = c_high = 0.0
    for i in range(q.size):
        q_i, p_i, c_i = np.float64(q[i]), np.float64(p[i]), cost[i]
        q_i = q_i if q_i >= LEAST else 0.0
        under, over = p_i < lower * q_i, q_i > 0 and p_i > upper * q_i
        q_low += q_i if under else 0.0
        p_low += p_i if under else 0.0
        c_low += c_i if under else 0.0
        q_high += q_i if over else 0.0
        p_high += p_i if over else 0.0
        c_high += c_i if over else 0.0
    return q_low, p_low, c_low, q_high, p_high, c_high


@compiled
def edges_of(lower: float, upper: float, unit: float, boxes: Boxes, j: int) -> tuple[float, float]:
    """Return the edges A and U of the j-th token with a box, from the edges of other tokens."""
    return max(lower, unit), min(upper, boxes[2][j] * unit)


@compiled
def write_ratios(q: Row, p: Row, band: Band, start: int, out: Row) -> None:
    """Write h/q = clip(p/q, A, U)/P, and 1 where q = 0, for a part of a row.

    The part begins with token ``start`` of the row, whose ``band`` is A, U, P and boxes.
    """
    lower, upper, unit, boxes = band
    head_least, ids, _ = boxes
    off_head = min(upper, unit)  # the upper edge of tokens off the head, which may not rise above q
    for i in range(q.size):
        q_i, p_i = np.float64(q[i]), np.float64(p[i])
        top, ratio = upper if q_i >= head_least else off_head, p_i / q_i
        ratio = ratio if ratio < top else top
        ratio = ratio if ratio > lower else lower
        out[i] = ratio / unit if q_i >= LEAST else 1.0
    for j in range(ids.size):
        i = ids[j] - start
        if 0 <= i < q.size and q[i] >= LEAST:
            top = upper if q[i] >= head_least else off_head
            low, high = edges_of(lower, top, unit, boxes, j)
            out[i] = max(low, min(np.float64(p[i]) / np.float64(q[i]), high)) / unit


@compiled
def write_quotients(
    q: Row, p: Row, h: Row, mass: float, drafted: float, out: Row
) -> tuple[float, float]:
    """Write h/q, or 1 where h/q is not finite; return Σ h and Σ min(p, h) where it is not finite.

    q is divided by ``mass``, p by ``drafted``.
    """
    outside = overlap = 0.0
    for i in range(q.size):
        ratio = h[i] / (np.float64(q[i]) / mass)
        finite = ratio < math.inf
        out[i] = ratio if finite else 1.0
        outside += 0.0 if finite else h[i]
        overlap += 0.0 if finite else min(np.float64(p[i]) / drafted, h[i])
    return outside, overlap


@compiled
def write_costs(ratios: Row, kl: bool, out: Row) -> None:
    """Write f(t) − f′(1)(t − 1) of ratios t = h/q, for KL (t ln t) or else Jensen-Shannon.

    The terms of KL keep their digits near t = 1.
    """
    for i in range(ratios.size):
        t = ratios[i]
        if kl:
            out[i] = (t * log_of(t) if t >= LEAST else 0.0) - (t - 1)
        else:
            out[i] = (t * log_of((1 + 1 / t) / 2) + log_of((1 + t) / 2)) / -2


@compiled
def entropy_of(q: Row) -> float:
    """Return the entropy −Σ q ln q in nats, with 0·ln 0 = 0."""
    total = 0.0
    for i in range(q.size):
        q_i = np.float64(q[i])
        total -= q_i * log_of(max(q_i, LEAST))
    return total


@compiled
def charges_of(
    q: Row, p: Row, ratios: Row, costs: Row, mass: float, drafted: float, head: float
) -> tuple[float, float, float]:
    """Return D(h‖q), Σ min(p/P, h), and Σ (h − q)₊ over q < ``head``, of a part of a row.

    ``ratios`` are h/q, ``costs`` are those of :func:`write_costs`. q is divided by ``mass``, except
    in the comparison with ``head``; p is divided by ``drafted``, which is P Σp.
    """
    spent = accepted = raised = 0.0
    per_mass, per_drafted = 1 / mass, 1 / drafted
    for i in range(q.size):
        q_i, p_i = np.float64(q[i]) * per_mass, np.float64(p[i]) * per_drafted
        h_i, beyond = ratios[i] * q_i, (ratios[i] - 1) * q_i
        spent += q_i * costs[i]
        accepted += p_i if p_i < h_i else h_i
        raised += beyond if (np.float64(q[i]) < head) & (beyond > 0) else 0.0
    return spent, accepted, raised


@compiled
def whole_charge(
    q: Row, p: Row, band: Band, h: Row, kl: bool, alive: float, head: float
) -> tuple[float, float, float, float]:
    """Return the sums of :func:`charges_of` over a whole row, and Σ h where h/q is not finite.

    ``h`` is the emitted row; an empty ``h`` stands for the row of ``band``. Costs are those of KL
    (``kl``) or Jensen-Shannon.
    """
    mass, drafted = sums_of(q, p)
    drafted, size = drafted * alive, min(CHARGED, q.size)
    ratios, costs = np.empty(size), np.empty(size)
    spent = accepted = raised = outside = 0.0
    for start in range(0, q.size, CHARGED):
        end = min(start + CHARGED, q.size)
        part_q, part_p, ratio, cost = q[start:end], p[start:end], ratios[: end - start], costs
        if h.size:
            beyond = write_quotients(part_q, part_p, h[start:end], mass, drafted, ratio)
            outside += beyond[0]
            accepted += beyond[1]
        else:
            write_ratios(part_q, part_p, band, start, ratio)
        write_costs(ratio, kl, cost)
        sums = charges_of(part_q, part_p, ratio, cost, mass, drafted, head)
        spent += sums[0]
        accepted += sums[1]
        raised += sums[2]
    return spent, accepted, raised, outside


@compiled
def directions_of(
    q: Row, p: Row, band: Band, h: Row, target: Row
) -> tuple[float, float, float, float, float]:
    """Return Σ h ln t, Σ t ln t, Σ h t, Σ t², and Σ h over t = 0, with t the target's row.

    ``h`` is the emitted row; an empty ``h`` stands for the row of ``band``. q and t are divided by
    their sums.
    """
    (mass, target_mass), laws = sums_of(q, target), np.empty(min(CHARGED, q.size))
    h_log_t = t_log_t = h_times_t = t_squared = outside = 0.0
    for start in range(0, q.size, CHARGED):
        end = min(start + CHARGED, q.size)
        part_q, part_t, law = q[start:end], target[start:end], laws[: end - start]
        if h.size:
            law[:] = h[start:end]
        else:
            write_ratios(part_q, p[start:end], band, start, law)
            for i in range(law.size):
                law[i] *= np.float64(part_q[i]) / mass
        for i in range(law.size):
            h_i, t_i = law[i], np.float64(part_t[i]) / target_mass
            log_t = log_of(t_i if t_i >= LEAST else LEAST)
            h_log_t += h_i * log_t
            t_log_t += t_i * log_t
            h_times_t += h_i * t_i
            t_squared += t_i * t_i
            outside += h_i if t_i == 0 else 0.0
    return h_log_t, t_log_t, h_times_t, t_squared, outside


@compiled
def left_mass(q: Row, p: Row, scale: float) -> float:
    """Return Σ (s q − p)₊ with s = ``scale``, or s Σ q if p is empty; NaN if an entry is NaN."""
    total = 0.0
    for i in range(q.size):
        left = scale * np.float64(q[i]) - (np.float64(p[i]) if p.size else 0.0)
        total += 0.0 if left <= 0 else left
    return total


@compiled
def draw_left(q: Row, p: Row, scale: float, draw: float) -> int:
    """Draw a token from the residual (s q − p)₊ with the uniform random number ``draw``.

    Return the first token at which the cumulated mass exceeds draw × total mass, like
    :func:`cactus_theory.verify.draw.pick`. Return −1 if the total is 0, ∞ or NaN.
    """
    parts, total = np.empty((q.size + BLOCK - 1) // BLOCK), 0.0
    for part in range(parts.size):
        start = part * BLOCK
        parts[part] = left_mass(q[start : start + BLOCK], p[start : start + BLOCK], scale)
        total += parts[part]
    if not 0 < total < math.inf:
        return -1
    goal, mass = draw * total, 0.0
    for part in range(parts.size):
        if mass + parts[part] <= goal:
            mass += parts[part]
            continue
        start = part * BLOCK
        for i in range(start, min(start + BLOCK, q.size)):
            left = scale * np.float64(q[i]) - (np.float64(p[i]) if p.size else 0.0)
            mass += left if left > 0 else 0.0
            if left > 0 and mass > goal:
                return i
    last = q.size - 1  # the goal was rounded up to the total: take the last token with mass
    while not scale * np.float64(q[last]) - (np.float64(p[last]) if p.size else 0.0) > 0:
        last -= 1
    return last
