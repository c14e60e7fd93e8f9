"""The knob that spends given nats, law by law: a price is nearly the same, a δ is not. Resumes.

Texts are sampled from the target at temperature 1 (``simulations/common/walk.py``). A *law* is the
pair of both models' rows along these texts, unchanged, tempered or truncated. A draft of K tokens
may start at every token; the text's next token x stands for an accepted token with the weight
min(p, h)(x)/q(x), whose mean is the acceptance probability. So replays are unbiased, and nothing
else is sampled. The second table, same_nats, spends the same nats from the target at temperature 1
in three ways: lossless sampling of another target, another target for half of the nats and then the
band, and the band alone. Errors are the jackknife's over texts.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import Repeated, given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding.options import own_ends
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import Policy, read_policy
from cactus_theory.traces.estimate import Replay
from cactus_theory.tuning.families import Family, families
from cactus_theory.tuning.knobs import Knobs

from .common.inputs import (
    add_end_arguments,
    add_pair_arguments,
    at_least,
    prompt_ids,
    settings_of,
)
from .common.journal import Journal, filled
from .common.results import columns, estimates, publish, values_of
from .common.walk import walked

TABLES = "price_travels", "same_nats"
POLICIES = "band:price", "band:delta", "lenience:lenience", "cactus:delta", "band:price,head=0.2"
LAWS = "speculative", "speculative:tilt=0.43", "truncated:top_p=0.95"
# other targets for the second table: name → family
OTHERS = {"tempered": "speculative:tilt", "truncated": "truncated:top_p"}
# FARTHEST: largest standard error of ln knob; FLAT: least slope of ln nats over ln looseness
FARTHEST, FLAT = 9.0, 1e-6
Row = dict[str, Any]
Run = Callable[["OwnTexts", Policy], Replay]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_pair_arguments(parser)
    add_end_arguments(parser)
    add("--num-prompts", type=int, default=64)
    add("--num-draft-tokens", type=int, default=4, metavar="K", help="of a call")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="of a text")
    add("--seed", type=int, default=defaults.SEED)
    add("--threads", type=int, default=1, help="of torch")
    add("--out", type=Path, default=Path("build/price-travels"), metavar="DIR")
    add("--laws", nargs="+", default=list(LAWS), metavar="SPEC", help="of both models' rows")
    add("--policy", action=Repeated, default=list(POLICIES), metavar="NAME:KNOB")
    text, names = "other targets for the second table: tempered, truncated", list(OTHERS)
    add("--elsewhere", nargs="*", default=names, choices=names, metavar="NAME", help=text)
    add("--nats", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="nats a token")
    add("--batch", type=int, default=32, help="texts that are written together")


def run(args: argparse.Namespace) -> int:
    at_least(args, num_prompts=2, batch=1, num_draft_tokens=1, max_new_tokens=2)
    kinds = _kinds(*args.policy)
    makers = {
        f"price_travels {law} {kind.name}": partial(_travelled, law, kind, args.nats)
        for law in args.laws
        for kind in kinds
    }
    for name in args.elsewhere:
        makers[f"same_nats {name}"] = partial(_elsewhere, _kinds(OTHERS[name])[-1], args.nats)
    prompts = given_prompts(args)[: args.num_prompts]
    pair = loaded(args)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(args, prompts, "num_draft_tokens", "batch", "nats")
    ids = prompt_ids(args, pair, prompts)
    texts = cache(lambda: _written(args, pair, ids))
    with Journal(args.out / "journal.jsonl", settings) as journal:
        jobs = {key: lambda make=make: {"rows": make(texts())} for key, make in makers.items()}
        results = filled(jobs, journal, "solving")
        for table in TABLES:
            made = [own["rows"] for key, own in results.items() if key.startswith(table)]
            if made:
                rows = sum(made, [])
                publish(args, rows, args.out / f"{table}.csv", dtype=pair.dtype)
                print(columns(rows, values_of(rows), f"{args.out / table}.csv"))
    return 0


def _kinds(*names: str) -> list[Family]:
    """Return the families lossless and ``NAME:KNOB`` for the verifier ``chain``."""
    return [kind for kind in families(read_divergence("kl"), names) if kind.verifier == "chain"]


LOSSLESS, BAND = _kinds("band:price")


class OwnTexts:
    """Texts sampled from the target with both models' float32 rows, and replays of policies."""

    def __init__(
        self, texts: Sequence[tuple[Tensor, ...]], ends: Sequence[int], width: int
    ) -> None:
        self.texts, self.ends, self.width = texts, list(ends), width
        self.shaped: tuple[str, list[Any]] = "", []

    def rows(self, shape: Policy) -> list[Any]:
        """Return both models' rows under a law; the rows of the last law are kept."""
        if self.shaped[0] != shape.spec:
            made = [[shape.emitted(own, own).float() for own in rows] for _, *rows in self.texts]
            self.shaped = shape.spec, made
        return self.shaped[1]

    def replay(self, policy: Policy, shape: Policy, own: bool = True) -> Replay:
        """Replay a policy on the rows of a law.

        Nats are measured from the law's target or, without ``own``, from the texts' target.
        """
        sums, places = np.zeros((3, len(self.texts))), np.zeros((2, self.width, len(self.texts)))
        for number, ((ids, q_1, _), (q, p)) in enumerate(
            zip(self.texts, self.rows(shape), strict=True)
        ):
            h = policy.emitted(q, p)
            kept = torch.minimum(h, p)
            kl = read_divergence("kl").value(h, (q if own else q_1).double())
            chance, ratio = (row.gather(1, ids[:, None])[:, 0].double() for row in (q_1, kept))
            going = kept.sum(-1) - kept[:, self.ends].sum(-1)  # accepted, and the text goes on
            starts = len(kl) if int(ids[-1]) in self.ends else len(kl) - self.width + 1
            ratio[-1] = 0.0  # nothing follows
            ratio, accepted, going, kl = (
                torch.cat([cell, cell.new_zeros(self.width)]).unfold(0, self.width, 1)[:starts]
                for cell in (ratio / chance, kept.sum(-1), going, kl)
            )
            alive = torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], -1).cumprod(-1)
            taken, more, nats = ((alive * cell).sum(0).numpy() for cell in (accepted, going, kl))
            sums[:, number] = starts, starts + more.sum(), nats.sum()
            places[:, :, number] = alive.sum(0).numpy(), taken
        calls, tokens, nats = sums
        reached, accepted_at = places
        return Replay(
            policy.spec, self.width, source=f"{len(self.texts)} texts", cycles=calls,
            tokens=tokens, spent={"kl": nats}, reached=reached, accepted_at=accepted_at,
            drafts=calls, drafted=calls * self.width,
        )  # fmt: skip


