"""Which decodes a table is made of: methods, drafted tokens and batch sizes, in what order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cactus_theory as ct

# Methods that no policy can stand for.
PLAIN, HF_PLAIN, HF_ASSISTED, HF_MIXTURE = "plain", "hf_plain", "hf_assisted", "hf_mixture"
UNDRAFTED = (PLAIN, HF_PLAIN)
SINGLE_ROW = (HF_ASSISTED, HF_MIXTURE)  # the library refuses them more than one row


@dataclass(frozen=True)
class Config:
    """One line of a table: a method (a baseline's name or a policy's spec), K and batch.

    ``width`` is K, 0 for methods without a draft.
    """

    method: str
    width: int
    batch: int

    @property
    def key(self) -> str:
        """Return the name under which results are kept."""
        return f"{self.method}|K={self.width}|batch={self.batch}"


@dataclass(frozen=True)
class Job:
    """One decode: a config on one group of prompts, in one repeat."""

    config: Config
    repeat: int
    group: int

    @property
    def key(self) -> str:
        """Return the name under which the result is kept."""
        return f"{self.config.key}|repeat={self.repeat}|group={self.group}"


def configs(
    baselines: Sequence[str], policies: Sequence[str], widths: Sequence[int], batches: Sequence[int]
) -> list[Config]:
    """Return every line: baselines that draft and all policies at every K.

    Raises
    ------
    ValueError
        An unknown baseline or policy, K or batch below 1.
    """
    for name, values in (("num-draft-tokens", widths), ("batch", batches)):
        for value in values:
            if value < 1:
                raise ValueError(f"--{name}: must be at least 1; got {value}")
    methods = [_checked_baseline(name) for name in baselines] + [*map(checked_policy, policies)]
    found = []
    for batch in batches:
        for method in dict.fromkeys(methods):
            name = method.partition(":")[0]
            if name in SINGLE_ROW and batch > 1:
                continue
            found += [Config(method, k, batch) for k in ([0] if name in UNDRAFTED else widths)]
    return found


def jobs(
    lines: Sequence[Config], prompts: int, repeats: int, *, metered: int = 1, seed: int = 0
) -> Iterator[Job]:
    """Yield every decode: repeat after repeat, each over all lines and prompts, shuffled.

    Within a repeat the prompts come in order, and the lines in an order drawn anew for every
    prompt, so that neither a drift of the machine's speed nor the line before favours one.
    The order depends on ``seed`` alone. The first ``metered`` repeats are not timed.
    """
    for repeat in range(metered + repeats):
        for start in range(prompts):
            due = [config for config in lines if start % config.batch == 0]
            random.Random(f"{seed} {repeat} {start}").shuffle(due)
            for config in due:
                yield Job(config, repeat, start // config.batch)


def checked_policy(spec: str) -> str:
    """Return the spec as results name it; that of a policy in a file stays ``FILE.py:NAME``.

    Raises
    ------
    ValueError, TypeError
        As :func:`cactus_theory.policy`.
    """
    found = ct.policy(spec)
    return spec if own_file(spec) is not None else found.spec


def own_file(method: str) -> Path | None:
    """Return the file of a policy named ``FILE.py:NAME``, None for a registered one."""
    file, found, _ = method.partition(".py:")
    return Path(f"{file}.py") if found else None


def label(method: str) -> tuple[str, str]:
    """Return name and knobs as tables show them: ``FILE.py:NAME`` without its folder."""
    file = own_file(method)
    if file is None:
        name, _, knob = method.partition(":")
        return name, knob
    name, _, knob = method.partition(".py:")[2].partition(":")
    return f"{file.name}:{name}", knob


def series(method: str) -> str:
    """Return the spec without its first knob's value: ``band:price`` for ``band:price=2``."""
    name, knobs = label(method)
    first, *others = knobs.split(",")
    return ":".join(filter(None, [name, ",".join([first.partition("=")[0], *others])]))


def _checked_baseline(spec: str) -> str:
    name, _, weight = spec.partition(":")
    known = (PLAIN, HF_PLAIN, HF_ASSISTED, HF_MIXTURE)
    if name not in known:
        raise ValueError(f"--baselines: must be among {', '.join(known)}; got {spec!r}")
    if (name == HF_MIXTURE) != bool(weight):
        raise ValueError(
            f"--baselines: {HF_MIXTURE} needs a weight, as in hf_mixture:0.5; got {spec!r}"
        )
    return spec
