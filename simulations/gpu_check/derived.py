"""What follows from the numbers of a decode: what it gains, and where its time goes.

A round of K drafted tokens costs K·c + v decode steps, c for a drafted token and v for the pass
over K + 1 positions: what a decode should gain is its tokens per call over that, the reading of
the prompts apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..common.grid import PLAIN, label
from .sections import Row

COLUMNS = (
    "target draft batch policy knob verifier num_draft_tokens tokens_per_second speedup "
    "tokens_per_call accepted_per_call emitted_kl_per_token largest_row_kl tokens seconds c v "
    "step_ms fixed_ms prefill_ms net_speedup predicted_speedup share_of_predicted roofline_ms "
    "share_of_roofline round_ms draft_ms target_ms verify_ms other_ms loop score scored"
).split()


@dataclass(frozen=True)
class Place:
    """A target, its draft and a batch size; the share of the time left that it may take."""

    target: str
    draft: str
    batch: int
    share: float = 1.0

    @property
    def name(self) -> str:
        """Return how notes call it."""
        return f"{self.target} + {self.draft}, batch {self.batch}"


def finisher(place: Place) -> Callable[[Row], Row]:
    """Return a function that completes rows of one place; the first must be plain decoding."""
    plain: list[Row] = []

    def finish(raw: Row) -> Row:
        policy, knob = label(raw["policy"])
        given = {key: raw[key] for key in COLUMNS if raw.get(key) is not None}
        given |= {"target": place.target, "draft": place.draft, "batch": place.batch}
        row: Row = dict.fromkeys(COLUMNS) | given | {"policy": policy, "knob": knob}
        if policy == PLAIN:
            plain.append(row)
        return row | _relative(row, plain[0]) | _parts(row)

    return finish


def _relative(row: Row, plain: Row) -> Row:
    """Return speed over plain decoding, over the prediction, and over the memory's limit."""
    net = _net(row) / _net(plain)
    found: Row = {
        "speedup": row["tokens_per_second"] / plain["tokens_per_second"],
        "net_speedup": net,
    }
    width, c, v = row["num_draft_tokens"], row["c"], row["v"]
    if width and c is not None and v is not None:
        predicted = row["tokens_per_call"] / (width * c + v)
        found |= {"predicted_speedup": predicted, "share_of_predicted": net / predicted}
    if not width and row["roofline_ms"] is not None:
        step = 1e3 * row["batch"] / _net(row)
        found["share_of_roofline"] = row["roofline_ms"] / step
    return found


def _net(row: Row) -> float:
    """Return tokens per second after the prompts were read, where that is known apart."""
    tokens, seconds, prefill = (row[key] for key in ("tokens", "seconds", "prefill_ms"))
    if None in (tokens, seconds, prefill):
        return row["tokens_per_second"]
    return tokens / (seconds - prefill / 1e3)


def _parts(row: Row) -> Row:
    """Return the milliseconds of a round: drafting, the target's pass, verification, the rest."""
    width, c, v, step = (row[key] for key in ("num_draft_tokens", "c", "v", "step_ms"))
    whole = 1e3 * row["batch"] * row["tokens_per_call"] / _net(row)
    if not width or None in (c, v, step):
        return {"round_ms": whole}
    draft, target, verify = width * c * step, v * step, row["verify_ms"]
    return {
        "round_ms": whole,
        "draft_ms": draft,
        "target_ms": target,
        "other_ms": whole - draft - target - (verify or 0.0),
    }
