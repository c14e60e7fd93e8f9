"""Blocks to verify on a CPU, and what the dense formulas make of them."""

from dataclasses import dataclass, replace

import torch

import cactus_theory as ct
from cactus_theory.verify import Assignment, Block, Chain, Draft, Verdict
from cactus_theory.verify.draw import pick
from cactus_theory.verify.on_device import Blocks
from cactus_theory.verify.walk import Walk, chains

# the largest float64 below 1, the last value a coin can take
LAST_COIN = 1 - 2.0**-53


@dataclass(frozen=True)
class Case:
    """Target rows, a draft, and the coins (accept, draw)."""

    q: torch.Tensor
    draft: Draft
    accept: torch.Tensor
    draw: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        """Return the case with rows of this precision."""
        p = None if self.draft.probs is None else self.draft.probs.to(dtype)
        draft = replace(self.draft, probs=p)
        return Case(self.q.to(dtype), draft, self.accept, self.draw)

    def verify(self, assigned: Assignment) -> Verdict:
        return Block().verify(assigned, self.q, self.draft, self.accept, self.draw)


def random_case(vocab: int, seed: int, counts=(4, 3, 2, 0, 1), near: float = 0.7) -> Case:
    """Return ragged drafts whose rows are ``near`` the target's, in logits."""
    source = torch.Generator().manual_seed(seed)
    batch, width = len(counts), max(counts)

    def normal(*shape):
        return torch.randn(*shape, vocab, generator=source, dtype=torch.float64)

    q = (2 * normal(batch, width + 1)).softmax(-1)
    p = (0.8 * q[:, :width].log() + near * normal(batch, width)).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).reshape(batch, width)
    coins = torch.rand(batch, width + 1, generator=source, dtype=torch.float64)
    return Case(q, Draft(ids, list(counts), p), coins[:, :width], coins[:, width])


def one(*specs: str) -> Assignment:
    """Return an assignment of one policy, or of several whose choice is still to be made."""
    return Assignment(tuple(ct.policy(spec) for spec in specs))


def decided(rule, q, p, n, coin) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of some tokens a chain accepts, and rows of what is left of those refused.

    Rows (R, V), tokens and coins (R,): each token is a draft of its own. Rows are 0 where the token
    is accepted.
    """
    draft, rows = Draft(n[:, None], [1] * len(n), p[:, None]), torch.stack([q, q], 1)
    paths, index = chains(draft, coin[:, None], torch.full_like(coin, 0.5))
    walk = Walk(Chain(), Assignment((rule,)), rows, draft, paths, index)
    walk.forwards()
    left = torch.zeros(q.shape, dtype=torch.float64)
    for row, path in zip(left, paths, strict=True):
        if not path.accepted:
            row[:] = torch.from_numpy(path.node(0).residual().row)
    return walk.accepted_and_last()[0] == 1, left


def dense(assigned: Assignment, case: Case) -> tuple[Blocks, torch.Tensor, torch.Tensor]:
    """Return the walk in float64 and, from the same coins, accepted counts and next tokens."""
    exact = case.to(torch.float64)
    walk = Blocks(assigned, exact.q, exact.draft)
    place = torch.arange(1, case.accept.shape[1] + 1)
    accepted = torch.where(case.accept < walk.value[:, 1:], place, 0).amax(-1)
    return walk, accepted, pick(walk.last[torch.arange(len(accepted)), accepted], case.draw)


def assert_equal(assigned: Assignment, case: Case, rounding: float = 1e-10) -> Verdict:
    """Hold the verdict to the dense formulas, token for token, and its alive ratios."""
    verdict = case.verify(assigned)
    walk, accepted, last = dense(assigned, case)
    assert verdict.num_accepted.tolist() == accepted.tolist()
    assert verdict.last.tolist() == last.tolist()
    for row in range(len(accepted)):
        for node, alive in zip(verdict.nodes(row), walk.alive[row].tolist(), strict=False):
            assert not node.drafted or abs(node.alive - alive) <= rounding
    return verdict
