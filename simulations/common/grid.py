"""The decodes that a table is made of: lines × prompts × repeats, shuffled, resumed, summed."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cactus_theory.base.specs import file_of, label
from cactus_theory.decoding import schedule
from cactus_theory.decoding.schedule import read_rule
from cactus_theory.decoding.setting import Setting
from cactus_theory.verify import verifiers

from .journal import Journal, Record, filled

# methods that no policy can stand for
BASELINES = PLAIN, HF_PLAIN, HF_ASSISTED = "plain", "hf_plain", "hf_assisted"
UNDRAFTED = (PLAIN, HF_PLAIN)
# numbers of a decode that are above 0
AMOUNTS = ("seconds", "tokens")
# the verifier that names and results leave out
USUAL = "chain"


@dataclass(frozen=True)
class Config(Setting):
    """A line of a table: a setting, and how many texts are decoded at once.

    The policy is a spec, or the name of a baseline, for which ``verifier`` is not used. K is 0 for
    baselines without a draft.
    """

    batch: int = 1

    @property
    def plain(self) -> bool:
        """Return whether our loop decodes without a draft."""
        return self.policy == PLAIN

    @property
    def key(self) -> str:
        return f"{at(self.policy, self.verifier)}|K={self.num_draft_tokens}|batch={self.batch}"

    @property
    def columns(self) -> dict[str, Any]:
        method, knob = label(self.policy)
        verifier = None if self.policy in BASELINES else self.verifier
        row = {"method": method, "knob": knob, "verifier": verifier}
        return row | {"num_draft_tokens": self.num_draft_tokens, "batch": self.batch}


@dataclass(frozen=True)
class Job:
    """A job: a line on one group of prompts, in one repeat."""

    config: Config
    repeat: int
    group: int

    @property
    def key(self) -> str:
        return f"{self.config.key}|repeat={self.repeat}|group={self.group}"


def configs(
    baselines: Sequence[str],
    policies: Sequence[str],
    widths: Sequence[int],
    batches: Sequence[int],
    verifiers: Sequence[str] = (USUAL,),
) -> list[Config]:
    """Return every line: baselines, and each policy under each verifier that can follow it.

    Raises ValueError for an unknown baseline, policy or verifier, for a policy that no verifier can
    follow, and for a K or a batch below 1.
    """
    for name, values in (("num-draft-tokens", widths), ("batch", batches)):
        for value in values:
            if value < 1:
                raise ValueError(f"--{name}: must be at least 1; got {value}")
    for name in baselines:
        if name not in BASELINES:
            raise ValueError(f"--baselines: must be among {', '.join(BASELINES)}; got {name!r}")
    methods = [(name, USUAL) for name in baselines]
    for spec in map(checked_policy, policies):
        methods += [(spec, verifier) for verifier in followers(spec, verifiers)]
    lines = []
    for batch in batches:
        for method, verifier in dict.fromkeys(methods):
            if method == HF_ASSISTED and batch > 1:
                continue  # the library refuses it more than one row
            lengths = [0] if method in UNDRAFTED else widths
            lines += [Config(method, width, verifier, batch=batch) for width in lengths]
    return lines


@dataclass(frozen=True)
class Runs:
    """The records of one line: those of metered repeats, and those of timed repeats.

    If there are no metered repeats, the timed repeats take their place, and vice versa.
    """

    metered: list[Record]
    timed: list[list[Record]]

    @property
    def speeds(self) -> Float[np.ndarray, "repeats"]:
        sums = [(total(records, "tokens"), total(records, "seconds")) for records in self.timed]
        return np.array([tokens / seconds for tokens, seconds in sums])

    def drawn(self, draws: Int[np.ndarray, "draws groups"]) -> Float[np.ndarray, "draws repeats"]:
        """Return the speed in every timed repeat over each of ``draws`` of its groups."""
        tokens, seconds = (
            np.array([[record[own] for record in records] for records in self.timed], dtype=float)
            for own in ("tokens", "seconds")
        )
        return (tokens[:, draws].sum(-1) / seconds[:, draws].sum(-1)).T

    def ratio(self, name: str, over: str) -> float:
        return self.total(name) / self.total(over)

    def total(self, name: str) -> Any:
        return total(self.metered, name)

    def share(self, parts: Sequence[int]) -> float:
        """Return the share of the timed decodes' seconds that went into some of their parts."""
        seconds = [record["parts"] for records in self.timed for record in records]
        sums = [sum(part) for part in zip(*seconds, strict=True)]
        return sum(sums[part] for part in parts) / sum(sums)


