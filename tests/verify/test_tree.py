"""The walk down a tree, enumerated over drafts and coins, and its edges."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies._path import Path
from cactus_theory.verify import Assignment, Draft, Tree, find_verifier
from tests.amounts import amount, some
from tests.verify.blocks import one, random_case

# sums of some thousand float64 terms
EXACT = 1e-12
# a box thinner than this lies between two roundings of one border
THIN = 1e-15
# how near to a border of its box a coin is put, in parts of the box
BESIDE = 1e-6
VOCAB = 3
SHAPES = ((1, 1, 1), (2, 1), (2, 2), (3, 2))
CHILDREN = ("certain", "sampled", "off", "mixed")
SPECS = ("speculative", "band:price=1", "cactus:delta=0.1", "lenience:lenience=0.5")


@cache
def row_of(seed, text, vocab=VOCAB):
    source = np.random.default_rng([seed, len(text), *text])
    return source.dirichlet(np.full(vocab, 0.8))


@dataclass(frozen=True)
class Plan:
    """Which trees are drafted: how many children by depth, and of which kind."""

    shape: tuple
    children: str
    seed: int = 0
    late: str = ""  # a sibling chosen after the draw: declared "late", or falsely "certain"

    def target(self, text):
        return row_of(self.seed, text)

    def node(self, text):
        """Return the certain tokens after a text, and the row of the sampled one, or None."""
        if len(text) >= len(self.shape):
            return [], None
        width = self.shape[len(text)]
        kind = self.children
        if kind == "mixed":
            kind = ("off", "certain", "sampled")[(sum(text) + len(text)) % 3]
        row = row_of(self.seed + 1000, text)
        certain = width if kind == "certain" else width - 1
        fixed = [] if self.late else np.argsort(-row, kind="stable")[:certain].tolist()
        if kind == "certain":
            return fixed, None
        if kind == "off":
            row = row.copy()
            row[fixed] = 0.0
            row = row / row.sum()
        return fixed, row

    def trees(self):
        """Yield (nodes, probability): nodes are (parent, token, sampled, certain)."""
        yield from self._grown([(None, None, False, False)], 0, 1.0)

    def _grown(self, nodes, at, mass):
        if at == len(nodes):
            yield nodes[1:], mass
            return
        fixed, row = self.node(text_of(nodes, at))
        own = [(at, token, False, True) for token in fixed]
        if row is None:
            yield from self._grown(nodes + own, at + 1, mass)
            return
        for token in np.flatnonzero(row):
            drawn = [(p, t, t == token, c) for p, t, _, c in own]
            if token not in fixed:
                drawn = [*own, (at, int(token), True, False)]
            if self.late:  # the likeliest other token, known once the first one is
                other = max(set(range(VOCAB)) - {int(token)}, key=lambda n: row[n])
                drawn.append((at, other, False, self.late == "certain"))
            yield from self._grown(nodes + drawn, at + 1, mass * row[token])


def text_of(nodes, at):
    text = []
    while at:
        parent, token, *_ = nodes[at]
        text, at = [token, *text], parent
    return tuple(text)


class Walks:
    """All outcomes of a drafted tree: boxes of coins, what is emitted there, and h by node."""

    def __init__(self, plan, nodes, policy, runs):
        self.plan, self.nodes, self.policy, self.runs = plan, [(None,) * 4, *nodes], policy, runs
        self.children = [
            [n for n in range(1, len(self.nodes)) if self.nodes[n][0] == at]
            for at in range(len(self.nodes))
        ]

    def sampled(self, at):
        return next((n for n in self.children[at] if self.nodes[n][2]), None)

    def rows(self, at, alive):
        """Return q, r (0 where nothing is sampled) and h at a node."""
        text = text_of(self.nodes, at)
        q, r = self.plan.target(text), np.zeros(VOCAB)
        fixed = [self.nodes[n][1] for n in self.children[at] if self.nodes[n][3]]
        if self.sampled(at) is not None:
            r = self.plan.node(text)[1]
        if not fixed and not r.any():
            return q, r, q
        kind = "certain" if not r.any() else "certain+sampled"
        law = ct.selection_law(q, r if r.any() else None, kind=kind, certain=fixed) if fixed else r
        left = len(self.plan.shape) - 1 - len(text)
        path = Path(torch.tensor([alive], dtype=torch.float64), torch.tensor([left]))
        h = self.policy.target_in_block(*(torch.tensor(x)[None] for x in (q, law)), path)
        return q, r, h[0].numpy()

    def boxes(self, at=0, drawn=0):
        """Yield (box, emitted tokens, visited): a box is {coin: (low, high)}."""
        for box, path, law in self._judged(at):
            visited = [(n, h) for n, h in path]
            end = visited[-1][0]
            tokens = [self.nodes[n][1] for n, _ in visited[1:]]
            edges = np.concatenate([[0.0], np.cumsum(law / law.sum())])
            for token in np.flatnonzero(law):
                own = box | {("draw", drawn): (edges[token], edges[token + 1])}
                caught = [n for n in self.children[end] if self.nodes[n][1] == token]
                if not caught:
                    yield own, [*tokens, token], visited
                    continue
                for more, after, later in self.boxes(caught[0], drawn + 1):
                    yield own | more, [*tokens, token, *after], visited + later

    def _judged(self, at):
        """Yield (box, [(node, h), …], the law of the token after them)."""
        run, alive, value = [], 1.0, 1.0
        steps = []
        while True:
            q, r, h = self.rows(at, alive)
            left = np.maximum(alive * h - r, 0.0)
            if steps and self.runs == "block":
                value = 1.0 if alive == 1 else left.sum() / (left.sum() + 1 - alive)
            run.append((at, h))
            steps.append((at, alive, value, left if left.sum() > 0 else q))
            following = self.sampled(at)
            if following is None:
                break
            token = self.nodes[following][1]
            ratio = min(1.0, alive * h[token] / r[token])
            at, alive, value = following, ratio if self.runs == "block" else 1.0, ratio
        for number, (_, _, _, left) in enumerate(steps):
            box = {}
            for place, (node, _, own, _) in enumerate(steps[1:], 1):
                if self.runs == "block" or place <= number + 1:
                    passed = place == number if self.runs == "block" else place <= number
                    if self.runs == "block" and place < number:
                        continue
                    box["accept", node - 1] = (0.0, own) if passed else (own, 1.0)
            if all(high - low > THIN for low, high in box.values()):
                yield box, run[: number + 1], left


def outcomes(plan, policy, runs):
    """Yield (nodes, boxes with probabilities) of every tree."""
    for nodes, mass in plan.trees():
        walks = Walks(plan, nodes, policy, runs)
        found = []
        for box, emitted, visited in walks.boxes():
            size = math.prod(high - low for low, high in box.values())
            if size > THIN:
                found.append((box, emitted, visited, mass * size))
        yield walks, found


def draft_of(walks, count):
    """Return a tree as a draft of so many equal rows, and its target rows."""
    nodes, plan = walks.nodes, walks.plan
    ids, parents = ([[n[k] for n in nodes[1:]]] * count for k in (1, 0))
    flags = [torch.tensor([[n[k] for n in nodes[1:]]] * count) for k in (2, 3)]
    texts = [text_of(nodes, at) for at in range(len(nodes))]
    q = torch.tensor(np.array([plan.target(text) for text in texts])).expand(count, -1, -1)
    p = np.full((len(nodes) - 1, VOCAB), np.nan)  # no law where nothing was sampled
    for at in range(len(nodes) - 1):
        if walks.sampled(at) is not None:
            p[at] = plan.node(texts[at])[1]
    draft = Draft(
        torch.tensor(ids),
        [len(nodes) - 1] * count,
        torch.tensor(p).expand(count, -1, -1),
        torch.tensor(parents) - 1,
        [len(plan.shape)] * count,
        *flags,
    )
    return q, draft


def check_boxes(walks, found, policy, runs, source):
    """Hold the verifier to every box of a tree, at a point of it, near its borders too."""
    q, draft = draft_of(walks, len(found))
    accept = torch.rand(len(found), len(walks.nodes) - 1, generator=source, dtype=torch.float64)
    draw = torch.rand(len(found), len(walks.plan.shape) + 1, generator=source, dtype=torch.float64)
    for number, (box, *_) in enumerate(found):
        for (kind, place), (low, high) in box.items():
            share = (BESIDE, 0.5, 1 - BESIDE)[int(torch.randint(3, (1,), generator=source))]
            (accept if kind == "accept" else draw)[number, place] = low + share * (high - low)
    verdict = Tree(runs).verify(Assignment((policy,)), q, draft, accept, draw)
    for own, (_, emitted, visited, _), charged in zip(
        verdict.rows(), found, verdict.charged, strict=True
    ):
        assert own == [int(token) for token in emitted]
        assert charged == [node for node, _ in visited if walks.children[node]]


def law_error(plan, policy, runs, check=True):
    """Return how far the token after any node that is reached is from h there, in probability."""
    source = torch.Generator().manual_seed(0)
    following, expected, total = {}, {}, 0.0
    for walks, found in outcomes(plan, policy, runs):
        if check:
            check_boxes(walks, found, policy, runs, source)
        for _, emitted, visited, mass in found:
            total += mass
            for (node, h), token in zip(visited, emitted, strict=True):
                text = text_of(walks.nodes, node)
                assert text == tuple(emitted[: len(text)])
                following.setdefault(text, np.zeros(VOCAB))[token] += mass
                expected[text] = expected.get(text, 0.0) + mass * h
    assert total == pytest.approx(1, abs=EXACT)
    return max(np.abs(following[text] - expected[text]).max() for text in following)


CASES = list(itertools.product(SHAPES, CHILDREN, SPECS, ("block", "chain")))


@pytest.mark.parametrize("shape, children, spec, runs", some(CASES, 11))
def test_the_next_token_has_the_law_h_at_every_node(shape, children, spec, runs):
    if shape == (3, 2) and children != "certain" and not amount(0, 1):
        shape = (2, 2)
    assert law_error(Plan(shape, children, seed=len(spec)), ct.policy(spec), runs) <= EXACT
