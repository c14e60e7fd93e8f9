"""Compare policies at equal nats or acceptance: ``ct.compare``, ``cactus-theory compare``."""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.significance import items_needed
from cactus_theory.base.tables import fitting_columns, text_table, width_of_terminal
from cactus_theory.divergences import Divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.optimum.pooled import PooledAcceptance, pooled_acceptance
from cactus_theory.policies import Policy, list_policies
from cactus_theory.policies.registry import class_of
from cactus_theory.policies.tilt import tilt_of
from cactus_theory.traces.cells import merged
from cactus_theory.traces.estimate import Estimate, Replay, valued
from cactus_theory.traces.folder import CUT
from cactus_theory.traces.replays import draft_width
from cactus_theory.traces.rows import RowMeans, SavedRows, Source, row_means
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import Family, family_of
from cactus_theory.tuning.knobs import (
    CLOSE_SURPRISE,
    Knobs,
    charged_in,
    checked_level,
    knobs_of,
    source_of,
    surprise_of,
    within_surprise,
)
from cactus_theory.verify.contract import find_verifier

Line = dict[str, Any]
# nats (per row or token) at which policies are compared by default
USUAL_NATS = (0.05,)
# relative distance in nats up to which the pooled optimum is read off the tangent at a known point,
# which saves solves; the acceptance is then too high by less than 1e-5 of it on the shipped rows
NEAR = 0.01
WIDEST, LEGEND_WIDTH = 140, 100
# columns computed from rows: means, and in OF_ROWS a maximum and two ratios
SIGNED = "entropy", "surprise", "agreement"
OF_ROWS = "largest_row", "share_of_row_optimum", "share_of_pooled_optimum"
# columns of the table: the key of a line → the head, and the format of the value
COLUMNS = {
    "policy": ("policy", ""), "verifier": ("verifier", ""), "num_draft_tokens": ("K", "d"),
    "tokens_per_call": ("tokens\n/call", ".3f±"), "acceptance": ("acceptance", ".4f±"),
    "over_lossless": ("×\nlossless", ".3f±"), "over_first": ("×\nfirst", ".3f±"),
    "texts_needed": ("texts\nneeded", ",d"), "nats": ("nats", ".4f"),
    "entropy": ("entropy", ".2f"), "surprise": ("surprise", "+.3f"),
    "agreement": ("agree-\nment", "+.4f"), "largest_row": ("largest\nrow", ".2f"),
    "share_of_row_optimum": ("of\nrow", ".4f"), "share_of_pooled_optimum": ("of\npooled", ".4f"),
}  # fmt: skip
# the text below the table about each column, printed if the table shows the column
LEGEND = {
    "over_lossless": "± one standard error over texts, or over rows; ratios are paired by them",
    "texts_needed": "texts needed: so many would make the ratio to the first policy significant",
    "entropy": "entropy: of the emitted distribution, in nats",
    "surprise": "surprise: nats by which emitted tokens are less likely under the target than "
    "tokens drawn from the target, for each row, or for each token of a trace",
    "agreement": "agreement: how much more often an emitted token equals a token drawn from the "
    "target than two tokens drawn from the target equal each other",
    "share_of_row_optimum": "of row: share of the best acceptance for the nats spent in each row",
    "share_of_pooled_optimum": "of pooled: the same for these nats in all rows together",
}


