"""The verdict says what the table says, in words, and the tables keep to their width."""

import pytest

from simulations.throughput.command import show, verdict
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


def test_it_names_the_fastest_lossless_and_the_fastest_at_each_price() -> None:
    rows = [
        PLAIN, row("hf_plain", 300.0), row("speculative", 1500.0, 1e-17),
        row("band:price=2", 1700.0, 0.04), row("band:price=1", 1800.0, 0.09),
        row("cactus:delta=1", 2500.0, 0.3), row("mixture:alpha=0.5", 9000.0),
    ]  # fmt: skip
    assert verdict(rows) == [
        "Batch 1.",
        "  Lossless: speculative, K 7, 1,500 tokens/s, 1.50 times plain decoding (1.47 to 1.53).",
        "  At most 0.05 nats per token: band:price=2, K 7, 1,700 tokens/s, 1.70 times plain "
        "decoding (1.67 to 1.73); it emits 0.04.",
        "  At most 0.1 nats per token: band:price=1, K 7, 1,800 tokens/s, 1.80 times plain "
        "decoding (1.76 to 1.84); it emits 0.09.",
    ]


def test_it_names_plain_decoding_where_that_is_the_fastest() -> None:
    said = verdict([PLAIN, row("speculative", 900.0, 0.0), row("band:price=2", 950.0, 0.04)])
    assert said[1:3] == [
        "  Lossless: plain, 1,000 tokens/s.",
        "  At most 0.05 nats per token: plain, 1,000 tokens/s.",
    ]
    (_, *said) = verdict([row("band:price=2", 950.0, 0.04, speedup_over_plain=None)])
    assert said[0] == "  Lossless: nothing was run."
    assert said[1].endswith("band:price=2, K 7, 950 tokens/s; it emits 0.04.")


def equal(kl: float, ratio: float, low: float) -> dict:
    return {
        "num_draft_tokens": 7, "batch": 1, "kl": kl, "first": "band:price",
        "second": "cactus:delta", "tokens_per_second_first": 1000 * ratio,
        "tokens_per_second_second": 1000.0, "ratio": ratio, "ratio_low": low,
        "ratio_high": ratio + 0.02,
    }  # fmt: skip


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("100", 100), ("200", 120)])
def test_nothing_is_wider_than_the_terminal_and_the_verdict_is_last(
    monkeypatch, columns: str, most: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    figures = dict.fromkeys(
        ("accepted_per_call", "tokens_per_call", "target_nats_per_token", "outside_forwards"),
        0.123456,
    )
    rows = [PLAIN, row("tempered:temperature=0.95", 1234.5, 0.0412, **figures)]
    rows += [own | {"batch": 8} for own in rows]
    said = show({"throughput": rows, "throughput_equal_kl": [equal(0.02, 1.05, 1.03)]})
    lines = said.split("\n")
    assert max(map(len, lines)) <= most
    assert ("outside" in said) == (most > 100)
    verdict_at = lines.index("Batch 8.")
    assert not any("──" in line for line in lines[verdict_at:]) and said.endswith(".")
