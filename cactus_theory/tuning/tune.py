"""Which policy, knob, verifier and K are fastest for a divergence per emitted token, on a trace.

For every family and K the knob is solved so that the meter reads the level over all texts. The
fastest setting is chosen by the predicted speed on a random half of these texts, and all that is
reported of a setting is from the other half: the best of many noisy numbers is too good, a number
that was not chosen by is not.
"""

from collections.abc import Callable, Sequence
from functools import partial

from cactus_theory.base.arguments import whole_number
from cactus_theory.base.defaults import TUNED_WIDTHS
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.traces.estimate import Replay, check_texts
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.choices import Halves, Tuned, answers_of, priced
from cactus_theory.tuning.costs import Costs, plain_speed
from cactus_theory.tuning.families import TOLERANCE, Family, Knobs, checked_level, families
from cactus_theory.tuning.measure import TimedSetting

# number of K at which costs are measured: the least, a middle and the largest one
TIMED_WIDTHS = 3
# fields of the trace that a file of the result holds, where they are known
OF_TRACE = ("max_new_tokens", "target", "draft", "temperature", "target_weights", "draft_weights",
            *vars(WHOLE))  # fmt: skip
Measure = Callable[[Sequence[TimedSetting]], Costs]
OnStep = Callable[[str, int, int], None]


def tune(
    trace: Trace,
    costs: Costs | Measure,
    level: float,
    *,
    divergence: str | Divergence = "kl",
    widths: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    capped: bool = False,
    seed: int = 0,
    by: str | None = None,
    on_step: OnStep | None = None,
) -> Tuned:
    """Return the settings within a divergence per token, by predicted speed.

    Parameters
    ----------
    trace : logged rows.
    costs : of a call, or what measures them for settings that it is given.
    level : divergence per emitted token that may be metered, in its unit (nats for KL).
    divergence : what the meter adds up.
    widths : K to try; None for the usual ones up to what was logged.
    policies : as :func:`cactus_theory.tuning.families.families`.
    capped : also replay a ledger, which keeps every answer within the level (KL, of a trace).
    seed, by : of the halves of the texts, which are random; a column of the trace's prompts of
        whose every value both halves get as many texts.
    on_step : called with what is done, how many steps of it are, and of how many.

    Raises
    ------
    ValueError
        A level that is not above 0, more drafted tokens than were logged, an unknown divergence or
        policy, a column that the trace does not keep; CannotSay, which is one, for fewer texts
        than errors need.

    Examples
    --------
    >>> from cactus_theory.traces import Trace
    >>> trace = Trace.open("simulations/data/trace")
    >>> few = {"policies": ["mixture:alpha"], "widths": [1]}
    >>> best = tune(trace, Costs.ratios(0.1), level=0.05, **few).best
    >>> best.verifier, best.num_draft_tokens
    ('chain', 1)
    >>> round(best.replay.divergence_per_token().value, 3)
    0.05
    """
    level, kind = checked_level(level), read_divergence(divergence)
    check_texts(trace.texts)
    on_step = on_step or (lambda what, done, total: None)
    widths = _widths(trace.num_draft_tokens, widths)
    candidates = families(kind, policies, trace.ends)
    groups = [range(trace.texts)] if by is None else trace.groups(by).values()
    halves = Halves.of(groups, whole_number("seed", seed, 0))
    solved = _solved(trace, candidates, widths, level, kind.spec, on_step)
    costs = costs if isinstance(costs, Costs) else costs(_settings(solved))
    choices = [priced(family, replay, costs, halves) for family, replay in solved]
    choices.sort(key=lambda choice: -choice.chosen_by.value)
    tried = {"families": [family.key for family in candidates], "widths": widths}
    about = _about(trace) | {"tried": tried, "halves": {"seed": seed, "by": by}}
    answers = None
    if capped and kind.spec == "kl":
        what, cycles = "replaying a cap on every answer", len(trace)
        answers = answers_of(trace, choices, level, lambda done: on_step(what, done, cycles))
    plain = plain_speed(costs)
    return Tuned(level, kind.spec, costs, plain, tuple(choices), halves, about, answers)


def _widths(logged: int, widths: Sequence[int] | None) -> list[int]:
    if widths is None:
        return sorted({min(width, logged) for width in TUNED_WIDTHS})
    for width in widths:
        if whole_number("num-draft-tokens", width, 1) > logged:
            raise ValueError(f"num-draft-tokens: must be at most the {logged} logged; got {width}")
    if not widths:
        raise ValueError("num-draft-tokens: must hold at least one K; got none")
    return sorted(set(widths))


def _solved(
    trace: Trace,
    candidates: Sequence[Family],
    widths: Sequence[int],
    level: float,
    divergence: str,
    on_step: OnStep,
) -> list[tuple[Family, Replay]]:
    """Return every family at every K, its knob solved; those that cannot stay within are not."""
    solved, total = [], len(candidates) * len(widths)
    for number, family in enumerate(candidates):
        step = partial(on_step, f"solving knobs, {family.key}")
        knobs = Knobs(trace, family, widths, divergence)
        for place, width in enumerate(widths):
            knobs.on_pass = partial(step, number * len(widths) + place, total)
            if (replay := knobs.at(width, level)) is not None:
                solved.append((family, replay))
    on_step("solving knobs", total, total)
    return solved


def _settings(solved: Sequence[tuple[Family, Replay]]) -> list[TimedSetting]:
    """Return every family at a few K, each at the knob solved for the K next to it."""
    widths = sorted({replay.num_draft_tokens for _, replay in solved})
    steps = [round(i * (len(widths) - 1) / (TIMED_WIDTHS - 1)) for i in range(TIMED_WIDTHS)]
    timed = sorted({widths[step] for step in steps})
    by_width: dict[str, dict[int, Replay]] = {}
    for family, replay in solved:
        by_width.setdefault(family.key, {})[replay.num_draft_tokens] = replay
    settings = []
    for key, replays in by_width.items():
        for width in timed:
            near = replays[min(replays, key=lambda other: abs(other - width))]  # noqa: B023
            settings.append(TimedSetting(key, near.policy, near.verifier, width))
    return settings


def _about(trace: Trace) -> dict[str, object]:
    header = trace.header
    details = header.details | vars(header)
    return {
        "cycles": len(trace),
        "undrafted": sum(trace.undrafted),
        "texts": trace.texts,
        "fingerprint": trace.fingerprint,
        "knob_tolerance": TOLERANCE,
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "deterministic",
        **{name: details[name] for name in OF_TRACE if name in details},
    }
