r"""Solved programs in one file, for machines without a solver: GPUs above all.

Rows are seeded and cover hard cases: zeros in either row, spiky and nearly equal rows, one-hot
drafts, both supports. Their nonzero entries are at least 1e-4, so that the sixth digit comes
from the solver's answer and not from its tolerance. ``python -m tests.solvers.reference`` writes
the file anew.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from cactus_theory.divergences.definition import examples, known_divergence
from solvers import optimal, per_proposal

OUT = Path("tests/data/reference.npz")
# any number; it fixes the stored rows
SEED = 20
# smaller entries would leave the sixth digit to the solver's tolerance
SMALLEST = 1e-4
# small, so that many cases fit into one file that is kept in the repository
VOCABULARIES = (3, 8, 24, 64)
WIDEST = max(VOCABULARIES)
# budgets as shares of the divergence of an almost whole draft: scarce, usual, generous, slack
SHARES = (0.02, 0.1, 0.3, 0.7, 1.3)
PACKAGES = ("cvxpy", "clarabel", "highspy", "numpy", "scipy")


@dataclass(frozen=True)
class Case:
    """One pair of rows with its budget, and what the programs answered."""

    divergence: str
    support: str
    family: str  # the kind of rows
    vocabulary: int  # tokens that count; the rows are padded with zeros to the widest
    target_probs: np.ndarray
    draft_probs: np.ndarray
    delta: float  # in the divergence's unit
    target: np.ndarray  # the optimal program's answer, and its proof
    acceptance: float
    price: float
    gap: float
    solver: str
    token: int  # a drafted one, and γ, dγ/dδ of its per-proposal program
    raised: float
    raised_price: float


def _row(weights: np.ndarray) -> np.ndarray:
    """Return ``weights`` as a row whose nonzero entries are not tiny."""
    row = weights / weights.sum()
    row = np.where(row > 0, np.maximum(row, 1.1 * SMALLEST), 0.0)
    return row / row.sum()


def _one_hot(row: np.ndarray, token: int, share: float) -> np.ndarray:
    """Return ``row`` with ``share`` of its mass moved to one token."""
    hot = (1 - share) * row
    hot[token] += share
    return hot


def _smooth(size: int, noise: np.random.Generator) -> np.ndarray:
    return _row(noise.dirichlet(np.ones(size)))


def _spiky(size: int, noise: np.random.Generator) -> np.ndarray:
    return _row(np.exp(3 * noise.normal(size=size)))


def _holed(size: int, noise: np.random.Generator) -> np.ndarray:
    """Return a row with zeros in about a third of its tokens, one at least, not in all."""
    keep = noise.random(size) < 0.67
    keep[noise.permutation(size)[:2]] = (True, False)
    return _row(np.where(keep, noise.dirichlet(np.ones(size)) + 1e-3, 0.0))


def _near(size: int, noise: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    q = _smooth(size, noise)
    return q, _row(q * np.exp(0.1 * noise.normal(size=size)))


def _peaked(size: int, noise: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    q, p = _smooth(size, noise), _smooth(size, noise)
    return _row(_one_hot(q, 0, 0.95)), _row(_one_hot(p, size - 1, 0.9))


_Pair = Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]]
FAMILIES: dict[str, _Pair] = {
    "smooth": lambda size, noise: (_smooth(size, noise), _smooth(size, noise)),
    "spiky": lambda size, noise: (_spiky(size, noise), _spiky(size, noise)),
    "zeros in the draft": lambda size, noise: (_smooth(size, noise), _holed(size, noise)),
    "zeros in the target": lambda size, noise: (_holed(size, noise), _smooth(size, noise)),
    "zeros in both": lambda size, noise: (_holed(size, noise), _holed(size, noise)),
    "nearly equal": _near,
    "nearly one-hot": _peaked,
    "one-hot draft": lambda size, noise: (
        _smooth(size, noise),
        _one_hot(np.zeros(size), int(noise.integers(size)), 1.0),
    ),
}
# twenty a divergence: every family twice, those with zeros in the target under both supports
PLAN = tuple(
    (family, support)
    for family in FAMILIES
    for support in (optimal.SUPPORTS if family == "zeros in the target" else ("target",))
    for _ in range(2)
) + (("zeros in both", "free"), ("smooth", "free"))


def _budget(spec: str, q: np.ndarray, p: np.ndarray, share: float) -> float:
    """Return a share of the divergence that nearly all of the draft would spend."""
    inside = np.where(q > 0, p, 0.0)
    total = inside.sum()
    whole = 0.05 * q + 0.95 * (inside / total if total > 0 else q)
    value = known_divergence(spec).value(torch.from_numpy(whole), torch.from_numpy(q))
    return max(share * float(value), 1e-3)


def cases(spec: str) -> Iterator[Case]:
    """Yield the solved cases of one divergence, always the same ones."""
    noise = np.random.default_rng([SEED, examples().index(spec)])
    for index, (family, support) in enumerate(PLAN):
        size = VOCABULARIES[index % len(VOCABULARIES)]
        q, p = FAMILIES[family](size, noise)
        delta = _budget(spec, q, p, SHARES[index % len(SHARES)])
        best = optimal.solve(q, p, spec, delta=delta, support=support)
        token = int(np.argmax(np.where(q > 0, p, -1.0)))
        proposal = per_proposal.solve(q, token, divergence=spec, delta=delta)
        yield Case(
            divergence=spec,
            support=support,
            family=family,
            vocabulary=size,
            target_probs=_padded(q),
            draft_probs=_padded(p),
            delta=delta,
            target=_padded(best.target),
            acceptance=best.acceptance,
            price=best.price,
            gap=best.gap,
            solver=best.solver,
            token=token,
            raised=proposal.raised,
            raised_price=proposal.price,
        )


def _padded(row: np.ndarray) -> np.ndarray:
    return np.pad(row, (0, WIDEST - len(row)))


def tables(specs: tuple[str, ...] = examples()) -> dict[str, np.ndarray]:
    """Return one array a field of :class:`Case`, row i of all being one case, and provenance."""
    rows = [asdict(case) for spec in specs for case in cases(spec)]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    notes = {
        "command": "python -m tests.solvers.reference",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }
    return columns | {name: np.array(text) for name, text in notes.items()}


if __name__ == "__main__":
    np.savez_compressed(OUT, allow_pickle=False, **tables())
