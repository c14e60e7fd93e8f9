"""Rounds of a lossless decode, and what paths, siblings and policies make of them: no coins.

The tokens up to place i of a drafted path are accepted with probability P_i, averaged over those
drafted later; then y replaces the next one with probability (P_i h_i(y) − p_i(y))₊, a block's, or
P_i (h_i(y) − p_i(y))₊ token by token. A sibling fixed before that one is caught so often. What is
caught yields one token more, from the target, which costs nothing (THEORY.md, Theorem 22).
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.arguments import normalised
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding import ModelDrafter, Pair, generate
from cactus_theory.divergences import divergence
from cactus_theory.optimum.selection import offered
from cactus_theory.policies import Policy
from cactus_theory.traces import Estimate, Replay
from cactus_theory.verify import Draft

from ..replay import tokens_at_level

LOSSLESS = "speculative"
# the row h at a place that is reached with the alive ratio P
RowAt = Callable[[int, float], Tensor]


@dataclass(frozen=True, eq=False)
class Round:
    """A path of K drafted tokens, the rows of target (K + 1, V) and draft, tokens before it."""

    q: Tensor
    p: Tensor
    ids: list[int]
    before: int = 0


@dataclass(frozen=True, eq=False)
class Course:
    """What comes of a path: P (K + 1,), nats of each row, and what replaces each token (K, V)."""

    alive: Tensor
    spent: Tensor
    replaced: Tensor

    def caught(self, fixed: Tensor) -> Tensor:
        """Return how often each place's token is replaced by one of the fixed ones (K, m), (K,)."""
        return self.replaced.gather(1, fixed).sum(1)

    def sums(self, caught: Tensor | None = None) -> np.ndarray:
        """Return the tokens and nats of the path's first 0, …, K tokens, (2, K + 1)."""
        tokens, nats = self.alive.cumsum(0), (self.alive[:-1] * self.spent).cumsum(0)
        if caught is not None:
            tokens[1:] += caught.cumsum(0)
        return np.stack([tokens, np.concatenate([[0.0], nats])])


def logged(
    pair: Pair, prompt: Tensor, width: int, most: int, **options: Any
) -> tuple[Tensor, list[Round]]:
    """Return a lossless decode's text, and its rounds with a whole path of ``width`` tokens."""
    rounds: list[Round] = []

    def log(q: Tensor, draft: Draft, places: Any, earlier: list[int]) -> None:
        if draft.lengths == [width] and draft.probs is not None:
            ids, before = draft.token_ids[0].tolist(), prompt.shape[1] + earlier[0]
            rounds.append(Round(normalised(q[0]), normalised(draft.probs[0]), ids, before))

    result = generate(
        pair.target, ModelDrafter(pair.draft), prompt, policy=LOSSLESS, meter=False,
        verifier="block", num_draft_tokens=width, max_new_tokens=most + width, on_rows=log,
        **options,
    )  # fmt: skip
    return torch.cat([prompt, result.output_token_ids], 1), rounds


def followed(path: Round, row: RowAt, chain: bool = False) -> Course:
    """Return what comes of a path under rows h, as a block or token by token."""
    alive, rows = [1.0], []
    for place, token in enumerate(path.ids):
        rows.append(row(place, alive[-1]))
        kept = float(rows[-1][token] / path.p[place, token])
        alive.append(alive[-1] * min(1.0, kept) if chain else min(1.0, alive[-1] * kept))
    h, reached = torch.stack(rows), torch.tensor(alive, dtype=torch.float64)
    before = reached[:-1, None]
    replaced = (before * h - (before if chain else 1) * path.p).clamp(min=0)
    return Course(reached, divergence("kl").value(h, path.q[:-1]).clamp(min=0), replaced)


def alone(path: Round, rule: Policy, fixed: Sequence[Sequence[int]] | None = None) -> RowAt:
    """Return the rows of a policy that looks at its own row, and at tokens fixed at each place."""
    p = path.p
    if fixed is not None:
        rows = zip(path.q.numpy(), p.numpy(), fixed, strict=False)
        p = torch.from_numpy(np.stack([offered(*row) for row in rows]))
    emitted = rule.emitted(path.q[:-1], p)
    return lambda place, _: emitted[place]


class Sums:
    """What rounds give under policies, summed by text.

    ``cycles`` (texts,) are rounds; ``by_key`` has by name and policy (2 or more, …, texts), tokens
    and nats first.
    """

    def __init__(self, texts: int) -> None:
        self.cycles = np.zeros(texts)
        self.by_key: dict[tuple[Any, str], np.ndarray] = {}

    def add(self, text: int, key: tuple[Any, str], amounts: Any) -> None:
        amounts = np.asarray(amounts)
        if key not in self.by_key:
            self.by_key[key] = np.zeros((*amounts.shape, len(self.cycles)))
        self.by_key[key][..., text] += amounts

    def replay(self, name: Any, spec: str, width: float | None = None) -> Replay:
        """Return the sums as a replay, which knows their errors; of sums by K those of one.

        Between two lengths one is taken by a coin.
        """
        sums, low = self.by_key[name, spec], int(width or 0)
        if width is not None:
            share = width - low
            sums = (1 - share) * sums[:, low] + share * sums[:, low + (share > 0)]
        none = np.zeros((0, len(self.cycles)))
        counts = self.cycles, sums[0], sums[0] - self.cycles
        return Replay(spec, str(name), low, "trees", *counts, {"kl": sums[1]}, none, none)

    def at(
        self, specs: Sequence[str], level: float | None, name: Any, width: float | None = None
    ) -> tuple[float, Estimate | None]:
        """Return nats a token and tokens a call: of the only policy, or of several at a level."""
        replays = [self.replay(name, spec, width) for spec in specs if (name, spec) in self.by_key]
        if level is not None:
            return level, tokens_at_level(replays, level)
        if not replays:
            return 0.0, None
        return replays[0].divergence_per_token().value, replays[0].tokens_per_call


def summed(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float, width: int,
    judged: Callable[[int, Tensor, list[Round]], Iterable[tuple[tuple[Any, str], Any]]],
) -> Sums:  # fmt: skip
    """Return the sums of what ``judged`` yields of each text: of its number, tokens and rounds."""
    sums = Sums(len(ids))
    with Progress(f"temperature {temperature:g}", len(ids)) as progress:
        for text, prompt in enumerate(ids):
            options = {"temperature": temperature, "seed": args.seed + text}
            whole, rounds = logged(pair, prompt, width, args.max_new_tokens, **options)
            sums.cycles[text] = len(rounds)
            for key, amounts in judged(text, whole, rounds):
                sums.add(text, key, amounts)
            progress.advance()
    return sums