@dataclass(frozen=True)
class Comparison:
    """A table of policies, lossless sampling first; ``str`` prints the table, ``latex`` for LaTeX.

    Attributes
    ----------
    lines : a dictionary for each line of the table.
        Setting: ``policy``, with its solved knob; ``knob``, the value of the knob; ``held``, the
        quantity held equal (nats, regret, acceptance, or None), and ``asked``, its level; ``why``
        the knob was not solved, or empty. On a trace also ``verifier`` and ``num_draft_tokens``.
        Speed: ``tokens_per_call`` (on a trace); ``acceptance``, on rows the mean of Σ p φ, on a
        trace the accepted share of the drafted tokens that are reached; ``over_lossless`` and
        ``over_first``, paired ratios to lossless sampling and to the first policy, of tokens per
        call or (on rows) of the acceptance; ``texts_needed`` to make ``over_first`` significant.
        Spent: ``nats`` per row or per emitted token; ``largest_row``, the nats of the worst row;
        ``share_of_row_optimum`` and ``share_of_pooled_optimum``, shares of the best acceptance for
        these nats. Emitted: ``entropy``, ``surprise`` and ``agreement`` of the emitted law
        (:func:`cactus_theory.emitted.directions`); on a trace the latter two are per emitted token.
        Entropy, worst row and shares are None on a trace for verifiers other than the chain. A key
        that ends in ``_se`` is the standard error over texts.
    notes : the divergence, and the numbers of rows, or of cycles and texts.
    """

    lines: list[Line]
    notes: dict[str, Any]

    @property
    def solved(self) -> bool:
        """Return whether every policy reached its level."""
        return not any(line["why"] for line in self.lines)

    def __str__(self) -> str:
        heads, cells = self._cells("±")
        about = ", ".join(f"{count} {name}" for name, count in list(self.notes.items())[1:])
        needed, width = heads.index("nats") + 1, width_of_terminal(WIDEST)
        count = fitting_columns(heads, cells, width, about, needed)
        table = text_table(heads[:count], [row[:count] for row in cells], about)
        legend = "; ".join(said for key, said in LEGEND.items() if COLUMNS[key][0] in heads[:count])
        return "\n".join([table, textwrap.fill(legend, LEGEND_WIDTH), *self.unsolved])

    @property
    def unsolved(self) -> list[str]:
        """Return a sentence for each line whose policy did not reach its level."""
        return [f"{line['policy']}{_at(line)}: {line['why']}" for line in self.lines if line["why"]]

    def latex(self) -> str:
        """Return the table as LaTeX text that uses the package booktabs."""
        heads, cells = self._cells(r"$\pm$ ")
        words = sum(head in ("policy", "verifier") for head in heads)
        lines = [[head.replace("\n", " ") for head in heads], *cells]
        cells = [[re.sub(r"([_%&#])", r"\\\1", cell) for cell in line] for line in lines]
        rows = [" & ".join(line) + r" \\" for line in cells]
        text = [rf"\begin{{tabular}}{{{'l' * words}{'r' * (len(heads) - words)}}}", r"\toprule"]
        text += [rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}", ""]
        return "\n".join(text).replace("×", r"$\times$").replace("–", "--")

    def _cells(self, sign: str) -> tuple[list[str], list[list[str]]]:
        """Return the heads of the table and the cells of all lines that have numbers."""
        lines = [line for line in self.lines if line["nats"] is not None]
        known = {key for line in lines for key, value in line.items() if value is not None}
        columns = {key: column for key, column in COLUMNS.items() if key in known}
        cells = [
            [_cell(line, key, form, sign) for key, (_, form) in columns.items()] for line in lines
        ]
        return [head for head, _ in columns.values()], cells


def _cell(line: Line, key: str, form: str, sign: str) -> str:
    """Return a line's value as text; a ``form`` that ends in ± adds the standard error."""
    value, error = line[key], line.get(f"{key}_se")
    if value is None:
        return "–"
    if not form:  # of a policy in a file, show the file's name without its folder
        return re.sub(r"^.*/(?=[^/]*\.py:)", "", str(value))
    text = format(value, form.rstrip("±"))
    # on a trace lines are compared by tokens per call, and acceptance stands without its error
    bare = not form.endswith("±") or (key == "acceptance" and "tokens_per_call" in line)
    if bare or error is None or not math.isfinite(error):
        return text
    return f"{text} {sign}{format(error, form.rstrip('±'))}"


