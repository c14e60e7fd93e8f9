"""How long the closed forms take on rows of real vocabularies, beside one softmax of a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cactus_theory as ct

from .timing import Bench, Job, Row, Work, interleaved

ROWS, VOCABULARIES, TINY_VOCABULARIES = 8, (32_000, 151_936), (64,)
SECONDS, TINY_SECONDS = 0.25, 0.0
LAWS = ("speculative", "cactus:delta=0.1", "cactus_exact:delta=0.1", "band:price=2")


def jobs(bench: Bench) -> Iterator[Job]:
    """Yield what gives one row a form, for each vocabulary."""
    for vocab in TINY_VOCABULARIES if bench.tiny else VOCABULARIES:
        yield f"closed forms at V = {vocab:,}", lambda vocab=vocab: _rows(bench, vocab)


def _rows(bench: Bench, vocab: int) -> list[Row]:
    source = torch.Generator(bench.device).manual_seed(bench.seed)
    shape = {"generator": source, "device": bench.device, "dtype": torch.float64}
    logits = 3 * torch.randn(ROWS, vocab, **shape)
    q, p = logits.softmax(-1), (logits + torch.randn(ROWS, vocab, **shape)).softmax(-1)
    works: dict[str, Work] = {
        "softmax": lambda: logits.softmax(-1),
        "optimal acceptance at a budget": lambda: ct.optimal_acceptance(q, p, delta=0.1),
        "optimal acceptance at a price": lambda: ct.optimal_acceptance(q, p, price=2.0),
    }
    for spec in LAWS:
        rule = ct.policy(spec)
        works[f"emitted law, {spec}"] = lambda rule=rule: ct.emitted_law(rule, q, p)
    timings = interleaved(works, bench.device, TINY_SECONDS if bench.tiny else SECONDS)
    return [
        {
            "form": name,
            "rows": ROWS,
            "vocabulary": vocab,
            "us": timing.microseconds,
            "low_us": timing.low,
            "high_us": timing.high,
            "graph": timing.graph,
            "repeats": timing.repeats,
        }
        for name, timing in timings.items()
    ]
