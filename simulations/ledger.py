"""A hard cap on every answer against a constant price with the same mean: cost, and who exceeds.

A band at a constant price spends its mean *on average*; single answers exceed it. A ledger
spends at most the cap on each answer, at every length. Both decode the same prompts with the
same seeds. Tokens per target call are compared at equal emitted KL: the band's are read off a
straight line between its prices. Standard errors leave out one group of prompts at a time.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.answer_bounds import event_bounds
from cactus_theory.decoding import Ledger
from cactus_theory.traces import Estimate

from .common.decode import Harness
from .common.grid import Config, Grid, Job, Record
from .common.inputs import DATA, add_pair_arguments, at_least, opened
from .common.journal import Journal
from .common.results import columns, publish

# number of groups of prompts that are left out in turn
GROUPS = 8
# tokens between two points at which the spending of answers is shown
EVERY = 2
# probability of the event whose bounds are printed
RATE = 0.9


@dataclass(frozen=True)
class Line:
    """A line of the table: a band at a price (``setting``), or a ledger with a cap."""

    verifier: str
    kind: str
    setting: float

    @property
    def key(self) -> str:
        return f"{self.verifier}|{self.kind}|{self.setting:g}"

    @property
    def batch(self) -> int:
        return sys.maxsize


@dataclass(frozen=True)
class Answers:
    """Answers: what each token was charged, in nats, and target calls."""

    costs: list[np.ndarray]
    calls: np.ndarray

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Answers":
        costs = [np.array(values) for record in records for values in record["costs"]]
        return cls(costs, np.array([values for record in records for values in record["calls"]]))

    def only(self, indices: np.ndarray) -> "Answers":
        return Answers([self.costs[i] for i in indices], self.calls[indices])

    @property
    def point(self) -> tuple[float, float]:
        tokens = sum(map(len, self.costs))
        return sum(float(costs.sum()) for costs in self.costs) / tokens, tokens / self.calls.sum()


def rows_of(answers: Mapping[Line, Answers], prompts: int) -> list[dict[str, Any]]:
    """Return one row a line.

    ``over`` is the share of answers that at their end have spent more per token than the cap
    (of a ledger) or the mean (of a band); ``largest_answer`` the largest spend per token of any
    answer at its end.
    """
    rows = []
    for line, line_answers in answers.items():
        kl, tokens = line_answers.point
        limit = line.setting if line.kind == "ledger" else kl
        ends = np.array([costs.sum() / len(costs) for costs in line_answers.costs])
        ratio, error = _against_band(answers, line, prompts)
        rows.append(
            {
                **asdict(line),
                "answers": len(line_answers.costs),
                "kl_per_token": kl,
                "used": kl / line.setting if line.kind == "ledger" else None,
                "largest_answer": float(ends.max()),
                "over": float((ends > limit).mean()),
                "tokens_per_call": float(tokens),
                "ratio": ratio,
                "ratio_se": error,
            }
        )
    return rows


def along(answers: Mapping[Line, Answers]) -> Iterator[dict[str, Any]]:
    """Yield the nats spent by answers after t tokens: median, 90th percentile and largest."""
    for line, line_answers in answers.items():
        longest = max(map(len, line_answers.costs))
        spent = np.full((len(line_answers.costs), longest), np.nan)
        for row, costs in zip(spent, line_answers.costs, strict=True):
            row[: len(costs)] = costs.cumsum()
        for t in range(EVERY, longest + 1, EVERY):
            sums = spent[:, t - 1][~np.isnan(spent[:, t - 1])]
            yield {
                **asdict(line),
                "tokens": t,
                "median": float(np.median(sums)),
                "upper": float(np.quantile(sums, 0.9)),
                "largest": float(sums.max()),
            }


def _against_band(
    answers: Mapping[Line, Answers], line: Line, prompts: int
) -> tuple[float | None, float | None]:
    """Return tokens per call over the band's at equal KL, and its standard error."""
    if line.kind == "band":
        return None, None
    bands = [answers[band] for band in answers
             if (band.verifier, band.kind) == (line.verifier, "band")]  # fmt: skip
    ratio = _ratio(answers[line], bands)
    count = len(answers[line].costs)
    group = np.arange(count) % prompts * GROUPS // prompts
    parts = [
        _ratio(answers[line].only(indices), [band.only(indices) for band in bands])
        for indices in (np.flatnonzero(group != g) for g in np.unique(group))
    ]
    ratios = [part for part in parts if part is not None]
    if ratio is None or len(ratios) < max(len(parts), 2):
        return ratio, None
    return ratio, Estimate(ratio, np.array(ratios), "prompts").standard_error


