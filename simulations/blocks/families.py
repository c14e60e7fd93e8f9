"""The policies that are compared along a trace, by verifier, at several values of their knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# knob values whose emitted KL covers .01 to .15 nats a token on pairs of small models
DELTAS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03)
BUDGETS = (0.005, 0.02, 0.06, 0.15, 0.4)
PRICES = (8.0, 4.0, 2.5, 1.5, 1.0, 0.7, 0.45)
# with value functions a token is worth more than one, so the same price spends more
VALUED_PRICES = (20.0, 9.0, 5.0, 3.2, 2.2, 1.5, 1.0)
REFERENCE = "band:price, chain"


@dataclass(frozen=True)
class Family:
    """A policy at several knob values under one verifier; one value where it is lossless."""

    name: str
    verifier: str
    policies: tuple[str, ...]

    @property
    def lossless(self) -> bool:
        """Return whether it emits the target's law."""
        return len(self.policies) == 1


def certain_families() -> list[Family]:
    """Return what is compared on drafts of certain tokens, which a soft band knows to their end."""
    prices = (*VALUED_PRICES[:3], *PRICES[1:])
    return [
        *(Family(f"speculative, {own}", own, ("speculative",)) for own in ("chain", "block")),
        _family("band:price", "chain", PRICES),
        _family("soft_band:ahead=False,price", "block", PRICES),
        _family("soft_band:price", "block", prices),
    ]


def families(values: Sequence[Path]) -> list[Family]:
    """Return everything that is compared; ``values`` are files for the soft band."""
    found = []
    for verifier in ("chain", "block"):
        found += [
            Family(f"speculative, {verifier}", verifier, ("speculative",)),
            _family("cactus:delta", verifier, DELTAS),
            _family("band:delta", verifier, BUDGETS),
            _family("band:price", verifier, PRICES),
        ]
    found.append(_family("soft_band:price", "block", PRICES))
    for file in values:
        policies = tuple(f"soft_band:price={own:g},values={file}" for own in VALUED_PRICES)
        found.append(Family(f"soft_band:price,values={file.stem}, block", "block", policies))
    return found


def _family(knob: str, verifier: str, amounts: Sequence[float]) -> Family:
    policies = tuple(f"{knob}={own:g}" for own in amounts)
    return Family(f"{knob}, {verifier}", verifier, policies)