def compare(
    policies: Sequence[str | Policy] | None,
    rows: Any,
    *,
    nats: Sequence[float] | float = (),
    acceptance: Sequence[float] | float = (),
    regret: Sequence[float] | float = (),
    surprise: float | None = None,
    divergence: str | Divergence = "kl",
    verifiers: Sequence[str] = (defaults.VERIFIER,),
    widths: Sequence[int | None] = (None,),
    undrafted: str = "policy",
    on_line: Callable[[list[Line], int], Any] = lambda lines, total: None,
) -> Comparison:
    """Compare policies on given rows, each at the value of its knob that spends given nats.

    Parameters
    ----------
    policies : policies as for :func:`cactus_theory.solve_knob`; a spec that gives its knob a value
        is not solved. All are compared with the first policy and with lossless sampling. None for
        all of :func:`cactus_theory.list_policies` that fit the rows: on a trace of temperature 0
        the policies for temperature 0, otherwise all others.
    rows : rows or a trace, as for :func:`cactus_theory.solve_knob`.
    nats, acceptance, regret : levels at which to compare, one or several of each; 0.05 nats by
        default. A trace of temperature 0 takes ``regret``, which rises in steps: each policy spends
        at most the level, and at least 95 % of it.
    surprise : upper limit on the surprise, with ``nats`` only: by how many nats the emitted tokens
        may be less likely under the target than tokens drawn from q. Policies with a free knob
        ``tilt`` get the least tilt that keeps the limit, as it costs least acceptance (Theorem 28).
    divergence : the divergence that is spent; nats are in its unit.
    verifiers : verifiers to replay a trace with.
    widths : K to which the drafts of a trace are cut; None for all logged tokens.
    undrafted : on a trace, as for :func:`cactus_theory.traces.replay`.
    on_line : called with all lines so far, and the number of lines that there will be.

    Raises
    ------
    ValueError, TypeError, OSError
        As :func:`cactus_theory.solve_knob`, except that a knob that cannot be solved has a line.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> for line in ct.compare(["band", "mixture"], (q, p), nats=0.05).lines:
    ...     print(line["policy"], round(line["acceptance"], 3))
    speculative 0.6
    band:price=1.15241 0.737
    mixture:alpha=0.276588 0.711
    """
    source = source_of(rows)
    asked: list[tuple[str, float]] = []
    for held, levels in {"nats": nats, "acceptance": acceptance, "regret": regret}.items():
        several = [levels] if isinstance(levels, int | float) else levels
        asked += [(held, checked_level(level, held)) for level in several]
    kind = charged_in(source, divergence, *(held for held, _ in asked))
    greedy = kind == REGRET
    asked = asked or [("regret" if greedy else "nats", level) for level in USUAL_NATS]
    if surprise is not None:
        surprise = check.finite("surprise", surprise, -math.inf)
        if (quantities := {held for held, _ in asked}) != {"nats"}:
            got = ", ".join(quantities)
            raise ValueError(f"surprise: must be given with nats alone; got {got}")
    usual = [name for name in list_policies() if (class_of(name).unit == REGRET) is greedy]
    chosen = usual if policies is None else list(policies)
    ends = source.ends if isinstance(source, Trace) else ()
    families = [family_of(spec, kind, ends or ("eos",)) for spec in chosen]
    ways, notes = [("chain", 0)], {"rows": source.texts}  # rows have no verifier and no K
    if isinstance(source, Trace):
        cuts = sorted({draft_width(source, width) for width in widths})
        ways = [(find_verifier(name).name, width) for name in verifiers for width in cuts]
        notes = {"cycles": len(source), "texts": source.texts}
    # lossless sampling, and policies without a free knob, have one line without a level
    no_level: tuple[str | None, float] = None, math.inf
    lossy = [family for family in families if not family.lossless]
    lines = [(family_of(defaults.POLICY, kind), no_level)]
    lines += [(family, no_level) for family in lossy if not family.varied]
    lines += [(family, level) for level in asked for family in lossy if family.varied]
    table, total = _Table(source, kind, undrafted, surprise), len(ways) * len(lines)
    for verifier, width in ways:
        table.first, table.lossless = {}, None  # ratios are to lines of the same verifier and K
        for family, (held, level) in lines:
            table.add(replace(family, verifier=verifier), width, held, level)
            if family.name == families[0].name:
                table.first[held, level] = table.made
            if family.lossless:
                table.lossless = table.made
            on_line(table.lines, total)
    return Comparison(table.lines, {"divergence": kind.spec} | notes)


