"""Time policies and baselines on the same prompts; resume where a kill left off.

The default grid takes about 25 minutes on one core; --num-prompts 4 --repeats 3 --metered 1
takes about one. Every decode is written to journal.jsonl under --out before the next one
starts, and the tables (CSV and JSON) and the verdict are made from that file alone. Every
repeat decodes all prompts by all methods in a shuffled order, with seeds of its own, so the
intervals cover both the machine and the texts.

--verifier chain block decodes every policy token by token and by whole drafted paths, by those
that can follow it. A family is a spec without the value of its first knob, and @block after it
where whole paths were verified: --compare soft_band:price@block band:price.
"""

import argparse
from pathlib import Path
from typing import Any

from cactus_theory.decoding import load_pair
from cactus_theory.decoding.drafters import is_head

from ..common.decode import Harness
from ..common.grid import SINGLE_ROW, USUAL, Config, Grid, Job, configs, files_of
from ..common.inputs import add_pair_arguments, at_least, digest, folder_digest, prompts_of
from ..common.journal import Journal, add_journal_arguments
from ..common.results import made, publish, write_json
from . import equal_kl, table
from .table import record
from .verdict import show

BASELINES = ("plain", "hf_plain", "hf_assisted", "hf_mixture:0.5")
# close enough that curves can be read between .02 and .2 nats per token
CACTUS_DELTAS = (1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.03, 0.1, 1)
BAND_DELTAS = (0.01, 0.03, 0.1, 0.3)
BAND_PRICES = (8, 6, 4, 3, 2, 1.5, 1, 0.7, 0.5, 0.35, 0.25)
POLICIES = (
    "speculative",
    "tempered:temperature=0.9",
    "truncated:top_p=0.95",
    "mixture:alpha=0.5",
    "typical",
    *(f"cactus:delta={delta:g}" for delta in CACTUS_DELTAS),
    *(f"band:delta={delta:g}" for delta in BAND_DELTAS),
    *(f"band:price={price:g}" for price in BAND_PRICES),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--num-prompts", type=int, default=16)
    add("--policies", nargs="*", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--verifier", nargs="+", default=[USUAL], metavar="NAME", help="chain, block, tree")
    add("--siblings", type=int, default=0, metavar="M", help="beside each token, with tree")
    add("--baselines", nargs="*", default=list(BASELINES), metavar="NAME")
    add("--num-draft-tokens", type=int, nargs="+", default=[3, 7], metavar="K")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--repeats", type=int, default=12, help="timed; each has seeds of its own")
    add("--metered", type=int, default=3, help="repeats before them, untimed, for cost, quality")
    add("--compare", nargs=2, metavar="FAMILY", help="at equal emitted KL; "
        f"as {' '.join(equal_kl.DEFAULT)}, the default if both are run")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("throughput"))
    add("--publish", type=Path, help="also write the CSV here")
    add_journal_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the tables and the verdict; return 0."""
    if is_head(args.draft):  # the library drafts by models alone
        args.baselines = [own for own in args.baselines if own.partition(":")[0] not in SINGLE_ROW]
    kinds = args.baselines, args.policies, args.num_draft_tokens, args.batch, args.verifier
    lines = configs(*kinds, args.siblings)
    families = equal_kl.chosen(args.compare, lines)
    at_least(args, metered=1, repeats=0, num_prompts=1)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    grid = Grid(lines, len(texts), args.repeats, args.metered, args.seed)
    path, settings = args.out / "journal.jsonl", _settings(args, lines, texts)
    with Journal(path, settings, args.set_aside_damaged) as journal:
        _fill(args, journal, grid, texts)
        runs = grid.runs(journal.results)
    rows = table.rows(runs, args.seed)
    tables = {"throughput": rows}
    if families is not None and (equal := equal_kl.rows(runs, families, args.seed)):
        tables["throughput_equal_kl"] = equal
    elif families is not None:
        print(equal_kl.nothing(families))
    for name, own in tables.items():
        folders = filter(None, (args.out, args.publish))
        publish(args, own, *(folder / f"{name}.csv" for folder in folders))
    write_json(args.out / "throughput.json", {"provenance": made(args)} | tables)
    files = ", ".join(["journal.jsonl", "throughput.json", *(f"{name}.csv" for name in tables)])
    print(f"written to {args.out}/: {files}")
    print(show(tables))
    return 0


def _fill(args: argparse.Namespace, journal: Journal, grid: Grid, texts: list[str]) -> None:
    """Make every decode that the journal lacks, showing progress."""
    missing = len(grid.missing(journal.results))
    if not missing:
        return
    if missing < len(grid.jobs):
        print(f"{len(grid.jobs) - missing} of {len(grid.jobs)} decodes are there already")
    pair = load_pair(args.target, args.draft, device=args.device, heads=True)
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    harness = Harness(pair, ids, args.max_new_tokens, args.seed)
    for config in grid.cold(journal.results):
        harness.decode(config, 0)

    def decoded(job: Job) -> dict[str, Any]:
        return record(harness, texts, job, job.repeat < args.metered)

    grid.fill(decoded, journal)


def _settings(args: argparse.Namespace, lines: list[Config], texts: list[str]) -> dict[str, Any]:
    """Return all that decides a result, so that two runs are never mixed."""
    rules = {file for line in lines for file in files_of(line.method)}
    own = ("max_new_tokens", "repeats", "metered", "seed", "device", "threads")
    return {
        "configs": [line.settings for line in lines],
        "rules": {str(file): digest(file.read_bytes()) for file in sorted(rules)},
        "prompts": digest("\0".join(texts).encode()),
        "target": folder_digest(args.target),
        "draft": folder_digest(args.draft),
    } | {name: getattr(args, name) for name in own}