def total(records: Sequence[Record], name: str) -> Any:
    return sum(record[name] for record in records)


@dataclass(frozen=True)
class Grid:
    """Decodes of every line on every prompt, repeated.

    There are ``metered`` repeats, which are not timed, and then ``repeats`` timed repeats. ``seed``
    determines the order of the decodes. In every kept record the AMOUNTS must be above 0.
    """

    lines: Sequence[Config]
    prompts: int
    repeats: int
    metered: int = 1
    seed: int = 0

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """Return every decode by its key: repeat after repeat, each over all lines and prompts.

        Within a repeat the prompts come in order, and the lines in an order drawn anew for every
        prompt, so that neither a drift of the machine's speed nor the line before favours one.
        """
        jobs = []
        for repeat in range(self.metered + self.repeats):
            for start in range(self.prompts):
                lines = [line for line in self.lines if start % line.batch == 0]
                random.Random(f"{self.seed} {repeat} {start}").shuffle(lines)
                jobs += [Job(line, repeat, start // line.batch) for line in lines]
        return {job.key: job for job in jobs}

    def fill(
        self, record: Callable[[Job], Record], journal: Journal | None = None
    ) -> dict[str, Record]:
        """Run the jobs that the journal lacks, or all jobs without one; return all records by key.

        The first decode of a line allocates memory, so it must not be timed. If the metered repeats
        of a line are in the journal already, the line is decoded once before its timed repeats, and
        the result of this decode is dropped.
        """
        results: dict[str, Record] = {} if journal is None else journal.results
        if journal is not None:
            journal.check(self._fault)
        missing = [job for key, job in self.jobs.items() if key not in results]
        warmed = {job.config for job in missing if job.repeat < self.metered}
        for line in dict.fromkeys(job.config for job in missing if job.config not in warmed):
            record(Job(line, self.metered, 0))
        jobs = {key: partial(record, job) for key, job in self.jobs.items()}
        return filled(jobs, journal, "decoding")

    def _fault(self, key: str, record: Record) -> str | None:
        for name in AMOUNTS if key in self.jobs else ():
            value = record.get(name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                return f"{name}: must be above 0; got {value!r}"
        return None

    def runs(self, results: Mapping[str, Record]) -> dict[Config, Runs]:
        runs = {}
        for line in self.lines:
            groups = range(math.ceil(self.prompts / line.batch))
            passes = [
                [results[Job(line, repeat, group).key] for group in groups]
                for repeat in range(self.metered + self.repeats)
            ]
            metered = [record for records in passes[: self.metered] or passes for record in records]
            runs[line] = Runs(metered, passes[self.metered :] or passes)
        return runs


def checked_policy(spec: str, ends: Iterable[int] = ()) -> str:
    """Return the checked spec, as results name it; a policy in a file stays ``FILE.py:NAME``.

    ``ends`` are the ids that ``eos`` stands for; ValueError if they are needed and not known.
    """
    policy = read_rule(spec).at_ends(ends)
    return spec if file_of(spec) is not None else policy.spec


def followers(spec: str, names: Sequence[str]) -> list[str]:
    """Return the verifiers that can follow a policy; ValueError if none can.

    If several are named, a policy with ``per_row`` skips the usual one, token by token, where every
    row is solved without a path anyway.
    """
    registered, policy = verifiers(), read_rule(spec)
    for name in names:
        if name not in registered:
            raise ValueError(f"--verifier: must be among {', '.join(registered)}; got {name!r}")
    by_row = len(names) > 1 and "per_row" in policy.spec
    able, refused = schedule.followers(policy, [n for n in names if n != USUAL or not by_row])
    if not able:
        raise ValueError(
            f"--verifier: one must be able to follow {spec}; got {', '.join(names)} ({refused})"
        )
    return able


def fastest(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return every method of a table at its fastest K, in order."""
    best: dict[str, Any] = {}
    for row in rows:
        other = best.setdefault(method(row), row)
        if float(row["tokens_per_second"]) > float(other["tokens_per_second"]):
            best[method(row)] = row
    return best


def at(name: str, verifier: str | None) -> str:
    """Return ``name@verifier``, or ``name`` alone for the usual verifier and for none."""
    return name if verifier in (None, "", USUAL) else f"{name}@{verifier}"


def method(row: Mapping[str, Any]) -> str:
    """Return a row's method with its knobs, and its verifier if given and not the usual one."""
    return at(":".join(filter(None, [row["method"], row["knob"]])), row.get("verifier"))
