"""What three ideas add to siblings: tokens below them, other places for them, rows that know them.

All on the rounds of one lossless decode, coins integrated out. A placement is learned from the
texts of the other half, and has as many nodes as m siblings a place on average; ``known q`` is
what no placement can beat. ``nodes_of_equal_gain`` are those that a placement needs for the gain of
m siblings a place, as a share of theirs.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import Pair
from cactus_theory.decoding.models import CachedModel
from cactus_theory.policies.soft_band import SoftBand
from cactus_theory.traces import Estimate

from ..replay import valued
from .rounds import LOSSLESS, Round, alone, followed, summed

# candidates a place, siblings that are continued, and by how many tokens at most
CANDIDATES, CONTINUED, DEEPEST = 16, 4, 3
# what is compared with: the policy's own row, so many siblings a place
PLAIN, SOFT = f"{CONTINUED} a place", f"soft band, {CONTINUED} a place"
# bins of probabilities of tokens and of paths; halvings of the scale of a row
BINS, HALVINGS = 2.0 ** np.arange(-12, 0.1, 0.75), 50
# siblings a place, and tokens below each of them
SHAPES = (
    *((m, 0) for m in (CONTINUED // 2, CONTINUED, 2 * CONTINUED, 4 * CONTINUED)),
    *((CONTINUED // 2, 1), *((CONTINUED, deep) for deep in range(1, DEEPEST + 1))),
)
Cells = np.ndarray
Row = dict[str, Any]


def ideas(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> dict[str, list[Row]]:
    """Return the table, by its name."""
    return {"trees_ideas": [row for heat in args.temperature for row in _at(args, pair, ids, heat)]}


def _at(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float
) -> list[Row]:
    bands = [f"band:price={price:g}" for price in args.prices]
    softs = [f"soft_band:price={price:g}" for price in args.prices]
    cells: dict[str, list[Any]] = {spec: [] for spec in (LOSSLESS, *bands)}
    texts: list[int] = []

    def judged(text: int, whole: Tensor, rounds: Sequence[Round]) -> Iterator[Any]:
        texts.extend([text] * len(rounds))
        deeper = below(pair, whole, rounds, temperature, args.seed + text)
        for path, runs in zip(rounds, deeper, strict=True):
            yield from _by_policies(path, runs, cells)
            for spec in softs:
                yield from _by_values(path, spec)

    sums = summed(args, pair, ids, temperature, args.num_draft_tokens[0], judged)
    needed = _placed(cells, np.array(texts), sums.by_key)
    rows = []
    for name in dict.fromkeys(name for name, _ in sums.by_key):
        rival = SOFT if name.startswith("soft") else PLAIN
        nodes = next(amounts[2] for (idea, _), amounts in sums.by_key.items() if idea == name)
        for specs, level in (([LOSSLESS], None), ([*bands, *softs], args.level)):
            (spent, tokens), plain = sums.at(specs, level, name), sums.at(specs, level, rival)[1]
            if tokens is None or plain is None:
                continue
            row = {"temperature": temperature, "idea": name, "over": rival, "kl_per_token": spent}
            row |= {"nodes": nodes.sum() / sums.cycles.sum()} | valued("tokens_per_call", tokens)
            row |= valued("ratio", tokens / plain)
            share = needed.get(name) if level is None else None
            rows.append(row | valued("nodes_of_equal_gain", share))
    return rows


def _by_policies(
    path: Round, runs: list[list[Round]], cells: dict[str, list[Any]]
) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield tokens, nats and nodes by idea and policy of rows that know of no siblings."""
    chances, likely = path.p.topk(CANDIDATES)
    new = (1 - chances).numpy()  # nodes: a sibling that is drawn, too, is one node with it
    drafted = path.p[range(len(path.ids)), path.ids].numpy()
    for spec in cells:
        rule = ct.policy(spec)
        course = followed(path, alone(path, rule))
        tokens, nats = course.sums()[:, -1]
        caught = course.replaced.gather(1, likely).numpy()
        cells[spec].append((caught, chances.numpy(), drafted, course.alive.numpy()))
        sums = [[followed(run, alone(run, rule)).sums() for run in place] for place in runs]
        more = np.array(sums).transpose(2, 3, 0, 1)  # tokens and nats by how deep, place, rank
        for m, deep in SHAPES:
            catches = caught[:, :m]
            longer, paid = more[:, deep, :, :m] if deep else (1.0, 0.0)
            nodes = len(path.ids) + (1 + deep) * new[:, :m].sum()
            amounts = tokens + (catches * longer).sum(), nats + (catches * paid).sum(), nodes
            yield (f"{m} a place" + f", {deep} below" * (deep > 0), spec), amounts


