"""What three ideas add to siblings: tokens below them, other places for them, rows that know them.

All on the rounds of one lossless decode, coins integrated out. A placement is learned from the
texts of the other half, and has as many nodes as m siblings a place on average; ``known q`` is
what no placement can beat. ``nodes_of_equal_gain`` are those that a placement needs for the gain of
m siblings a place, as a share of theirs.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import Pair
from cactus_theory.decoding.models import CachedModel
from cactus_theory.optimum.soft import Worth
from cactus_theory.policies.soft_band import SoftBand
from cactus_theory.traces import Estimate

from ..common.inputs import PAIR
from ..common.progress import Progress
from ..traces.table import reached, valued
from .rounds import LOSSLESS, Round, alone, followed, logged, replayed

# candidates a place, siblings that are continued, and by how many tokens at most
CANDIDATES, CONTINUED, DEEPEST = 16, 4, 3
# what is compared with: the policy's own row, so many siblings a place
PLAIN, SOFT = f"{CONTINUED} a place", f"soft band, {CONTINUED} a place"
# bins of probabilities of tokens and of paths; halvings of the scale of a row
BINS, HALVINGS = 2.0 ** np.arange(-12, 0.1, 0.75), 50
Cells = np.ndarray


def ideas(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> list[Any]:
    """Return the table, by its name."""
    return [
        ("trees_ideas", [row for heat in args.temperature for row in _at(args, pair, ids, heat)])
    ]


def _at(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float
) -> list[dict[str, Any]]:
    bands = [f"band:price={price:g}" for price in args.prices]
    softs = [f"soft_band:price={price:g},values={PAIR / 'values.json'}" for price in args.prices]
    width, count = args.num_draft_tokens[0], len(ids)
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros((3, count)))  # tokens, nats, nodes
    cells: dict[str, list[Any]] = {spec: [] for spec in (LOSSLESS, *bands)}
    cycles, texts = np.zeros(count), []
    with Progress(f"ideas, temperature {temperature:g}", count) as progress:
        for text, prompt in enumerate(ids):
            options = {"temperature": temperature, "seed": args.seed + text}
            whole, rounds = logged(pair, prompt, width, args.max_new_tokens, **options)
            cycles[text] = len(rounds)
            texts += [text] * len(rounds)
            deeper = below(pair, whole, rounds, temperature, args.seed + text)
            for own, runs in zip(rounds, deeper, strict=True):
                seen = _by_own_rows(own, runs, cells)
                for spec in softs:
                    seen |= _by_values(own, spec)
                for key, found in seen.items():
                    sums[key][:, text] += found
            progress.advance()
    needed = _placed(cells, np.array(texts), sums)

    def read(name: str) -> list[Estimate | None]:
        """Return tokens per call without loss, where that is not SOFT, and at the level."""
        known = {
            spec: replayed(spec, name, width, cycles, *sums[name, spec][:2])
            for spec in (LOSSLESS, *bands, *softs)
            if (name, spec) in sums
        }
        lossless = known.pop(LOSSLESS, None)
        return [lossless and lossless.tokens_per_call, reached([*known.values()], args.level)]

    rows = []
    for name in dict.fromkeys(name for name, _ in sums):
        rival = SOFT if name.startswith("soft") else PLAIN
        nodes = next(own[2].sum() / cycles.sum() for (one, _), own in sums.items() if one == name)
        for level, own, plain in zip((0.0, args.level), read(name), read(rival), strict=True):
            if own is None or plain is None:
                continue
            row = {"temperature": temperature, "idea": name, "over": rival, "kl_per_token": level}
            row |= {"nodes": nodes} | valued("tokens_per_call", own)
            row |= valued("ratio", own / plain)
            share = needed.get(name) if not level else None
            missing = {"nodes_of_equal_gain": None, "nodes_of_equal_gain_se": None}
            rows.append(row | (valued("nodes_of_equal_gain", share) if share else missing))
    return rows


def _by_own_rows(
    own: Round, runs: list[list[Round]], cells: dict[str, list[Any]]
) -> dict[Any, Any]:
    """Return tokens, nats and nodes by idea and policy of rows that know of no siblings."""
    found = {}
    chances, likely = own.p.topk(CANDIDATES)
    new = (1 - chances).numpy()  # nodes: a sibling that is drawn, too, is one node with it
    drafted = own.p[range(len(own.ids)), own.ids].numpy()
    for spec in cells:
        rule = ct.policy(spec)
        course = followed(own, alone(own, rule))
        tokens, nats = course.sums()[:, -1]
        caught = course.replaced.gather(1, likely).numpy()
        cells[spec].append((caught, chances.numpy(), drafted, course.alive.numpy()))
        deeper = [[followed(run, alone(run, rule)).sums() for run in place] for place in runs]
        more = np.array(deeper).transpose(2, 3, 0, 1)  # tokens and nats by how deep, place, rank
        for m in (CONTINUED // 2, CONTINUED, 2 * CONTINUED, 4 * CONTINUED):
            gain = tokens + caught[:, :m].sum(), nats, len(own.ids) + new[:, :m].sum()
            found[f"{m} a place", spec] = gain
        for m, deep in (
            (CONTINUED // 2, 1),
            *((CONTINUED, deep) for deep in range(1, DEEPEST + 1)),
        ):
            reach, (longer, paid) = caught[:, :m], more[:, deep, :, :m]
            nodes = len(own.ids) + (1 + deep) * new[:, :m].sum()
            gain = tokens + (reach * longer).sum(), nats + (reach * paid).sum(), nodes
            found[f"{m} a place, {deep} below", spec] = gain
    return found


def _by_values(own: Round, spec: str) -> dict[Any, Any]:
    """Return the same of soft bands, without and with what a caught token is worth."""
    rule, found = ct.policy(spec), {}
    assert isinstance(rule, SoftBand)
    worths = rule.worth(range(len(own.ids) - 1, -1, -1))
    likely = own.p.topk(CONTINUED)[1]
    nodes = len(own.ids) + float((1 - own.p.gather(1, likely)).sum())
    for name, fixed in ((SOFT, likely[:, :0]), ("soft band that counts catches", likely)):

        def row(place: int, alive: float, fixed: Tensor = fixed) -> Tensor:
            rows = own.q[place].numpy(), own.p[place].numpy()
            law = counting(*rows, alive, worths[place], rule.price, fixed[place].numpy())
            return torch.from_numpy(law)

        course = followed(own, row)
        caught = course.replaced.gather(1, likely).sum(1)
        found[name, spec] = *course.sums(caught)[:, -1], nodes
    return found


def counting(
    q: np.ndarray, p: np.ndarray, alive: float, worth: Worth, price: float, fixed: np.ndarray
) -> np.ndarray:
    """Return the row h that is best if a fixed token yields one token more where it is caught.

    In KL, ln(h/q) is (slope of the worth)/price and a constant: the soft band's, and at fixed
    tokens the slope is 1 beyond what is kept.
    """
    least = q.copy()
    least[fixed] *= np.exp(1 / price)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.nan_to_num(p / alive, nan=0.0)
    steps = [(np.exp(slope / price) * q, knot * kept)
             for knot, slope in zip(worth.knots, worth.slopes, strict=True)]  # fmt: skip
    low, high = -worth.slopes[0] / price, 0.0
    for _ in range(HALVINGS):
        scale = np.exp((low + high) / 2)
        law = scale * least
        for edge, most in steps:
            np.maximum(law, np.minimum(scale * edge, most), out=law)
        low, high = (low, (low + high) / 2) if law.sum() > 1 else ((low + high) / 2, high)
    return law / law.sum()


@torch.no_grad()
def below(
    pair: Pair, whole: Tensor, rounds: Sequence[Round], temperature: float, seed: int
) -> list[list[list[Round]]]:
    """Return runs of DEEPEST tokens drafted below CONTINUED siblings of each place and round."""
    source, found = torch.Generator().manual_seed(seed), []
    caches = [CachedModel(own, whole.shape[1], slack=999) for own in (pair.target, pair.draft)]

    def rows(cached: CachedModel, own: Round, ids: list[int], parents: list[int]) -> Tensor:
        start, count = cached.lengths[0], len(ids)
        if start < own.before:
            cached.feed(whole[:, start : own.before], [own.before - start], [1])
        tree = torch.tensor([ids]), [count], [count], torch.tensor([parents])
        logits = cached.feed(*tree)[0].double()
        cached.rollback(0, own.before)
        return (logits / temperature).softmax(-1)

    for own in rounds:
        beside = own.p.topk(CONTINUED)[1].flatten().tolist()
        ids = [*own.ids, *beside]
        parents = [*range(-1, len(own.ids) - 1)]
        parents += [place - 1 for place in range(len(own.ids)) for _ in range(CONTINUED)]
        last, drawn = range(len(own.ids), len(ids)), []
        for _ in range(DEEPEST):
            p = rows(caches[1], own, ids, parents)[last]
            drawn.append((p, torch.multinomial(p, 1, generator=source)[:, 0]))
            parents += last
            last = range(len(ids), len(ids) + len(beside))
            ids += drawn[-1][1].tolist()
        q = rows(caches[0], own, ids, parents)[len(own.ids) :].reshape(DEEPEST + 1, len(beside), -1)
        p, tokens = (torch.stack(part, 1) for part in zip(*drawn, strict=True))
        runs = [Round(*one) for one in zip(q.transpose(0, 1), p, tokens.tolist(), strict=True)]
        found.append([runs[at : at + CONTINUED] for at in range(0, len(runs), CONTINUED)])
    return found


def _placed(
    cells: dict[str, list[Any]], texts: np.ndarray, sums: dict[Any, np.ndarray]
) -> dict[str, Estimate]:
    """Add siblings that are placed by a score to the sums; return their nodes of equal gain."""
    needed = {}
    for spec, parts in cells.items():
        caught, chances, drafted, alive = map(np.stack, zip(*parts, strict=True))
        plain = np.zeros(caught.shape, dtype=bool)
        plain[..., :CONTINUED] = True
        each = np.zeros(caught.shape, dtype=int) + texts[:, None, None]
        place = np.indices(caught.shape)[1:]
        ranks = place[0] * CANDIDATES + place[1]
        known = caught, chances, texts
        scores = {
            "placed by depth and rank": _learned(ranks, *known),
            "placed by chances": _learned(_kinds(chances, drafted, alive, texts), *known),
            "placed by known q": caught / (1 - chances),
        }
        for name, score in scores.items():
            order = np.random.default_rng(0).permutation(score.size)  # ties
            order = order[np.argsort(-score.ravel()[order], kind="stable")]
            new, gain, of, usual = (
                own.ravel()[order] for own in (1 - chances, caught, each, plain)
            )
            taken = new.cumsum() <= new[usual].sum()
            by_text = [np.bincount(of[own], gain[own], sums[PLAIN, spec].shape[1])
                       for own in (taken, usual)]  # fmt: skip
            change = np.stack([by_text[0] - by_text[1], 0 * by_text[0], 0 * by_text[0]])
            sums[name, spec] = sums[PLAIN, spec] + change
            if spec == LOSSLESS:
                left = [_share(new[of != one], gain[of != one], usual[of != one])
                        for one in range(len(by_text[0]))]  # fmt: skip
                needed[name] = Estimate(_share(new, gain, usual), np.array(left), "trees")
    return needed


def _share(new: Cells, gain: Cells, usual: Cells) -> float:
    """Return the nodes of the first cells that catch what the usual ones do, over theirs."""
    enough = np.searchsorted(gain.cumsum(), gain[usual].sum())
    return float(new[: enough + 1].sum() / new[usual].sum())


def _learned(kinds: Cells, caught: Cells, chances: Cells, texts: np.ndarray) -> Cells:
    """Return what a node of each kind catches in the texts of the other half."""
    score = np.zeros(caught.shape)
    for half in (0, 1):
        other, size = texts % 2 != half, kinds.max() + 1
        tops, nodes = (np.bincount(kinds[other].ravel(), own[other].ravel(), size)
                       for own in (caught, 1 - chances))  # fmt: skip
        score[~other] = (tops / np.maximum(nodes, 1.0))[kinds[~other]]
    return score


def _kinds(chances: Cells, drafted: Cells, alive: Cells, texts: np.ndarray) -> Cells:
    """Return a number for how likely a place is reached and what the draft gives the token.

    How often a drafted token of a probability is accepted is taken from the other half, too.
    """
    bins, reach = np.digitize(drafted, BINS), np.ones(drafted.shape)
    for half in (0, 1):
        other = texts % 2 != half
        kept, before = (np.bincount(bins[other].ravel(), own[other].ravel(), len(BINS) + 1)
                        for own in (alive[:, 1:], alive[:, :-1]))  # fmt: skip
        rate = (kept / np.maximum(before, 1e-9))[bins[~other]]
        reach[~other, 1:] = rate.cumprod(1)[:, :-1]
    return np.digitize(reach, BINS)[..., None] * (len(BINS) + 1) + np.digitize(chances, BINS)
