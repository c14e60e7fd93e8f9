"""Whole decodes: tokens per second, what they emit, and what their parts should add up to.

Real sizes come from the shipped pair, inflated to them (``decode``); ``--target`` and ``--draft``
name a pair of checkpoints instead, and so does the shipped pair itself where nothing inflates it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cactus_theory.decoding.device import BY_KERNELS

from ..common.grid import PLAIN, at, label
from ..common.inputs import PAIR
from .derived import Place, finisher
from .device import bandwidth
from .sections import Bench, Job, Message, Note, Row, first_line, in_turn, optional
from .verify import LARGE

DECODES = "simulations.gpu_check.decode"
VALUES = PAIR / "values.json"
# knob values that spend about .03, .07 and .14 nats a token on the shipped pair
PRICES, DELTAS = (1.5, 0.8, 0.5), (0.0003, 0.002, 0.01)
WIDTHS, NEW_TOKENS = (4, 8), 128
TINY_WIDTHS, TINY_NEW_TOKENS = (2,), 12
TINY_POLICIES = ("speculative", "cactus:delta=0.01", "band:price=0.5", "band:price=0.5@block")


PLACES = (Place("8b", "0.6b", 1, 0.5), Place("8b", "0.6b", 8, 0.6), Place("14b", "0.6b", 1))
TINY_PLACES = (Place("tiny", "tiny", 1, 0.5), Place("tiny", "tiny", 2))


def policies(tiny: bool) -> list[str]:
    """Return what is decoded besides the plain target; ``SPEC@block`` where not token by token."""
    if tiny:
        return list(TINY_POLICIES)
    soft = [f"soft_band:price={price},values={VALUES}" for price in PRICES]
    bands, cactus = ([f"{name}={knob}" for knob in knobs] for name, knobs in
                     (("band:price", PRICES), ("cactus:delta", DELTAS)))  # fmt: skip
    blocks = [at(spec, "block") for spec in ("speculative", *bands, *soft)]
    return ["speculative", *cactus, *bands, *blocks, "typical"]


def rows(bench: Bench) -> Iterator[Message]:
    """Yield one row a method, K and place."""
    yield from in_turn(_jobs(bench), bench.budget)


def _jobs(bench: Bench) -> Iterator[Job]:
    inflated = optional(DECODES, "decode_rows")
    if bench.settings.target is None and inflated is not None:
        for place in TINY_PLACES if bench.tiny else PLACES:
            yield place.name, lambda place=place: _decoded(bench, place, _inflated(bench, place))
        return
    from . import checkpoints

    if bench.settings.target is None:
        why = "nothing here inflates the shipped pair: decoded at its own size"
        yield "real sizes", lambda: [Note("skipped", "real sizes", why)]
    for batch in (1, 2) if bench.tiny else (1, 8):
        place = Place(*checkpoints.names(bench.settings), batch, 0.5 if batch == 1 else 1.0)
        yield (
            place.name,
            lambda place=place: _decoded(bench, place, checkpoints.decoded(bench, place.batch)),
        )


def _inflated(bench: Bench, place: Place) -> Iterator[Message]:
    """Yield what the inflated pair does, each row with the costs at its K."""
    known: dict[str, Any] = {
        "device": bench.device,
        "target_shape": place.target,
        "draft_shape": place.draft,
        "widths": list(TINY_WIDTHS if bench.tiny else WIDTHS),
        "batch": place.batch,
        "new_tokens": TINY_NEW_TOKENS if bench.tiny else NEW_TOKENS,
        "seed": bench.settings.seed,
        "tiny": bench.tiny,
        "bandwidth": bandwidth(bench),
    }
    costs = {row["num_draft_tokens"]: row for row in _asked("costs", known)}
    floor: Any = next(iter(_asked("roofline", known)), {})
    for number, width in enumerate(known["widths"]):
        asked = known | {"widths": [width]}
        for row in _each(asked, policies(bench.tiny), place, skip_plain=number > 0):
            if isinstance(row, Note):
                yield row
            else:
                own = floor | costs.get(row["num_draft_tokens"], {}) | row
                yield {"verify_ms": _verification(bench, own, place.batch)} | own


def _each(known: Row, specs: Sequence[str], place: Place, *, skip_plain: bool) -> Iterator[Message]:
    """Yield the rows of one K; a policy that fails is named, and the next ones follow."""
    left, done = list(specs), skip_plain
    while True:
        ours = 0
        try:
            for row in _asked("decode_rows", known | {"policies": left}):
                if row["policy"] != PLAIN or not done:
                    yield row
                done, ours = True, ours + (row["policy"] != PLAIN)
            return
        except Exception as error:
            if not left or not done:
                raise
            name = _name({"policy": left[ours], "num_draft_tokens": known["widths"][0]})
            yield Note("failed", f"{name} at {place.name}", first_line(error))
            left = left[ours + 1 :]
        if not left:
            return


def _verification(bench: Bench, row: Row, batch: int) -> float | None:
    """Return the milliseconds of the step that a decode verified by, when it was timed alone."""
    by = "kernel_us" if row.get("loop") == BY_KERNELS else "torch_us"
    name = row["policy"].partition(":")[0], row["verifier"], batch, row["num_draft_tokens"]
    for step in bench.before.get("verify", ()):
        policy = step["policy"].partition(":")[0]
        if (policy, step["verifier"], step["batch"], step["drafted"]) == name:
            if step["vocabulary"] == LARGE:
                return None if step[by] is None else step[by] / 1e3
    return None


def _asked(name: str, known: Mapping[str, Any]) -> Iterable[Row]:
    """Call a function of the inflated decodes with those of our arguments that it takes."""
    call = optional(DECODES, name)
    if call is None:
        return []
    taken = inspect.signature(call).parameters
    found = call(**{key: value for key, value in known.items() if key in taken})
    return [dict(found)] if isinstance(found, Mapping) else found


def _decoded(bench: Bench, place: Place, raw: Iterable[Message]) -> Iterator[Message]:
    """Yield finished rows while the place's share of the time lasts."""
    enough = bench.budget.left * (1 - place.share)
    finish = finisher(place)
    for row in raw:
        if isinstance(row, Note):
            yield row
            continue
        yield finish(row)
        if bench.budget.left <= enough:
            why = "out of time" if place.share == 1 else "the time is for the next batch or target"
            yield Note("skipped", f"what came after {_name(row)} at {place.name}", why)
            return


def _name(row: Row) -> str:
    spec, _, verifier = row["policy"].partition("@")
    shown = at(":".join(filter(None, label(spec))), verifier or row.get("verifier"))
    return f"{shown}, K = {row['num_draft_tokens']}"