def _by_values(path: Round, spec: str) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the same of soft bands, without and with what a caught token is worth."""
    rule = ct.policy(spec)
    assert isinstance(rule, SoftBand)
    likely = path.p.topk(CONTINUED)[1]
    nodes = len(path.ids) + float((1 - path.p.gather(1, likely)).sum())
    for name, fixed in ((SOFT, likely[:, :0]), ("soft band that counts catches", likely)):

        def row(place: int, alive: float, fixed: Tensor = fixed) -> Tensor:
            rows = path.q[place].numpy(), path.p[place].numpy()
            law = counting(*rows, alive, rule.price, fixed[place].numpy())
            return torch.from_numpy(law)

        course = followed(path, row)
        yield (name, spec), [*course.sums(course.caught(likely))[:, -1], nodes]


def counting(
    q: np.ndarray, p: np.ndarray, alive: float, price: float, fixed: np.ndarray
) -> np.ndarray:
    """Return the row h that is best if a fixed token yields one token more where it is caught.

    In KL, ln(h/q) is 1/price and a constant: the soft band's, and at fixed tokens beyond what is
    kept, too.
    """
    least = q.copy()
    least[fixed] *= np.exp(1 / price)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.nan_to_num(p / alive, nan=0.0)
    edge, low, high = np.exp(1 / price) * q, -1 / price, 0.0
    for _ in range(HALVINGS):
        scale = np.exp((low + high) / 2)
        law = np.maximum(scale * least, np.minimum(scale * edge, kept))
        low, high = (low, (low + high) / 2) if law.sum() > 1 else ((low + high) / 2, high)
    return law / law.sum()


@torch.no_grad()
def below(
    pair: Pair, whole: Tensor, rounds: Sequence[Round], temperature: float, seed: int
) -> list[list[list[Round]]]:
    """Return runs of DEEPEST tokens drafted below CONTINUED siblings of each place and round."""
    source, runs = torch.Generator().manual_seed(seed), []
    models = pair.target, pair.draft
    target, draft = (CachedModel(model, whole.shape[1], slack=999) for model in models)

    def rows(cached: CachedModel, before: int, ids: list[int], parents: list[int]) -> Tensor:
        start, count = cached.lengths[0], len(ids)
        if start < before:
            cached.feed(whole[:, start:before], [before - start], [1])
        tree = torch.tensor([ids]), [count], [count], torch.tensor([parents])
        logits = cached.feed(*tree)[0].double()
        cached.rollback(0, before)
        return (logits / temperature).softmax(-1)

    for path in rounds:
        width, beside = len(path.ids), path.p.topk(CONTINUED)[1].flatten().tolist()
        ids, parents = [*path.ids, *beside], [*range(-1, width - 1)]
        parents += [place - 1 for place in range(width) for _ in range(CONTINUED)]
        last, drawn = range(width, len(ids)), []
        for _ in range(DEEPEST):
            p = rows(draft, path.before, ids, parents)[last]
            drawn.append((p, torch.multinomial(p, 1, generator=source)[:, 0]))
            parents += last
            last = range(len(ids), len(ids) + len(beside))
            ids += drawn[-1][1].tolist()
        q = rows(target, path.before, ids, parents)[width:].reshape(DEEPEST + 1, len(beside), -1)
        p, tokens = (torch.stack(part, 1) for part in zip(*drawn, strict=True))
        continued = [Round(*run) for run in zip(q.transpose(0, 1), p, tokens.tolist(), strict=True)]
        runs.append([continued[at : at + CONTINUED] for at in range(0, len(continued), CONTINUED)])
    return runs


def _placed(
    cells: dict[str, list[Any]], texts: np.ndarray, sums: dict[Any, np.ndarray]
) -> dict[str, Estimate]:
    """Add siblings that are placed by a score to the sums; return their nodes of equal gain."""
    needed = {}
    for spec, parts in cells.items():
        caught, chances, drafted, alive = map(np.stack, zip(*parts, strict=True))
        place = np.indices(caught.shape)  # round, place, rank
        new, text_of = 1 - chances, texts[place[0]]
        ranks = place[1] * CANDIDATES + place[2]
        kinds = _kinds(chances, drafted, alive, texts)
        scores = {
            "placed by depth and rank": _learned(ranks, caught, new, texts),
            "placed by chances": _learned(kinds, caught, new, texts),
            "placed by known q": caught / new,
        }
        for name, score in scores.items():
            order = np.random.default_rng(0).permutation(score.size)  # ties
            order = order[np.argsort(-score.ravel()[order], kind="stable")]
            known = new, caught, place[2] < CONTINUED, text_of
            nodes, gain, usual, text = (part.ravel()[order] for part in known)
            taken = nodes.cumsum() <= nodes[usual].sum()
            sums[name, spec] = sums[PLAIN, spec].copy()
            count = sums[name, spec].shape[1]
            gained, lost = (np.bincount(text[at], gain[at], count) for at in (taken, usual))
            sums[name, spec][0] += gained - lost
            if spec == LOSSLESS:
                left = [_share(*(part[text != number] for part in (nodes, gain, usual)))
                        for number in range(count)]  # fmt: skip
                needed[name] = Estimate(_share(nodes, gain, usual), np.array(left), "trees")
    return needed


def _share(nodes: Cells, gain: Cells, usual: Cells) -> float:
    """Return the nodes of the first cells that catch what the usual ones do, over theirs."""
    enough = np.searchsorted(gain.cumsum(), gain[usual].sum())
    return float(nodes[: enough + 1].sum() / nodes[usual].sum())


def _learned(
    kinds: Cells, above: Cells, below: Cells, texts: np.ndarray, least: float = 1.0
) -> Cells:
    """Return Σ above / Σ below, at least ``least``, of each kind in the texts of the other half."""
    rates = np.zeros(kinds.shape)
    for half in (0, 1):
        other, size = texts % 2 != half, kinds.max() + 1
        tops, bottoms = (np.bincount(kinds[other].ravel(), part[other].ravel(), size)
                         for part in (above, below))  # fmt: skip
        rates[~other] = (tops / np.maximum(bottoms, least))[kinds[~other]]
    return rates


def _kinds(chances: Cells, drafted: Cells, alive: Cells, texts: np.ndarray) -> Cells:
    """Return a number for how likely a place is reached and what the draft gives the token.

    How often a drafted token of a probability is accepted is taken from the other half, too.
    """
    accepted = _learned(np.digitize(drafted, BINS), alive[:, 1:], alive[:, :-1], texts, 1e-9)
    reached = np.ones(drafted.shape)
    reached[:, 1:] = accepted.cumprod(1)[:, :-1]
    return np.digitize(reached, BINS)[..., None] * (len(BINS) + 1) + np.digitize(chances, BINS)
