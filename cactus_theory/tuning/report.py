"""Report a result of tuning: a sentence, a table, and the file that ``generate --tuned`` reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.answer_bounds import share
from cactus_theory.base.files import write_marked
from cactus_theory.base.significance import items_needed
from cactus_theory.base.tables import fitted, plain_json, width_of_terminal
from cactus_theory.traces.ends import warning_of_longer_answers
from cactus_theory.traces.estimate import valued
from cactus_theory.traces.replays import SIGNED
from cactus_theory.tuned import FORMAT, VERSION
from cactus_theory.tuning.costs import SECONDS
from cactus_theory.tuning.tune import Choice, Tuned

WIDEST = 100
UPPER = 0.9  # share of texts below the upper quantile
# relative standard error of nats above which knobs are uncertain; least credible call, plain steps
UNCERTAIN, LEAST_CALL = 0.2, 0.9


def sentence(tuned: Tuned) -> str:
    """Return the recommendation, in one sentence or two."""
    best, lossless, unit = tuned.best, tuned.lossless, _unit(tuned)
    plain = f"{_number(tuned.plain)} {unit}"
    if best is None:
        first = tuned.choices[0]
        # on one half of the texts at least it is no faster than plain decoding: see ``Tuned.best``
        faster_on_a_half = max(first.chosen_by.value, first.speed.value) > tuned.plain
        but = ", which pays on one half of the texts only" if faster_on_a_half else ""
        return (
            f"Decode without this draft: plain decoding makes {plain}, the fastest setting within "
            f"{_spent(tuned, tuned.level)} {_with_error(first.speed)} ({first.replay}){but}."
        )
    beside = f"{best.speed.value / tuned.plain:.2f} times plain decoding"
    if lossless is None:
        beside += ", which is faster than lossless drafting"
    elif lossless is not best:
        ratio = best.speed / lossless.speed
        beside += (
            f" and {ratio.value:.3f} ± {_error(ratio.standard_error, 3)} times the fastest "
            f"lossless setting ({lossless.replay})"
        )
        texts = len(best.reported.cycles)
        if needed := items_needed(ratio.value - 1, ratio.standard_error, texts):
            beside += f", significant from {needed:,} texts on ({texts} here)"
    meter = best.reported.divergence_per_token(tuned.divergence)
    return (
        f"Decode with {best.replay}: {_with_error(best.speed)} {unit}, {beside}; it will meter "
        f"{_spent(tuned, meter.value)} (± {_error(meter.standard_error, 4)}){_surprise(best)}."
    )


def _surprise(choice: Choice) -> str:
    """Return the surprise of a setting in words, empty if the surprise was not limited."""
    if "surprise" not in choice.reported.spent:
        return ""
    found = choice.reported.divergence_per_token("surprise")
    signed = f"{found.value:+.3f} (± {_error(found.standard_error, 3)})"
    return f", and a surprise of {signed} nats per token"


def table(tuned: Tuned) -> str:
    """Return a text table of each family at its fastest K, and of plain decoding."""
    unit = "KL" if tuned.divergence == "kl" else tuned.divergence
    heads = ["policy", "verifier", "K", _unit(tuned), "x plain", f"{unit}/token", "tokens/call"]
    if tuned.surprise is not None:
        heads.append("surprise")
    lines = [(choice.chosen_by.value, _cells(choice, tuned)) for choice in tuned.of_families()]
    plain = ["plain", "–", "–", _number(tuned.plain), "1.00", "lossless", "1", "0"]
    lines.append((tuned.plain, plain[: len(heads)]))  # without a surprise if no column has it
    lines.sort(key=lambda line: -line[0])  # by the texts that choose, not by the speeds shown
    title = "each policy at its fastest K; ± one standard error over texts"
    cells, needed = [cells for _, cells in lines], heads.index(f"{unit}/token") + 1
    text = fitted(heads, cells, width_of_terminal(WIDEST), title, needed)
    return f"{text}\nspeeds are predicted; all numbers are of the texts that were not chosen by"


def notes(tuned: Tuned) -> list[str]:
    """Return warnings, and notes on how much single texts spend."""
    lines, best = [*over(tuned), *_warnings(tuned)], tuned.best
    if best is not None and not best.family.lossless:
        has_rounds = best.replay.tokens > 0
        total = best.replay.spent[tuned.divergence][has_rounds]
        spent = total / best.replay.tokens[has_rounds]
        ratio, error = valued("end_ratio", tuned.ends).values()
        longer = warning_of_longer_answers(ratio, error)
        lines.append(
            f"That is a mean: {share((spent > tuned.level).mean())} of the texts lie above "
            f"{tuned.level:g}, one in ten above {np.quantile(spent, UPPER):.3g}, the worst at "
            f"{spent.max():.3g}. A cap holds for every answer: generate --cap. Speeds are of "
            f"tokens: {longer or 'answers may get longer'}."
        )
    if said := tuned.choices[0].replay.undrafted:
        lines.append(f"{said}.")
    return lines


def over(tuned: Tuned) -> list[str]:
    """Return a sentence for each policy without a line in the table, with the reason."""
    within = _spent(tuned, tuned.level)
    return [f"No setting of {name} spends at most {within}: the least is {least:.3g}."
            for name, least in tuned.over.items()] + [
            f"No setting of {name} within {within} has a surprise of at most {tuned.surprise:g}: "
            f"the least is {least:+.3g}." for name, least in tuned.surprised.items()]  # fmt: skip


def _warnings(tuned: Tuned) -> Iterator[str]:
    """Yield warnings of knobs uncertain because of few texts, and of calls timed wrongly."""
    solved = (choice for choice in tuned.choices if choice.family.least < choice.family.most)
    if (fastest := next(solved, None)) is not None:  # the fastest with a knob that was solved
        replay = fastest.replay
        spent, texts = replay.divergence_per_token(tuned.divergence), len(replay.cycles)
        if spent.standard_error > UNCERTAIN * spent.value:
            yield (
                f"Warning: knobs are uncertain: the divergence a token of all {texts} texts is "
                f"known to {spent.standard_error / spent.value:.0%} ({replay}). Log more "
                "rounds (--cycles)."
            )
    costs = tuned.costs
    calls = (costs.call(c.replay.num_draft_tokens, c.family.key) for c in tuned.choices)
    if (least := min(calls) / costs.plain) < LEAST_CALL:
        yield (
            f"Warning: a call was timed at {least:.2f} of the step of plain decoding that it "
            "contains, as on a busy machine: time again (--timings)."
        )
    for width, seconds in zip(costs.widths, costs.target, strict=True):
        if (taken := seconds / costs.plain) > width + 1:
            yield (
                f"Warning: a pass over {width + 1} tokens was timed at {taken:.2f} plain steps, as "
                "where other processes use the cores: time again with --threads 1."
            )
            break


def payload(tuned: Tuned) -> dict[str, Any]:
    """Return the whole result as plain values for JSON."""
    best, lossless = tuned.best, tuned.lossless
    return {
        "format": FORMAT,
        "version": VERSION,
        "level": tuned.level,
        "divergence": tuned.divergence,
        "sentence": sentence(tuned),
        "recommended": None if best is None else _line(best, tuned),
        "lossless": None if lossless is None else _line(lossless, tuned),
        "plain": {"speed": tuned.plain},
        "costs": vars(tuned.costs),
        "unit": _unit(tuned),
        **valued("end_ratio", tuned.ends),
        "table": [_line(choice, tuned) for choice in tuned.choices],
        "over": tuned.over,
        "surprise": tuned.surprise,
        "surprised": tuned.surprised,
        "source": tuned.source,
    }


def save_tuned(tuned: Tuned, path: str | Path) -> None:
    """Write a result of :func:`tune` as JSON for ``generate --tuned``, completely or not at all.

    Raises
    ------
    ValueError
        A name that does not end in .json.
    OSError
        A file that cannot be written.

    Examples
    --------
    >>> from cactus_theory.traces import Trace
    >>> trace = Trace.open("simulations/data/trace")
    >>> few = {"policies": ["mixture:alpha"], "widths": [1]}
    >>> save_tuned(tune(trace, Costs.ratios(0.1), 0.05, **few), "tuned.json")
    >>> ct.load_tuned("tuned.json").level
    0.05
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"--out: must end in .json; got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_marked(path, FORMAT, VERSION, plain_json(payload(tuned)))


