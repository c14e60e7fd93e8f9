"""Replays as rows of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.traces import Estimate, Replay, compare, tokens_at

from ..common.grid import series
from ..common.terminal import fitted, width_of_terminal

WIDEST = 100
Row = dict[str, Any]


def rows(replays: Sequence[Replay], divergence: str) -> list[Row]:
    """Return one dictionary per replay; ``_se`` are standard errors over texts."""
    return [_row(own, replays[0], divergence) for own in replays]


def levels(
    replays: Sequence[Replay], wanted: Sequence[float], divergence: str
) -> tuple[list[Row], list[str]]:
    """Return tokens per call of every family at every level, and what the first is behind.

    A family is a policy at several values of its first knob, under one verifier. Those that do
    not reach a level on both sides are left out there, for the reasons returned beside them.
    """
    families: dict[str, list[Replay]] = {}
    for own in replays:
        families.setdefault(f"{series(own.policy)} {own.verifier}", []).append(own)
    found, missing = [], []
    for level in wanted:
        there = {}
        for name, own in families.items():
            try:
                there[name] = tokens_at(own, level, divergence)
            except ValueError as error:  # this family does not go that far
                missing.append(f"{name} is not compared at {level:g}: {error}")
        for name, own in there.items():
            first = next(iter(there.values()))
            row = {"level": level, "family": name}
            found.append(row | valued("tokens_per_call", own) | valued("difference", own - first))
    return found, missing


def show(made: Sequence[Row], at: Sequence[Row], notes: Mapping[str, Any], divergence: str) -> str:
    """Return both tables as a terminal shows them, at most 100 columns wide."""
    width, spec = width_of_terminal(WIDEST), find_divergence(divergence).spec
    spent = f"{_head(spec)}/token"
    title = "{trace}: {cycles} cycles of {texts} texts".format(**notes)
    heads = ("policy", "verifier", "K", "tokens/call", spent, "tokens − first", "accepted")
    parts = [fitted(heads, [_cells(row, spec) for row in made], width, title)]
    if at:
        heads = ("policy", spent, "tokens/call", "tokens − first")
        cells = [
            [row["family"], f"{row['level']:g}", _both(row, "tokens_per_call"),
             _both(row, "difference")]
            for row in at
        ]  # fmt: skip
        parts.append(fitted(heads, cells, width, f"\nat equal {_head(spec)} per token"))
    return "\n".join([*parts, "± one standard error over texts; differences are paired"])


def alone(own: Replay, divergence: str) -> Row:
    """Return what a replay gives by itself; ``_se`` are standard errors over texts."""
    spec = find_divergence(divergence).spec
    row = valued("tokens_per_call", own.tokens_per_call)
    row |= valued("accepted_per_call", own.accepted_per_call)
    row |= valued(f"{spec}_per_token", own.divergence_per_token(spec))
    return row | valued(f"{spec}_per_call", own.divergence_per_call(spec))


def _row(own: Replay, first: Replay, divergence: str) -> Row:
    spec = find_divergence(divergence).spec
    against = compare(own, first)
    row: Row = {
        "policy": own.policy,
        "verifier": own.verifier,
        "num_draft_tokens": own.num_draft_tokens,
    }
    row |= alone(own, divergence)
    row |= valued("tokens_difference", against.tokens_per_call)
    row |= valued(f"{spec}_per_token_difference", against.divergence_per_token[spec])
    for place, kept in enumerate(own.acceptance_by_position, 1):
        row[f"acceptance_{place}"] = kept.value
    return row


def valued(name: str, own: Estimate | None) -> Row:
    """Return an estimate as ``name`` and its standard error as ``name_se``, None without one."""
    known = (None, None) if own is None else (own.value, own.standard_error)
    return dict(zip((name, f"{name}_se"), known, strict=True))


def reached(
    replays: Sequence[Replay], level: float | Estimate, divergence: str = "kl"
) -> Estimate | None:
    """Return a family's tokens per call at a level, None if it does not go that far."""
    try:
        return tokens_at(replays, level, divergence)
    except ValueError:
        return None


def _cells(row: Row, spec: str) -> list[str]:
    return [
        row["policy"],
        row["verifier"],
        str(row["num_draft_tokens"]),
        _both(row, "tokens_per_call"),
        _both(row, f"{spec}_per_token"),
        _both(row, "tokens_difference"),
        f"{row['accepted_per_call']:.3f}",
    ]


def _both(row: Row, name: str) -> str:
    return f"{row[name]:.4f} ±{row[f'{name}_se']:.4f}"


def _head(spec: str) -> str:
    return "KL" if spec == "kl" else spec
