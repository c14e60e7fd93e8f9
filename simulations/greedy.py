"""Rules of greedy decoding side by side at equal regret, exact along rounds of strict greedy texts.

Every round drafts the longest K; shorter drafts are its first tokens. At temperature 0 all rules
are deterministic: a few numbers of each drafted place, kept in the journal, decide how many drafted
tokens a rule accepts. Knobs are solved for a regret per emitted token. Between two values of a knob
each round picks one value by a coin, so that any regret in between is met exactly. Errors are the
jackknife's over texts, with the knobs solved anew without each text. ``optimum_over`` is the
optimum's tokens per call at the same regret over the rule's. Resumes.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.commands import models
from cactus_theory.decoding.generate import decode
from cactus_theory.decoding.options import Callbacks, DecodeOptions, own_ends
from cactus_theory.divergences.regret import regrets
from cactus_theory.traces.estimate import Estimate, valued
from cactus_theory.tuning.knobs import checked_level
from cactus_theory.verify.draft import Draft

from .common.inputs import add_pair_arguments, at_least, prompt_ids, prompts_of, settings_of
from .common.journal import Journal, filled
from .common.results import columns, publish

# numbers of a drafted place: the token's regret, probability, rank, and logit over the best logit;
# the likeliest token's probability, the row's entropy, and FLy's entropy of the three likeliest
NUMBERS = "regret", "chance", "rank", "logit_ratio", "best", "entropy", "entropy_3"
# regrets at which the curves are computed, nats per token
LEVELS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)
Places = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rule:
    """A rule of greedy decoding: a function that gives the accepted drafted tokens of each round.

    Attributes
    ----------
    name : the name in tables.
    source : where the rule is published.
    kept : (places, knob, text of each round) → number of accepted tokens, (rounds,).
    knobs : values of the knob to try, from strict to loose.
    usual : the published or shipped value of the knob, None if there is none.
    """

    name: str
    source: str
    kept: Callable[[Places, float, np.ndarray], np.ndarray]
    knobs: np.ndarray
    usual: float | None = None


def prefix(test: np.ndarray) -> np.ndarray:
    """Return how many places of each round pass the test before the first that fails."""
    return np.logical_and.accumulate(test, 1).sum(1)


def best_path(at: Places, price: float, _: Any = None) -> np.ndarray:
    """Accept the n tokens that maximise n − ν Σ ρ, the largest such n (THEORY.md, Theorem 30)."""
    with np.errstate(invalid="ignore"):
        cost = np.nan_to_num(price * at["regret"], nan=0.0, posinf=math.inf)
    worth = np.concatenate([np.zeros((len(cost), 1)), (1 - cost).cumsum(1)], 1)
    return worth.shape[1] - 1 - worth[:, ::-1].argmax(1)


def threshold(at: Places, most: float, _: Any = None) -> np.ndarray:
    return prefix(at["regret"] <= most)


def relaxed(at: Places, delta: float, _: Any = None) -> np.ndarray:
    """Accept one of the ten likeliest tokens if at most δ below the best (TensorRT-LLM, MAX)."""
    near = (at["rank"] <= 10) & (at["chance"] >= at["best"] - delta)
    return prefix(near | (at["regret"] == 0))


def typical(at: Places, epsilon: float, _: Any = None) -> np.ndarray:
    """Accept tokens by Medusa's rule; the likeliest token replaces a rejected token."""
    least = np.minimum(epsilon, math.sqrt(epsilon) * np.exp(-at["entropy"]))
    return prefix((at["chance"] >= least) | (at["regret"] == 0))


def mars(at: Places, ratio: float, _: Any = None) -> np.ndarray:
    """Accept also the second likeliest token if its logit exceeds ``ratio`` times the largest."""
    return prefix((at["regret"] == 0) | ((at["rank"] == 2) & (at["logit_ratio"] > ratio)))


