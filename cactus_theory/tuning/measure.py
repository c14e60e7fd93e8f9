"""Measure the time of target calls by parts, in short decodes, for ``cactus-theory tune``."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding import DecodeOptions, GenerationResult, decode
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.result import DECODING_PARTS, Seconds
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.text import left_padded
from cactus_theory.tuning.costs import PARTS, SECONDS, Costs

VERIFY = "verify"
# decodes of every setting, of which the median is taken
REPEATS = 5
# of one round: numbers of calls and tokens, and seconds by part
Round = tuple[Reading, Seconds]
# the key of a family, and the setting at which the family is timed
Kind = tuple[str, Setting]


@dataclass(frozen=True)
class Timed:
    """Seconds of one decode, per text: ``call`` of a target call by parts, ``start`` of set-up."""

    call: dict[str, float]
    start: float
    new_tokens: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a call, all parts together."""
        return sum(self.call.values())


@dataclass(frozen=True)
class Prompts:
    """Prompts that are decoded for timing.

    Attributes
    ----------
    ids : token ids of each prompt.
    batch : number of texts decoded together.
    max_new_tokens : new tokens of a text.
    seed : seed of the first decode.
    """

    ids: Sequence[Sequence[int]]
    batch: int
    max_new_tokens: int
    seed: int = 0

    def group(self, number: int) -> list[Sequence[int]]:
        """Return the prompts of batch ``number``; after the last prompt the first is used again."""
        first = number * self.batch
        return [self.ids[(first + row) % len(self.ids)] for row in range(self.batch)]


def measure_costs(
    target_model: Any,
    draft_model: Any,
    prompts: Prompts,
    settings: Sequence[Kind],
    *,
    repeats: int = REPEATS,
    on_decode: Callable[[int, int], None] | None = None,
) -> Costs:
    """Measure the time of target calls, in decodes at every setting and without a draft.

    Each repeat decodes different prompts at all settings in a shuffled order, so that a drift of
    the machine's speed favours no setting. Times of drafting, of the target's pass and of the rest
    are medians over all families at a K; the time of verification is a median of each family. On
    CUDA, time is charged to the part in which the host waits, so only the sum of parts is exact.

    Parameters
    ----------
    target_model, draft_model : the two models, as for :func:`cactus_theory.generate`.
    prompts : prompts and sizes of the decodes.
    settings : keys of families with settings; all families at equal K, temperature and cuts.
    repeats : number of timed decodes at each setting.
    on_decode : called with the number of decodes that are done, and with the number of all decodes.

    Raises
    ------
    ValueError
        No settings, families at different K, and as :func:`cactus_theory.generate`.
    """
    whole_number("batch", prompts.batch, 1)
    widths = _widths(settings)
    _, first = settings[0]
    plain = "", replace(first, policy=None)  # decoding without a draft, of no family
    kinds = [plain, *settings]
    times: dict[Kind, list[Timed]] = {kind: [] for kind in kinds}
    total = (repeats + 1) * len(kinds)
    for repeat in range(repeats + 1):
        order = random.Random(f"{prompts.seed} {repeat}").sample(kinds, len(kinds))
        for number, kind in enumerate(order):
            rounds: list[Round] = []
            _, setting = kind
            result = _decoded(target_model, draft_model, prompts, setting, repeat, rounds)
            if repeat:  # the first decode at a setting also allocates memory, so it is not timed
                times[kind].append(split(result, rounds))
            if on_decode is not None:
                on_decode(repeat * len(order) + number + 1, total)
    return _costs(times.pop(plain), times, widths, prompts.batch)


def _costs(
    plain: Sequence[Timed],
    drafted: Mapping[Kind, Sequence[Timed]],
    widths: tuple[int, ...],
    batch: int,
) -> Costs:
    """Return the medians of the measured times as costs."""

    def part(name: str, width: int, family: str | None = None) -> float:
        seconds = [
            decode.call[name]
            for (key, setting), decodes in drafted.items()
            for decode in decodes
            if setting.num_draft_tokens == width and family in (None, key)
        ]
        return statistics.median(seconds)

    parts: Any = {name: tuple(part(name, width) for width in widths) for name in PARTS}
    keys = dict.fromkeys(key for key, _ in drafted)
    return Costs(
        unit=SECONDS,
        batch=batch,
        plain=statistics.median(decode.seconds for decode in plain),
        widths=widths,
        verify={key: tuple(part(VERIFY, width, key) for width in widths) for key in keys},
        start=statistics.median(decode.start for decodes in drafted.values() for decode in decodes),
        plain_start=statistics.median(decode.start for decode in plain),
        new_tokens=statistics.mean(decode.new_tokens for decode in plain),
        **parts,
    )


def _widths(settings: Sequence[Kind]) -> tuple[int, ...]:
    """Return the rising K of every family; ValueError if they differ between families."""
    if not settings:
        raise ValueError("settings: must hold at least one; got none")
    by_family: dict[str, set[int]] = {}
    for family, setting in settings:
        by_family.setdefault(family, set()).add(setting.num_draft_tokens)
    different = {tuple(sorted(widths)) for widths in by_family.values()}
    if len(different) > 1:
        raise ValueError(f"settings: every family must be at the same K; got {different}")
    return different.pop()


def _decoded(
    target: Any,
    draft: Any,
    prompts: Prompts,
    setting: Setting,
    number: int,
    rounds: list[Round],
) -> GenerationResult:
    """Decode batch ``number`` of the prompts; append its rounds to ``rounds``."""
    ids, mask = left_padded(prompts.group(number), target)
    options = DecodeOptions(
        **setting.keywords,
        attention_mask=mask,
        max_new_tokens=prompts.max_new_tokens,
        seed=prompts.seed + number * prompts.batch,
        meter=False,
        callbacks=Callbacks(on_round=lambda *told: rounds.append(told)),
    )
    return decode(target, setting.drafter(draft), ids, options)


def split(result: GenerationResult, rounds: Sequence[Round]) -> Timed:
    """Return seconds per text and call, without the first round, which reads the prompts."""
    batch = len(result.row_lengths)
    later = rounds[1:] or rounds
    calls = sum(counts.num_calls for counts, _ in later)
    call = {
        name: sum(getattr(seconds, name) for _, seconds in later) / calls for name in DECODING_PARTS
    }
    # as if the first round took as long as the others; the rest of the time is the start
    usual = sum(counts.num_calls for counts, _ in rounds) * sum(call.values())
    start = max(result.seconds.total - usual, 0.0) / batch
    return Timed(call, start, new_tokens=result.num_tokens / batch)