def _written(args: argparse.Namespace, pair: Any, ids: Sequence[Sequence[int]]) -> OwnTexts:
    """Return lossless texts after the prompts, sampled once and kept in a file."""
    ends, path = sorted(own_ends(pair.target)), args.out / "texts.pt"
    if path.exists():
        return OwnTexts(torch.load(path), ends, args.num_draft_tokens)
    texts: list[list[Any]] = [[] for _ in ids]
    progress = Progress("writing texts", len(ids))
    for start in range(0, len(ids), args.batch):
        own = ids[start : start + args.batch]
        coins = torch.Generator().manual_seed(args.seed + start)
        for step in walked(pair, own, args.max_new_tokens, coins):
            cells = step.tokens, step.q.float(), step.p.float()
            for number, *of_text in zip(step.texts, *cells, strict=True):
                texts[start + number].append(of_text)
        progress.update(start + len(own))
    whole = [tuple(map(torch.stack, zip(*cells, strict=True))) for cells in texts]
    torch.save(whole, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return OwnTexts(whole, ends, args.num_draft_tokens)


def _solved(texts: OwnTexts, family: Family, levels: Sequence[float], run: Run) -> list[Row]:
    """Solve a family's knob at each level; return knob, tokens per call, acceptance and nats.

    If even the loosest knob spends less than the level, the row is for the loosest knob.
    """
    knobs = Knobs(family, [0], lambda policy, width: {width: run(texts, policy)},
                  lambda own: own.divergence_per_token().value)  # fmt: skip
    tried, rows = knobs.replays[0], []
    for level in levels:
        replay = knobs.within(0, level)
        if replay is None:
            raise ValueError(f"--nats: {family.name} spends more at any knob; got {level}")
        x = next(x for x, one in tried.items() if one is replay)
        error = _knob_error(family, tried, x)
        row = {"level": level, "knob": family.knob(x), "knob_se": error}
        rows.append(row | _measured(replay))
    return rows


def _knob_error(family: Family, tried: Mapping[float, Replay], x: float) -> float | None:
    """Return a knob's standard error, the nats' error over their slope; None at the loosest."""
    if x >= family.most:
        return None
    y = min((other for other in tried if other != x), key=lambda other: abs(math.log(other / x)))
    nats, beside = (tried[own].divergence_per_token() for own in (x, y))
    slope = math.log(beside.value / nats.value) / math.log(y / x)
    off = min(nats.standard_error / nats.value / max(slope, FLAT), FARTHEST)
    return abs(family.knob(x * math.exp(off)) - family.knob(x))


def _measured(replay: Replay) -> Row:
    return estimates(
        tokens_per_call=replay.tokens_per_call,
        acceptance=replay.acceptance_by_position[0],
        kl_per_token=replay.divergence_per_token(),
    )


def _travelled(law: str, family: Family, levels: Sequence[float], texts: OwnTexts) -> list[Row]:
    """Return a family's rows at each level under a law, with nats from the law's target."""
    shape, rows = read_policy(law), sum(len(ids) for ids, *_ in texts.texts)
    about = {"law": shape.spec, "rows": rows, "family": family.name}
    levels = [0.0] if family.lossless else levels
    solved = _solved(texts, family, levels, lambda own, policy: own.replay(policy, shape))
    return [about | row for row in solved]


def _elsewhere(family: Family, levels: Sequence[float], texts: OwnTexts) -> list[Row]:
    """Return the rows for another target alone, and for half of the nats and then the band."""

    def alone(own: OwnTexts, shape: Policy) -> Replay:
        return own.replay(LOSSLESS.policy(1.0), shape, own=False)

    name = next(name for name, spec in OTHERS.items() if spec == family.name)
    rows = [{"spent": name} | row for row in _solved(texts, family, levels, alone)]
    halves = _solved(texts, family, [level / 2 for level in levels], alone)
    for level, half in zip(levels, halves, strict=True):
        shape = family.at(half["knob"])
        on_top = _solved(texts, BAND, [level], lambda own, policy, shape=shape:
                         own.replay(policy, shape, own=False))  # fmt: skip
        rows += [{"spent": f"{name}, half by the band"} | row for row in on_top]
    return rows