def asd(most: float, budget: float = math.inf) -> Callable[..., np.ndarray]:
    """Return the rule of ASD (arXiv 2608.03447): accept the longest prefix within its limits.

    Token i, counted from 0, may have a regret ρ_i of at most g (K − i), where g is the knob. At
    most ``most`` tokens may have a regret above 0. Over all rounds of a text, Σ ρ stays within
    ``budget``.
    """

    def kept(at: Places, gate: float, text: np.ndarray) -> np.ndarray:
        lost, missed = at["regret"], at["regret"] > 0
        value = lost.shape[1] - np.arange(lost.shape[1])
        good = (~missed | (lost <= gate * value)) & (missed.cumsum(1) <= most)
        if budget == math.inf:
            return prefix(good)
        counts, left = np.zeros(len(lost), int), {}
        for row, own in enumerate(text):
            room = left.get(own, budget)
            counts[row] = prefix((good[row] & (lost[row].cumsum() <= room))[None])[0]
            left[own] = room - lost[row, : counts[row]].sum()
        return counts

    return kept


def fly(window: int) -> Callable[..., np.ndarray]:
    """Return FLy's rule: accept a mismatch if q is undecided and the next W tokens match."""

    def kept(at: Places, entropy: float, _: Any = None) -> np.ndarray:
        match = at["regret"] == 0
        count = match.shape[1]
        after = np.zeros_like(match)
        for place in range(count - window):
            after[:, place] = match[:, place + 1 : place + 1 + window].all(1)
        over = after & (at["entropy_3"] >= entropy) & (at["chance"] > 0)
        return prefix(match | over)

    return kept


def spaced(low: float, high: float, count: int = 500) -> np.ndarray:
    return np.concatenate([[0.0], np.geomspace(low, high, count)])


PRICES = np.concatenate([[math.inf], np.geomspace(1e4, 0.05, 1500)])
OPTIMUM = Rule("regret, block", "THEORY.md, Theorem 30", best_path, PRICES)
RULES = [
    OPTIMUM,
    Rule("regret, chain; margin; cascade", "llama.cpp 24804; arXiv 2405.19261, equation 15",
         threshold, spaced(1e-4, 20), 0.3),
    Rule("relaxed, k = 10", "TensorRT-LLM, MAX", relaxed, spaced(1e-5, 1), 0.6),
    Rule("typical", "Medusa, arXiv 2401.10774", typical, spaced(1e-9, 1)[:0:-1], 0.09),
    Rule("MARS", "arXiv 2601.15498", mars, 1 - spaced(1e-5, 1), 0.9),
    *(Rule(f"ASD, m = {m:g}", "arXiv 2608.03447", asd(m), spaced(1e-4, 20), None)
      for m in (1, 2, math.inf)),
    Rule("ASD, B = 8, m = 2", "arXiv 2608.03447", asd(2, 8.0), spaced(1e-4, 20), 0.25),
    *(Rule(f"FLy, W = {w}", "arXiv 2511.22972", fly(w), spaced(1e-4, 1.2)[::-1], 0.3)
      for w in (2, 4)),
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--num-prompts", type=int, default=48)
    add("--num-draft-tokens", type=int, nargs="+", default=[2, 3, 5, 8], metavar="K")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="of a text")
    text = "nats a token at which rules are compared"
    add("--regret", type=float, nargs="+", default=list(LEVELS), metavar="NATS", help=text)
    add("--seed", type=int, default=defaults.SEED)
    add("--out", type=Path, default=Path("build/greedy"), metavar="DIR")
    parser.set_defaults(eos_token_ids=None, no_start=False, threads=1)