def _line(choice: Choice, tuned: Tuned) -> dict[str, Any]:
    """Return the numbers of a setting for JSON."""
    reported = choice.reported
    line: dict[str, Any] = {
        "family": choice.family.name,
        **choice.replay.names,
        **valued("speed", choice.speed),
        "speed_chosen_by": choice.chosen_by.value,
        "over_plain": choice.speed.value / tuned.plain,
        **valued("tokens_per_call", reported.tokens_per_call),
        **valued("divergence_per_token", reported.divergence_per_token(tuned.divergence)),
    }
    for name in SIGNED:
        if name in reported.spent:
            line |= valued(f"{name}_per_token", reported.divergence_per_token(name))
    return line


def _cells(choice: Choice, tuned: Tuned) -> list[str]:
    """Return the cells of a setting's line in the table."""
    meter = choice.reported.divergence_per_token(tuned.divergence)
    tokens = choice.reported.tokens_per_call
    lossless = choice.family.lossless
    cells = [
        *map(str, choice.replay.names.values()),
        _with_error(choice.speed),
        f"{choice.speed.value / tuned.plain:.2f}",
        "lossless" if lossless else f"{meter.value:.4f} ±{_error(meter.standard_error, 4)}",
        f"{tokens.value:.3f} ±{_error(tokens.standard_error, 3)}",
    ]
    if "surprise" in choice.reported.spent:
        cells.append(f"{choice.reported.divergence_per_token('surprise').value:+.3f}")
    return cells


def _unit(tuned: Tuned) -> str:
    """Return the unit of speeds in words."""
    return "tokens/s" if tuned.costs.unit == SECONDS else "tokens per plain step"


def _spent(tuned: Tuned, amount: float) -> str:
    """Return an amount of the divergence per token, with its unit."""
    unit = {"kl": "nats of KL", "regret": "nats of regret"}.get(tuned.divergence, tuned.divergence)
    return f"{amount:.4g} {unit} per token"


def _with_error(estimate: Any) -> str:
    """Return a speed with its standard error, as text."""
    digits = 0 if estimate.value >= 100 else 3
    return f"{estimate.value:,.{digits}f} ± {_error(estimate.standard_error, digits)}"


def _number(value: float) -> str:
    """Return a speed as text."""
    return f"{value:,.{0 if value >= 100 else 3}f}"


def _error(value: float, digits: int) -> str:
    """Return a standard error as text, ``?`` for NaN."""
    return "?" if value != value else f"{value:.{digits}f}"
