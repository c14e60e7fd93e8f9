"""The tables keep to the width of the terminal."""

import pytest

from simulations.throughput.command import show
from simulations.throughput.table import COLUMNS


def row(method: str, speed: float, kl: float | None = None, **more) -> dict:
    name, _, knob = method.partition(":")
    spread = {f"{c}_{end}": v for c, v in (("tokens_per_second", speed),
              ("speedup_over_plain", speed / 1000)) for end, v in (("low", v * 0.98),
              ("high", v * 1.02))}  # fmt: skip
    return dict.fromkeys(COLUMNS) | spread | {
        "method": name, "knob": knob, "batch": 1, "tokens_per_second": speed,
        "num_draft_tokens": 0 if "plain" in name else 7, "emitted_kl_per_token": kl,
        "speedup_over_plain": speed / 1000,
    } | more  # fmt: skip


PLAIN = row("plain", 1000.0)


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("100", 100), ("200", 120)])
def test_nothing_is_wider_than_the_terminal(monkeypatch, columns: str, most: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    figures = dict.fromkeys(
        ("accepted_per_call", "tokens_per_call", "target_nats_per_token", "outside_forwards"),
        0.123456,
    )
    rows = [PLAIN, row("tempered:temperature=0.95", 1234.5, 0.0412, **figures)]
    rows += [own | {"batch": 8} for own in rows]
    said = show({"throughput": rows})
    assert max(map(len, said.split("\n"))) <= most
    assert ("outside" in said) == (most > 100)
