"""Paths verified as a whole, from the formulas alone: THEORY.md, Theorems 12, 13 and 16."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr

import cactus_theory as ct
from tests.amounts import amount
from tests.formulas import by_hand
from tests.rows import pair
from tests.solvers import recursion
from tests.solvers.cases import random_tree

# products and sums of a few float64 numbers
EXACT = 1e-12
# of edges and ceilings that are roots, found twice
ROOTS = 1e-10
SEEDS = range(amount(6, 300))


class Tree:
    """Random rows p, h at every prefix, drafts that end early, and P as small as one likes."""

    def __init__(self, seed, vocab, depth, slack):
        self.noise = np.random.default_rng(seed)
        self.vocab, self.depth, self.slack = vocab, depth, slack
        self.p, self.h, self.alive, self.leaf = {}, {}, {(): 1.0}, {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                self._grow(prefix)

    def _grow(self, prefix):
        before = prefix[:-1]
        if prefix and (self.leaf.get(before, True) or before not in self.alive):
            return
        if prefix:
            p, h = self.p[before][prefix[-1]], self.h[before][prefix[-1]]
            most = min(1.0, self.alive[before] * h / p) if p else 1.0
            share = self.noise.uniform() if self.slack else 1.0
            self.alive[prefix] = share * most
        # whether the draft ends here is read off its tokens, and so known when they are judged
        self.leaf[prefix] = len(prefix) == self.depth or (self.slack and self.noise.random() < 0.2)
        self.p[prefix], self.h[prefix] = (self._row() for _ in range(2))

    def _row(self):
        row = self.noise.exponential(size=self.vocab) * (self.noise.random(self.vocab) < 0.8)
        row[self.noise.integers(self.vocab)] += 0.1
        return row / row.sum()

    def residual(self, prefix):
        """Return P h − p P(·) after a prefix: what is left to emit where the path ends there."""
        next_alive = [self.alive[(*prefix, x)] for x in range(self.vocab)]
        return self.alive[prefix] * self.h[prefix] - self.p[prefix] * np.array(next_alive)

    def coin(self, prefix):
        """Return what the coin after a prefix is compared with."""
        if self.leaf[prefix]:
            return self.alive[prefix]
        left = self.residual(prefix).sum()
        return left / (left + 1 - self.alive[prefix]) if left + 1 - self.alive[prefix] > 0 else 1.0

    def paths(self):
        """Yield every path to a leaf with its probability."""
        for prefix in self.leaf:
            if self.leaf[prefix]:
                steps = [self.p[prefix[:i]][x] for i, x in enumerate(prefix)]
                yield prefix, float(np.prod(steps))

    def verified(self):
        """Return Pr(text drafted and accepted) and Pr(it, then token x), by prefix."""
        reached, following = {}, {}
        for path, chance in self.paths():
            coins = [1.0, *(self.coin(path[:i]) for i in range(1, len(path) + 1))]
            for count in range(len(path) + 1):
                stop = chance * coins[count] * float(np.prod([1 - v for v in coins[count + 1 :]]))
                for length in range(count + 1):
                    prefix = path[:length]
                    reached[prefix] = reached.get(prefix, 0.0) + stop
                    if length < len(path):
                        row = following.setdefault(prefix, np.zeros(self.vocab))
                        row += stop * self._next(path, length, count)
        return reached, following

    def _next(self, path, length, count):
        if count > length:
            return np.eye(self.vocab)[path[length]]
        left = self.residual(path[:length])
        return left / left.sum() if left.sum() > 0 else np.zeros(self.vocab)


@pytest.mark.parametrize("slack", [False, True], ids=["all it can", "any less, any length"])
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (3, 2)])
def test_every_alive_ratio_up_to_the_largest_is_reached_and_emits_the_row(vocab, depth, slack):
    """Theorem 12 for t = p P below its limits too: so all that Theorem 13 allows can be done."""
    for seed in SEEDS:
        tree = Tree(seed, vocab, depth, slack)
        reached, following = tree.verified()
        for prefix, share in reached.items():
            chance = float(np.prod([tree.p[prefix[:i]][x] for i, x in enumerate(prefix)]))
            assert share == pytest.approx(chance * tree.alive[prefix], abs=EXACT)
            if not tree.leaf[prefix]:
                expected = share * tree.h[prefix]
                np.testing.assert_allclose(following[prefix], expected, atol=EXACT)


def test_the_value_of_a_prefix_rises_with_its_alive_ratio():
    """Theorem 13: so nothing is gained by accepting less than one can."""
    for spec, price in (("kl", 0.7), ("squared_hellinger", 2.0)):
        tree = random_tree(2, 3, seed=2, zeros=0.3)
        values = recursion.values(tree, ct.divergence(spec), price, points=16)
        assert (np.diff(values) >= -EXACT).all() and (values[:, 0] == 0).all()


def two_point_kl(gamma, q):
    return rel_entr(gamma, q) + rel_entr(1 - gamma, 1 - q)


def cactus(q, p):
    gamma = np.minimum(1, q + np.sqrt(0.2 * q * (1 - q)))  # δ = 0.1
    return gamma, (1 - gamma) / (1 - q)


def cactus_exact(q, p):
    within = np.vectorize(lambda x: 1.0 if -np.log(x) <= 0.1 else raised_exactly(x))
    return within(q), (1 - within(q)) / (1 - q)


def raised_exactly(q):
    return brentq(lambda gamma: two_point_kl(gamma, q) - 0.1, q, 1 - 1e-12, xtol=1e-15)


def band(lower_of):
    """Return the band whose lower edge is a function of the upper one, by bisection."""

    def edges(q, p):
        def excess(b):
            a = lower_of(b)
            return np.maximum(a * q - p, 0).sum() - np.maximum(p - b * q, 0).sum()

        b = brentq(excess, 1.0, 1e3, xtol=1e-15)
        return b * q, lower_of(b) + 0 * q

    return edges


def fuzzy(q, p):
    return np.where(by_hand("jensen_shannon", p, q) < 0.1, np.inf, q), 1 + 0 * q


# what each rule keeps up to, and the scale of what it draws after a rejection: by their formulas
FORMULAS = {
    "speculative": lambda q, p: (q, 1 + 0 * q),
    "cactus:delta=0.1": cactus,
    "cactus_exact:delta=0.1": cactus_exact,
    "band:price=0.8": band(lambda b: b * np.exp(-1 / 0.8)),
    "band:price=0.8,divergence=reverse_kl": band(lambda b: 1 / (1 / b + 1 / 0.8)),
    "lenience:lenience=0.6": lambda q, p: (q / 0.6, 1 + 0 * q),
    "mixture:alpha=0.3": lambda q, p: (0.3 * p + 0.7 * q, 1 + 0 * q),
    "fuzzy:threshold=0.1": fuzzy,
}


@pytest.mark.parametrize("spec", FORMULAS)
def test_rules_are_a_ceiling_and_a_scale(spec):
    q, p = pair(12, 6, seed=3)
    rule = ct.policy(spec)
    made = [FORMULAS[spec](*(rows.numpy() for rows in both)) for both in zip(q, p, strict=True)]
    ceiling, scale = (torch.tensor(np.array(part)) for part in zip(*made, strict=True))
    keep = rule.acceptance_row(q, p)
    torch.testing.assert_close(keep, (ceiling / p).clamp(max=1.0), rtol=0, atol=ROOTS)
    assert ((keep > 0) & (keep < 1)).any()
    for token in range(6):
        refused = keep[:, token] < 1 - 1e-9
        left = (scale[:, token, None] * q - p).clamp(min=0)
        expected = left / left.sum(-1, keepdim=True).clamp(min=1e-300)
        found = rule.residual(q, p, torch.full((12,), token))
        torch.testing.assert_close(found[refused], expected[refused], rtol=0, atol=1e-9)