def _at(line: Line) -> str:
    """Return the level, the verifier and K of a line, in words."""
    where = f" by {line['verifier']}, K = {line['num_draft_tokens']}" if "verifier" in line else ""
    return where if line["held"] is None else f" at {line['asked']:g} {line['held']}{where}"


def _spent(done: Replay | RowMeans, kind: Divergence) -> Estimate:
    """Return the nats that were spent: per emitted token if ``done`` is a replay, else per row."""
    return done.divergence_per_token(kind.spec) if isinstance(done, Replay) else done.divergence


def _main(done: Replay | RowMeans) -> Estimate:
    """Return the number that lines compare: tokens per call, or the acceptance on rows."""
    return done.tokens_per_call if isinstance(done, Replay) else done.acceptance


class _Table:
    """Lines of a comparison while they are made, and results that later lines need."""

    def __init__(
        self, source: Source, kind: Divergence, undrafted: str, surprise: float | None
    ) -> None:
        self.source, self.kind, self.undrafted, self.surprise = source, kind, undrafted, surprise
        self.lines: list[Line] = []
        self.known: dict[Any, Knobs] = {}
        # replays, or means over rows: of lossless sampling, of the first policy by what is held and
        # its level, and of the line that is being made (None if its knob is not solved)
        self.lossless: Any = None
        self.first: dict[Any, Any] = {}
        self.made: Any = None
        self.optima: list[PooledAcceptance] = []
        self.rows: Any = None  # (target, draft); None for a trace without draft rows
        self.signed = () if kind == REGRET else SIGNED[1:]
        if isinstance(source, SavedRows):
            self.rows = source.target_probs, source.draft_probs
        elif source.manifest.total("draft_rows") and kind != REGRET:
            self.rows = source.rows()
            if CUT in source.header.details:  # a hundredth of the entries, an equal optimum
                self.rows = merged(*self.rows)

    def add(self, family: Family, width: int, held: str | None, level: float) -> None:
        """Add the line of a policy whose knob is solved for ``level`` of ``held``.

        ``held`` is nats, regret or acceptance. If it is None, the policy is used as it is.
        """
        self.made, policy = None, family.base
        try:
            find_verifier(family.verifier).check(policy)
        except ValueError as error:
            why = str(error)
        else:
            if held is None:
                why = self._run_once(family, width, level)
            else:
                policy, why = self._solve(family, width, held, level)
        line: Line = {"policy": family.name if self.made is None else self.made.policy}
        line |= {"held": held, "asked": None if held is None else level}
        line["knob"] = getattr(policy, family.varied) if held and self.made else None
        line |= self._measured(family.verifier, policy, width, (held, level)) | {"why": why}
        self.lines.append(line)

    def _run_once(self, family: Family, width: int, level: float) -> str:
        """Set ``made`` to a fixed policy's replay (or row means); return the line's ``why``."""
        knobs = self._knobs(family, width, None)
        knobs.at(width, level)  # tries the looseness ``first`` alone
        self.made = knobs.replays[width].get(family.first)
        if self.made is None:
            return knobs.why(width, level, "nats")
        # with "=" the spec itself chose the knob's value
        fixed = "=" in family.name or family.lossless
        return "" if fixed else "has no knob that is free, and its own nats"

    def _solve(self, family: Family, width: int, held: str, level: float) -> tuple[Policy, str]:
        """Set ``made`` to the replay (or row means) at the level; return policy and ``why``."""
        knobs = self._knobs(family, width, held)
        if self.surprise is not None:
            make = partial(self._knobs, width=width, held=held)
            family, knobs = within_surprise(family, make, width, level, self.surprise)
        self.made = knobs.at(width, level)
        if self.made is None:
            return family.base, knobs.why(width, level, held)
        why = "" if self.surprise is None else self._too_surprising(family)
        return family.policy(knobs.solved[width]), why

    def _knobs(self, family: Family, width: int, held: str | None) -> Knobs:
        """Return the solver of a family's knob; it is kept, with its results, for further lines."""
        key = family.key, width, held, tilt_of(family.base)
        if key not in self.known:
            options = self.kind, held or "nats", self.undrafted, self.signed
            self.known[key] = knobs_of(self.source, family, width, *options)
        return self.known[key]

    def _too_surprising(self, family: Family) -> str:
        """Return a sentence if the policy exceeds the limit on surprise, empty if it does not."""
        assert self.surprise is not None
        if (found := surprise_of(self.made)) <= self.surprise + CLOSE_SURPRISE:
            return ""
        why = "at any tilt" if family.tiltable or tilt_of(family.base) else "and has no tilt"
        return f"has a surprise of {found:+.4f}, above {self.surprise:g}, {why}"

    def _measured(self, verifier: str, policy: Policy, width: int, asked: Any) -> Line:
        """Return the numbers of a line, from ``made``; they are None if the knob is not solved."""
        made, line = self.made, dict[str, Any]()
        # the first policy at this level, or its only line if it has no free knob
        first = self.first.get(asked) or self.first.get((None, math.inf))
        others = self.lossless or made, first  # the line of lossless sampling is made first
        # here and below ``made and …`` is None for a line that is not solved
        ratios = [other and made and _main(made) / _main(other) for other in others]
        if isinstance(self.source, Trace):
            line |= {"verifier": verifier, "num_draft_tokens": width}
            line |= valued("tokens_per_call", made and made.tokens_per_call)
        line |= valued("acceptance", made and made.acceptance)
        line |= valued("over_lossless", ratios[0]) | valued("over_first", ratios[1])
        line |= {"texts_needed": None} | valued("nats", made and _spent(made, self.kind))
        means, columns = None, dict[str, Any].fromkeys(OF_ROWS)
        if ratios[1]:
            difference, error = ratios[1].value - 1, ratios[1].standard_error
            line["texts_needed"] = items_needed(difference, error, self.source.texts)
        # means over rows need draft rows, and are those of a chain
        if made and verifier == "chain" and self.rows is not None:
            means = row_means(policy, self.source, self.kind, best=True)
            values = means.largest, means.share.value, self._pooled_share(means)
            columns = dict(zip(OF_ROWS, values, strict=True))
        for name in SIGNED:
            line |= valued(name, means and getattr(means, name))
        if isinstance(made, Replay):  # per emitted token, known for every verifier
            for name in self.signed:
                line |= valued(name, made.divergence_per_token(name))
        return line | columns

    def _pooled_share(self, means: RowMeans) -> float | None:
        """Return the mean acceptance as a share of that of the pooled optimum at equal nats."""
        spent = max(means.divergence.value, 0.0)
        if not (self.kind.additive and self.kind.priced and math.isfinite(spent)):
            return None
        optima = self.optima if spent > 0 else ()
        near = [point for point in optima if abs(point.mean_divergence - spent) <= NEAR * spent]
        if not near:
            near = [pooled_acceptance(*self.rows, divergence=self.kind.spec, delta=spent)]
            # only means and price are read again; the arrays of all rows are not kept
            self.optima.append(replace(near[0], target=None, acceptance=None, divergence=None))
        above = near[0].mean_acceptance  # concave in nats, so its tangent is an upper bound
        if more := spent - near[0].mean_divergence:
            above += near[0].price * more
        return means.acceptance.value / above