def run(args: argparse.Namespace) -> int:
    at_least(args, num_prompts=2, num_draft_tokens=1, max_new_tokens=1)
    for level in args.regret:
        checked_level(level, "--regret")
    prompts = prompts_of(args.prompts, "--prompts")[: args.num_prompts]
    settings = settings_of(args, prompts, widest=max(args.num_draft_tokens))
    pair = models.loaded(args)
    ids = prompt_ids(args, pair, prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = {
        f"text {number}": partial(_rounds, pair, prompt, args) for number, prompt in enumerate(ids)
    }
    with Journal(args.out / "journal.jsonl", settings) as journal:
        texts = [one["rounds"] for one in filled(jobs, journal, "decoding texts").values()]
    rows = [row for width in sorted({*args.num_draft_tokens}) for row in _table(texts, width, args)]
    rows = [{"prompts": args.prompts.name, "draft": Path(args.draft).name} | row for row in rows]
    publish(args, rows, args.out / "greedy.csv", dtype=pair.dtype)
    shown = "rule", "num_draft_tokens", "asked", "knob", "regret", "tokens_per_call"
    shown = *shown, "over_strict", "optimum_over", "optimum_over_se"
    print(columns(rows, {name: name.replace("_", " ") for name in shown}, args.prompts.name))
    return 0


def _rounds(pair: Any, prompt: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Decode a prompt strictly and return the NUMBERS of each drafted place of each round."""
    width, rounds, passes = max(args.num_draft_tokens), list[Any](), list[Tensor]()
    ends = own_ends(pair.target)

    def keep(q: Tensor, draft: Draft, *_: Any) -> None:
        tokens = draft.token_ids[0, : draft.lengths[0]].tolist()
        last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        levels = passes[-1][-len(tokens) - 1 :]  # logsumexp, by which ln q gives the raw logits
        rows = q[0, : last + 1]
        places = _numbers(rows, tokens[: last + 1], levels)
        rounds.append({"ended": bool(tokens) and tokens[last] in ends, "places": places})

    options = DecodeOptions(
        policy=defaults.STRICT, temperature=0.0, num_draft_tokens=width, meter=False,
        max_new_tokens=args.max_new_tokens + width, seed=args.seed,
        stop=lambda own, start: own.shape[1] - start >= args.max_new_tokens,
        callbacks=Callbacks(on_rows=keep),
    ).at_ends_of(pair.target)  # fmt: skip
    hook = pair.target.register_forward_hook(
        lambda model, given, made: passes.append(made.logits[0].float().logsumexp(-1))
    )
    try:
        decode(pair.target, pair.draft, torch.tensor([prompt], device=pair.target.device), options)
    finally:
        hook.remove()
    return {"rounds": rounds}


def _numbers(q: Tensor, tokens: list[int], levels: Tensor) -> list[list[float]]:
    """Return NUMBERS of each place, from rows (places, V) of probabilities."""
    found = []
    for row, token, level in zip(q.double(), tokens, levels.tolist(), strict=False):
        lost, chance = float(regrets(row)[token]), float(row[token])
        rank = 1 + int((row > chance).sum())
        top = float(row.max())
        ratio = (math.log(chance) + level) / (math.log(top) + level) if chance else -math.inf
        first = row.argmax().item() == token  # of equal logits strict decoding takes the first
        lost = 0.0 if first else max(lost, np.finfo(float).tiny)
        entropies = (-float(torch.xlogy(own, own).sum()) for own in (row, row.topk(3).values))
        found.append([lost, chance, rank, ratio, top, *entropies])
    return found


def _table(texts: list[Any], width: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of strict decoding, then each rule's rows: per level, and at the usual knob."""
    sums = {rule.name: _Sums(rule, texts, width) for rule in RULES}
    best, strict = sums[OPTIMUM.name], sums[OPTIMUM.name].at_knob(0)
    about = {"texts": len(texts), "rounds": sum(map(len, texts)), "num_draft_tokens": width}
    yield {"rule": "strict"} | about | _row(strict, strict, None, 0.0, None)
    for rule in RULES:
        own = sums[rule.name]
        for level in args.regret:
            if (made := own.at(level)) is not None:
                yield (
                    {"rule": rule.name} | about | _row(made, strict, best.at(level), level, made[2])
                )
        if rule.usual is not None:
            place = int(np.abs(rule.knobs - rule.usual).argmin())
            made = own.at_knob(place)
            yield (
                {"rule": rule.name} | about | _row(made, strict, best.at(made[1]), None, rule.usual)
            )


def _row(made: Any, strict: Any, best: Any, asked: float | None, knob: float | None) -> Any:
    tokens, regret, _ = made
    over = tokens / strict[0]
    row = {"asked": asked, "knob": knob, "regret": regret} | valued("tokens_per_call", tokens)
    return row | valued("over_strict", over) | valued("optimum_over", best and best[0] / tokens)


class _Sums:
    """The tokens and the regret of each text under a rule, at each value of the knob."""

    def __init__(self, rule: Rule, texts: list[Any], width: int) -> None:
        self.rule, self.calls = rule, np.array([len(rounds) for rounds in texts], float)
        at, ended, text = _places(texts, width)
        shape = len(rule.knobs), len(texts)
        self.tokens, self.regret = np.zeros(shape), np.zeros(shape)
        row = np.arange(len(text))
        spent = np.concatenate([np.zeros((len(text), 1)), at["regret"].cumsum(1)], 1)
        for place, knob in enumerate(rule.knobs):
            kept = rule.kept(at, float(knob), text)
            # no recovered or bonus token follows an accepted end-of-text token
            made = kept + 1 - (ended & (kept == at["drafted"][:, 0]))
            np.add.at(self.tokens[place], text, made)
            np.add.at(self.regret[place], text, spent[row, kept])

    def at_knob(self, place: int) -> Any:
        """Return (tokens per call, regret per token, knob) at the knob's value of this index."""
        tokens, regret = self.tokens[place], self.regret[place]
        left = [own.sum() - own for own in (tokens, self.calls)]
        made = Estimate(tokens.sum() / self.calls.sum(), left[0] / left[1], "rounds")
        return made, float(regret.sum() / tokens.sum()), float(self.rule.knobs[place])

    def at(self, level: float) -> Any:
        """Return :meth:`at_knob` at a regret per token of ``level``; None if no knob spends it."""
        everything = self._solved(level, slice(None))
        if everything is None:
            return None
        count = len(self.calls)
        left = [self._solved(level, np.arange(count) != text) for text in range(count)]
        alone = np.array([math.nan if own is None else own[0] for own in left])
        return Estimate(everything[0], alone, "rounds"), level, everything[1]

    def _solved(self, level: float, texts: Any) -> tuple[float, float] | None:
        """Return tokens per call and the knob at a level, mixed from the two knobs around it.

        Mixing is linear: each round takes the looser knob with the probability ``share``.
        """
        tokens, regret = (own[:, texts].sum(1) for own in (self.tokens, self.regret))
        over = regret - level * tokens
        above = np.flatnonzero(over >= 0)
        if not len(above) or above[0] == 0:
            return None
        high = int(above[0])
        share = -over[high - 1] / (over[high] - over[high - 1])
        made = (1 - share) * tokens[high - 1] + share * tokens[high]
        return float(made / self.calls[texts].sum()), float(self.rule.knobs[high])


def _places(texts: list[Any], width: int) -> tuple[Places, np.ndarray, np.ndarray]:
    """Return the NUMBERS of the first K places of all rounds, which rounds end, and their texts.

    Places without a drafted token have a regret of ∞, so that no rule accepts there.
    """
    rounds = [(text, own) for text, all_ in enumerate(texts) for own in all_]
    shape = len(rounds), width
    at = {name: np.zeros(shape) for name in NUMBERS}
    at["regret"][:], at["rank"][:] = math.inf, math.inf
    drafted, ended = np.zeros((len(rounds), 1), int), np.zeros(len(rounds), bool)
    for row, (_, own) in enumerate(rounds):
        places = own["places"][:width]
        drafted[row], ended[row] = len(places), own["ended"] and len(own["places"]) <= width
        for place, numbers in enumerate(places):
            for name, value in zip(NUMBERS, numbers, strict=True):
                at[name][row, place] = value
    return at | {"drafted": drafted}, ended, np.array([text for text, _ in rounds])
