"""Properties that a verifier may rely on: facts that a policy class states of itself."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cactus_theory.testing.laws._behaviour import Behaviour
from cactus_theory.testing.laws._law import EXACT, REAL, Bounds, law


@law(
    lambda rule: bool(getattr(rule, "entrywise", False)),
    hint="φ reads more of the rows than q_n and p_n: the class must not state entrywise = True",
)
def reads_only_drafted_entries(seen: Behaviour) -> Iterator[Bounds]:
    """φ(n) depends on q_n and p_n alone (states ``entrywise``).

    The other entries are spread evenly, and put on one token.
    """
    row, token = seen.pairs
    expected = seen.phi[row, token]
    for how, moved in (("spread evenly", _evenly), ("on one token", _on_one)):
        q, p = (moved(rows[row], token) for rows in (seen.q, seen.p))
        found = seen.rule.acceptance(q, p, token[:, None])[:, 0]

        def about(index: tuple[int, ...], how: str = how) -> str:
            return f"acceptance of token {int(token[index[0]])} with all other mass {how}"

        yield Bounds(found, expected, expected, about, EXACT, rows=row)


@law(
    lambda rule: bool(getattr(rule, "keeps_what_lossless_keeps", False)),
    hint="some φ(n) is below min(1, q_n/p_n): the class must not state keeps_what_lossless_keeps",
    widest=REAL,
)
def keeps_what_lossless_keeps(seen: Behaviour) -> Iterator[Bounds]:
    """φ(n) ≥ min(1, q_n/p_n): what lossless sampling keeps is kept (states so)."""
    least = (seen.q / seen.p).nan_to_num(nan=0.0).clamp(max=1.0)
    yield Bounds(seen.phi, least, None, "acceptance of token {0}", EXACT, seen.drafted)


@law(
    lambda rule: bool(getattr(rule, "shared_recovery", False)),
    hint="g depends on the refused token: the class must not state shared_recovery",
)
def recovers_alike(seen: Behaviour) -> Iterator[Bounds]:
    """g(·|n) is the same for every token n that may be refused (states ``shared_recovery``)."""
    row, token = (part[seen.rejected[seen.pairs] > 0] for part in seen.pairs)
    if not len(row):
        return
    first = torch.searchsorted(row, row)  # the rows rise
    g = seen.recovered_at(row, token)

    def about(index: tuple[int, ...]) -> str:
        after, other = int(token[index[0]]), int(token[first[index[0]]])
        return f"recovery probability of token {index[1]} after token {after}, as after {other}"

    yield Bounds(g, g[first], g[first], about, EXACT, rows=row)


def _evenly(rows: Tensor, token: Tensor) -> Tensor:
    own = rows.gather(-1, token[:, None])
    return (
        ((1 - own) / max(1, rows.shape[-1] - 1)).expand(rows.shape).scatter(-1, token[:, None], own)
    )


def _on_one(rows: Tensor, token: Tensor) -> Tensor:
    own = rows.gather(-1, token[:, None])
    other = (token[:, None] + 1) % rows.shape[-1]
    return torch.zeros_like(rows).scatter(-1, other, 1 - own).scatter(-1, token[:, None], own)
