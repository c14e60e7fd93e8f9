"""Which runs a throughput table is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cactus_theory as ct

# Baselines that no policy can stand for.
PLAIN, HF_PLAIN, HF_ASSISTED, HF_MIXTURE = "plain", "hf_plain", "hf_assisted", "hf_mixture"
UNDRAFTED = (PLAIN, HF_PLAIN)
SINGLE_ROW = (HF_ASSISTED, HF_MIXTURE)  # the library refuses them more than one row


@dataclass(frozen=True)
class Config:
    """One line of the table: a method (a baseline's name or a policy's spec), K and batch.

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
    """One decode: a config on one group of prompts, in one repeat (0 is untimed, metered)."""

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
    methods = [_checked_baseline(name) for name in baselines]
    methods += [ct.policy(spec).spec for spec in policies]
    found = []
    for batch in batches:
        for method in dict.fromkeys(methods):
            name = method.partition(":")[0]
            if name in SINGLE_ROW and batch > 1:
                continue
            found += [Config(method, k, batch) for k in ([0] if name in UNDRAFTED else widths)]
    return found


def jobs(lines: Sequence[Config], prompts: int, repeats: int) -> Iterator[Job]:
    """Yield every decode, interleaved: repeat, then prompts, then line."""
    for repeat in range(repeats + 1):
        for start in range(prompts):
            for config in lines:
                if start % config.batch == 0:
                    yield Job(config, repeat, start // config.batch)


def described(lines: Sequence[Config]) -> list[dict[str, Any]]:
    """Return the configs as JSON knows them."""
    return [asdict(line) for line in lines]


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
