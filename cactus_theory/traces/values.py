r"""Learn from a trace what an accepted token is worth, by how many drafted tokens follow it.

Let :math:`F_l(P)` be the value, in tokens net of ν times the divergence to come, of a node that
is reached with alive ratio P while l drafted tokens are left. It is 0 for l = 0, and

.. math:: F_{l}(P) = \mathrm{mean}\; \max_{Σg = P} Σ_x p_x φ_{l-1}(g_x/p_x) − ν D(g‖Pq),
    \qquad φ_l(r) = \min(1, r) + F_l(\min(1, r)),

the mean over the logged rows that have l − 1 drafted tokens after them. Where one row has one
value, F is exact; a mean over rows is what can be known before a token is drawn. The maximum is
the soft band (:mod:`cactus_theory.optimum.soft`), F is concave, and a few knots are enough: in
a try on 300 cycles two cost up to .7 % of the tokens per call that a dozen gave. Features that
are known beforehand (the entropy of the target's or of the draft's row, their distance) were
tried once too, in three and six classes, and changed tokens per call by less than .15 %.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import whole_number
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.optimum.soft import Worth, soft_rows
from cactus_theory.policies._knobs import ValueTable
from cactus_theory.traces.trace import Trace

# where φ changes its slope
KNOTS = (0.25, 0.6, 1.0)
# tokens per nat: from nearly lossless to nearly everything accepted
PRICES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 12.0, 20.0)
# numbers of target rows solved at once
ENTRIES = 2**18
Rows = tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows vocab"], Float[Tensor, "rows"]]


def learn_values(
    trace: Trace,
    *,
    num_draft_tokens: int | None = None,
    prices: Sequence[float] = PRICES,
    knots: Sequence[float] = KNOTS,
    divergence: str = "kl",
    cycles: int | None = None,
    on_price: Callable[[float], None] | None = None,
) -> ValueTable:
    """Return the worth of accepted tokens on a trace, for the policy ``soft_band``.

    Parameters
    ----------
    trace : of a drafter with rows.
    num_draft_tokens : K up to which values are learned; None for what was logged.
    prices : tokens per unit of divergence, rising.
    knots : where slopes may change, rising to 1.
    cycles : use so many of the trace's first ones; None for all.
    on_price : called after each price.

    Raises
    ------
    ValueError
        No rows, values out of range, or a divergence without a smooth generator.

    Examples
    --------
    >>> prompts, sizes = [[1, 2], [3, 4]], {"num_draft_tokens": 2, "max_new_tokens": 6}
    >>> trace = log_trace(pair.target, pair.draft, prompts, "log", **sizes)
    >>> learn_values(trace, prices=(0.5, 2.0)).prices
    (0.5, 2.0)
    """
    kind = find_divergence(divergence)
    if not (kind.priced and isinstance(kind, FDivergence) and kind.smooth):
        raise ValueError(
            f"divergence: must be an f-divergence with a smooth generator; got {kind.spec}"
        )
    trace.check_chains("learn_values")
    width = trace.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    width = min(whole_number("num_draft_tokens", width, 1), trace.num_draft_tokens)
    amounts = [check.number("prices", price, 0, open_low=True) for price in prices]
    ValueTable.of(kind.spec, knots, amounts, [[]] * len(amounts))  # bad ones raise at once
    logged = _by_place(trace, width, cycles)
    tables = []
    for price in amounts:
        tables.append(_table(logged, price, tuple(map(float, knots)), kind))
        if on_price is not None:
            on_price(price)
    return ValueTable.of(kind.spec, knots, amounts, tables)


def _by_place(trace: Trace, width: int, cycles: int | None) -> list[Rows]:
    """Return target rows, draft rows and weights by place in the draft; 0 after a text's end."""
    places: list[list[tuple[Tensor, Tensor, float]]] = [[] for _ in range(width)]
    ends = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64)
    for number, cycle in enumerate(trace):
        if cycles is not None and number >= cycles:
            break
        if cycle.draft_probs is None:
            continue
        ended = torch.isin(cycle.draft_token_ids, ends).cumsum(-1).tolist()
        for place in range(min(width, len(cycle.draft_token_ids))):
            weight = 0.0 if place and ended[place - 1] else 1.0
            rows = cycle.target_probs[place].float(), cycle.draft_probs[place].float()
            places[place].append((*rows, weight))
    if not all(places):
        raise ValueError(f"trace: must hold drafts of {width} tokens with rows; got fewer")
    return [
        (
            torch.stack([q for q, _, _ in drafted]),
            torch.stack([p for _, p, _ in drafted]),
            torch.tensor([weight for _, _, weight in drafted], dtype=torch.float64),
        )
        for drafted in places
    ]


def _table(
    logged: Sequence[Rows], price: float, knots: tuple[float, ...], kind: FDivergence
) -> list[Worth]:
    """Return φ for 0, 1, … drafted tokens that follow, backwards from the last place."""
    worths = [Worth(knots, (1.0,) * len(knots))]
    for following in range(1, len(logged)):
        rows = logged[len(logged) - following]
        values = [0.0, *(_value(rows, alive, worths[-1], price, kind) for alive in knots)]
        worths.append(Worth(knots, _concave(values, knots)))
    return worths


def _value(rows: Rows, alive: float, worth: Worth, price: float, kind: FDivergence) -> float:
    """Return the mean value of the rows at an alive ratio."""
    size = max(1, ENTRIES // rows[0].shape[-1])
    total = count = 0.0
    for q, p, weights in zip(*(part.split(size) for part in rows), strict=True):
        q, p = check.normalised(q), check.normalised(p)
        ratio = torch.full((len(q),), alive, dtype=torch.float64)
        h = soft_rows(q, p, ratio, [worth] * len(q), kind, price)
        gain = worth.of((alive * h / p).nan_to_num(nan=0.0, posinf=1.0)).mul(p).sum(-1)
        net = gain - price * alive * kind.value(h, q)
        total += float((net * weights).sum())
        count += len(weights)
    return total / count


def _concave(values: Sequence[float], knots: Iterable[float]) -> tuple[float, ...]:
    """Return the slopes of φ: those of F, made to fall (a mean may miss it by rounding), and 1."""
    ends = [0.0, *knots]
    slopes = [
        1 + (high - low) / (after - before)
        for low, high, before, after in zip(values, values[1:], ends, ends[1:], strict=False)
    ]
    return tuple(torch.tensor(slopes, dtype=torch.float64).cummin(0).values.clamp(min=1).tolist())
