"""Time drafters of one target on the same prompts: lossless, and at so many nats a token.

A drafter is a folder, of a draft model or of a head, or ``ngram``. Each is decoded at every K and
temperature in a shuffled order; a level of nats is read off a curve through some prices of the
band. Every decode is written to journal.jsonl under --out, and the table is made from it alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cactus_theory.decoding import NGram, load_pair
from cactus_theory.traces.estimate import Estimate

from ..common.grid import PLAIN, Config, Grid
from ..common.inputs import PAIR, PROMPTS, at_least, digest, folder_digest, prompts_of
from ..common.journal import Journal, add_journal_arguments
from ..common.results import columns, publish
from .measure import Decodes, Line, cells, decodes

NGRAM = "ngram"
LOSSLESS = "speculative"
HEADS = {
    "drafter": "drafter", "temperature": "T", "nats": "nats\n/token", "num_draft_tokens": "K",
    "tokens_per_call": "tokens\n/call", "tokens_per_call_error": "±",
    "ms_per_call": "ms\n/round", "draft_ms_per_call": "of it\ndraft",
    "tokens_per_second": "tokens/s", "tokens_per_second_error": "±",
    "over_plain": "× plain", "over_plain_error": "±",
    "over_first": "× first\ndrafter", "over_first_error": "±",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    shipped = [str(PAIR / "draft"), str(PAIR / "block"), NGRAM]
    add("--target", type=Path, default=PAIR / "target", help="target model folder")
    add("--drafters", nargs="+", default=shipped, metavar="FOLDER", help=f"or {NGRAM}")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines")
    add("--num-prompts", type=int, default=16)
    add("--num-draft-tokens", type=int, nargs="+", default=[2, 3, 4, 6], metavar="K")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.6], metavar="T")
    add("--prices", type=float, nargs="+", default=[1.7, 1.1, 0.7], help="of the band")
    add("--level", type=float, default=0.05, metavar="NATS", help="a token; beside lossless")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--repeats", type=int, default=3, help="timed")
    add("--metered", type=int, default=1, help="repeats before them, untimed")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("drafters"))
    add("--publish", type=Path, help="also write the CSV here")
    add_journal_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the table; return 0."""
    at_least(args, num_prompts=2, repeats=1, metered=1, num_draft_tokens=1, temperature=0.1)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    names = [Path(own).name for own in args.drafters]
    methods = [LOSSLESS, *(f"band:price={price:g}" for price in args.prices)]
    every = lines(names, methods, args.num_draft_tokens, args.temperature)
    grid = Grid(every, len(texts), args.repeats, args.metered, args.seed)
    settings = {
        "target": folder_digest(args.target),
        "drafters": {own: own if own == NGRAM else folder_digest(Path(own))
                     for own in args.drafters},
        "prompts": digest("\0".join(texts).encode()),
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
    }  # fmt: skip
    drafters: dict[str, Any] = {}
    for own in args.drafters:
        pair = load_pair(args.target, args.target if own == NGRAM else own, heads=True)
        drafters[Path(own).name] = NGram() if own == NGRAM else pair.draft
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    with Journal(args.out / "journal.jsonl", settings, args.set_aside_damaged) as journal:
        found = decodes(grid, pair, drafters, ids, args.max_new_tokens, journal)
    table = rows(found, [0.0, args.level])
    publish(args, table, *filter(None, (args.out / "drafters.csv", args.publish)))
    print(columns([row for row in table if row["fastest"]], HEADS, "each at its fastest K"))
    return 0


def lines(
    names: Sequence[str],
    methods: Sequence[str] = (LOSSLESS,),
    widths: Sequence[int] = (4,),
    temperatures: Sequence[float] = (1.0,),
) -> list[Line]:
    """Return plain decoding, and every drafter by every method at every K, at each temperature."""
    return [
        Line(name, config, temperature)
        for temperature in temperatures
        for name, config in [
            (PLAIN, Config(PLAIN, 0, 1)),
            *((name, Config(method, width, 1))
              for name in names for width in widths for method in methods),
        ]
    ]  # fmt: skip


def rows(found: Decodes, levels: Sequence[float] = (0.0,)) -> list[dict[str, Any]]:
    """Return a row for every drafter, temperature, level and K; the fastest K is marked.

    ``over_first`` is beside the first drafter at *its* fastest K. Errors are the jackknife's over
    texts, of ratios over the same texts.
    """
    groups: dict[tuple[float, str, int], list[Line]] = {}
    for line in found.grid.lines:
        groups.setdefault((line.temperature, line.drafter, line.config.width), []).append(line)
    made = [
        (key, nats, _numbers(found, own, nats)) for nats in levels for key, own in groups.items()
    ]
    best: dict[tuple[float, float, str], Estimate] = {}
    for (heat, name, _), nats, own in made:
        speed, known = own["tokens_per_second"], best.get((nats, heat, name))
        if known is None or not known.value >= speed.value:
            best[nats, heat, name] = speed
    first = next(name for _, name, _ in groups if name != PLAIN)
    table = []
    for (heat, name, width), nats, own in made:
        if name == PLAIN and nats:
            continue
        speed = own["tokens_per_second"]
        row = {"drafter": name, "temperature": heat, "nats": nats, "num_draft_tokens": width}
        row["fastest"] = best[nats, heat, name] is speed
        own["over_plain"] = speed / best[0.0, heat, PLAIN]
        own["over_first"] = speed / best[nats, heat, first]
        table.append(row | cells(own))
    return table


def _numbers(found: Decodes, lines: list[Line], nats: float) -> dict[str, Estimate]:
    strict = [own for own in lines if own.config.method in (PLAIN, LOSSLESS)]
    relaxed = [own for own in lines if own not in strict]

    def number(name: str) -> Estimate:
        if nats and relaxed:
            return found.at_level(relaxed, name, nats)
        return found.estimate(strict[0], name)

    scaled = {"ms_per_call": "seconds_per_call", "draft_ms_per_call": "draft_seconds_per_call"}
    own = {name: number(name) for name in ("tokens_per_call", "tokens_per_second")}
    for name, unit in scaled.items():
        seconds = number(unit)
        own[name] = Estimate(1e3 * seconds.value, 1e3 * seconds.left_out, seconds.source)
    return own