def _ratio(ledger: Answers, bands: list[Answers]) -> float | None:
    kl, tokens = ledger.point
    points = sorted(band.point for band in bands)
    band_kls = [band_kl for band_kl, _ in points]
    if not band_kls or not band_kls[0] <= kl <= band_kls[-1]:
        return None
    return float(tokens / np.interp(kl, band_kls, [calls for _, calls in points]))


# what ledgers follow while they can, and drafted tokens a call
LOOSEST, WIDTH = "band:price=0.5,per_row=True", 4
SHOWN = {
    "verifier": "verifier",
    "kind": "kind",
    "setting": "price\nor cap",
    "kl_per_token": "KL a\ntoken",
    "used": "of the\ncap",
    "largest_answer": "largest\nanswer",
    "over": "answers\nover mean",
    "tokens_per_call": "tokens\na call",
    "ratio": "× band at\nequal KL",
    "ratio_se": "±",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--price", type=float, nargs="+", default=[4, 2.8, 2, 1.4, 1, 0.7, 0.5], help="of bands")
    add("--cap", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1], help="nats a token")
    add("--verifier", nargs="+", default=["chain", "block"])
    add("--max-new-tokens", type=int, default=64)
    add("--repeats", type=int, default=4, help="passes over the prompts, with other seeds")
    add("--work", type=Path, default=Path("build/ledger"), help="folder of the journal")
    add("--out", type=Path, default=DATA, help="folder of the two CSV")


def run(args: argparse.Namespace) -> int:
    at_least(args, repeats=1)
    kinds = {"band": args.price, "ledger": args.cap}
    plan = [Line(verifier, kind, setting) for verifier in args.verifier
            for kind in kinds for setting in kinds[kind]]  # fmt: skip
    policies = {line.key: policy_of(line) for line in plan}
    pair, _, prompts = opened(args)
    settings = {
        name: str(getattr(args, name)) for name in ("target", "draft", "prompts", "max_new_tokens")
    }
    harness = Harness(pair, prompts, args.max_new_tokens, seed=0)
    grid = Grid(plan, len(prompts), repeats=0, metered=args.repeats, amounts=())

    def decoded(job: Job) -> Record:
        line = job.config
        config = Config(line.key, WIDTH, len(prompts), line.verifier)
        return answered(harness, config, policies[line.key], job.repeat)

    with Journal(args.work / "journal.jsonl", settings) as journal:
        runs = grid.runs(grid.fill(decoded, journal))
    answers = {line: Answers.of(line_runs.metered) for line, line_runs in runs.items()}
    rows = rows_of(answers, len(prompts))
    publish(args, rows, args.out / "ledger.csv")
    publish(args, list(along(answers)), args.out / "ledger_answers.csv")
    print(columns(rows, SHOWN))
    print(f"largest answer and over: spend a token at some length; {args.out}/ledger*.csv")
    for cap in args.cap:
        bounds = event_bounds(RATE, per_token=cap, tokens=args.max_new_tokens)
        print(f"cap {cap:g} a token, {args.max_new_tokens} tokens: {bounds.sentence}")
    return 0


def policy_of(line: Line) -> Any:
    band = f"band:price={line.setting!r},per_row=True"
    return band if line.kind == "band" else Ledger(LOOSEST, line.setting)


def answered(harness: Harness, config: Config, policy: Any, repeat: int) -> Record:
    """Return the cost of each answer of one pass, token by token, and its target calls."""
    result = harness.decode(config, 0, repeat=repeat, meter=True, policy=policy).result
    assert result is not None and result.token_charges is not None
    rows = zip(result.token_charges.tolist(), result.row_lengths, strict=True)
    costs = [row[:length] for row, length in rows]
    return {"costs": costs, "calls": [reading.num_calls for reading in result.readings()]}
