r"""What stopping a draft early is worth at a given cost, on drafted paths, coins integrated out.

A decode of fixed K = 12 logs the acceptance φ_i and the draft probability p_i of every token of
each path. A draft of N of these tokens emits :math:`1 + \sum_{i \le N} \prod_{j \le i} φ_j`
tokens on average and costs 1 + cN target calls, c being the cost of a drafted token in target
calls. So every rule about N is judged on the same paths, without timing anything. That a target
call over more tokens takes longer is left out, and so is that rounds would begin elsewhere.

The texts are halved. On each half the best fixed K, the acceptances of the stop and its best
threshold are found, and judged on the other half. Intervals are percentiles over resampled texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.terminal import Progress
from cactus_theory.decoding import DraftStop, Pair, generate, load_pair
from cactus_theory.policies import policy as find_policy
from cactus_theory.verify import Draft

from ..common.decode import left_padded
from ..common.inputs import load_prompts
from ..common.statistics import interval, resamples

POLICIES = ("speculative", "band:price=1")
COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)
THRESHOLDS = (0.0, 0.02, *(round(0.05 * step, 2) for step in range(1, 15)))
LONGEST, NEW, BATCH = 12, 96, 8
PerPath = Float[np.ndarray, "paths"]
Counts = Int[np.ndarray, "paths"]


@dataclass(frozen=True)
class Paths:
    """Drafted paths: φ and p of their tokens, and the number of the text each is from."""

    phi: Float[np.ndarray, "paths longest"]
    draft_prob: Float[np.ndarray, "paths longest"]
    text: Counts

    def of(self, mask: np.ndarray) -> "Paths":
        return Paths(self.phi[mask], self.draft_prob[mask], self.text[mask])

    def tokens(self, counts: Counts) -> PerPath:
        """Return the expected tokens of a round, if so many of each path are drafted."""
        drafted = np.arange(self.phi.shape[1]) < counts[:, None]
        return 1 + (self.phi.cumprod(1) * drafted).sum(1)

    def fixed(self, width: int) -> Counts:
        """Return the same number of drafted tokens for each."""
        return np.full(len(self.phi), width)

    def stopped(self, stop: DraftStop) -> Counts:
        """Return how many tokens are drafted until ``stop`` ends it, of all there are."""
        going = stop.acceptance(self.draft_prob).cumprod(1) >= stop.threshold
        return 1 + going[:, :-1].cumprod(1).sum(1)

    def reached(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return p and φ of the tokens that are verified up to the first refusal."""
        before = np.concatenate([np.ones((len(self.phi), 1)), self.phi.cumprod(1)[:, :-1]], 1)
        on = generator.random((len(self.phi), 1)) < before
        return self.draft_prob[on], self.phi[on]


def measure(target: Path, draft: Path, prompts: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per policy, cost and way to expect acceptances."""
    pair = load_pair(target, draft)
    texts = load_prompts(prompts, target)
    longest = min(model.config.max_position_embeddings for model in (pair.target, pair.draft))
    texts = [text for text in texts if len(text) + NEW <= longest][: 4 * BATCH]
    for policy in POLICIES:
        paths = logged(pair, texts, policy, repeats)
        for cost in COSTS:
            for fits in (True, False):
                row = compared(paths, cost, fits)
                yield {"target": target.name, "policy": policy, "cost": cost} | row


def logged(pair: Pair, prompts: Sequence[Sequence[int]], policy: str, repeats: int) -> Paths:
    """Decode every prompt ``repeats`` times and return the paths; a repeat's text is its own."""
    rule, (phi, drafted, text) = find_policy(policy), ([], [], [])

    def log(q: Tensor, draft: Draft, *_: Any) -> None:
        if draft.lengths == [LONGEST] and draft.probs is not None:
            ids = draft.token_ids[..., None]
            acceptance = rule.acceptance(q[:, :-1], draft.probs, ids)
            phi.append(acceptance[0, :, 0].clamp(0, 1).numpy())
            drafted.append(draft.probs.double().gather(-1, ids)[0, :, 0].clamp(0, 1).numpy())
            text.append(number)

    with Progress(f"drafting under {policy}", repeats * len(prompts)) as progress:
        for number in range(repeats * len(prompts)):
            ids, mask = left_padded([prompts[number % len(prompts)]], pair.target)
            generate(pair.target, pair.draft, ids, attention_mask=mask, policy=rule,
                     num_draft_tokens=LONGEST, max_new_tokens=NEW, seed=number, on_rows=log,
                     meter=False)  # fmt: skip
            progress.advance()
    return Paths(np.array(phi), np.array(drafted), np.array(text))


def compared(paths: Paths, cost: float, fits: bool) -> dict[str, Any]:
    """Return tokens per cost of the best stop over those of the best fixed K, cross-fitted."""
    halves = [paths.of(paths.text % 2 == parity) for parity in (0, 1)]
    widths, stops = zip(*(_chosen(half, cost, fits) for half in halves), strict=True)
    judged = zip(halves[::-1], widths, stops, strict=True)
    sums = [_by_text(half, [half.stopped(stop), half.fixed(k)]) for half, k, stop in judged]
    totals = np.concatenate(sums)  # (texts, way, tokens | drafted | rounds)
    low, high = interval(_ratio(totals[resamples(len(totals))].sum(1), cost))
    stopped, fixed = totals.sum(0)
    return {
        "acceptance": "fitted" if fits else "default",
        "best_fixed": "/".join(map(str, widths)),
        "threshold": "/".join(str(stop.threshold) for stop in stops),
        "tokens_per_call_fixed": fixed[0] / fixed[2],
        "drafted_per_call_fixed": fixed[1] / fixed[2],
        "tokens_per_call_stopped": stopped[0] / stopped[2],
        "drafted_per_call_stopped": stopped[1] / stopped[2],
        "tokens_per_cost_ratio": float(_ratio(totals.sum(0), cost)),
        "ratio_low": low,
        "ratio_high": high,
        "paths": int(stopped[2]),
    }


def _chosen(paths: Paths, cost: float, fits: bool) -> tuple[int, DraftStop]:
    """Return the fixed K and the stop of most tokens per cost."""
    base = DraftStop.fit(*paths.reached(np.random.default_rng(0))) if fits else DraftStop()
    stops = [replace(base, threshold=threshold) for threshold in THRESHOLDS]
    return (
        max(range(1, LONGEST + 1), key=lambda k: _value(paths, paths.fixed(k), cost)),
        max(stops, key=lambda stop: _value(paths, paths.stopped(stop), cost)),
    )


def _value(paths: Paths, counts: Counts, cost: float) -> float:
    return float(paths.tokens(counts).sum() / (1 + cost * counts).sum())


def _by_text(paths: Paths, ways: Sequence[Counts]) -> Float[np.ndarray, "texts 2 3"]:
    """Return the sums of tokens, drafted tokens and rounds of each text, for each way to draft."""
    _, text = np.unique(paths.text, return_inverse=True)
    columns = [[paths.tokens(n), n, np.ones(len(n))] for n in ways]
    sums = [[np.bincount(text, values) for values in way] for way in columns]
    return np.array(sums).transpose(2, 0, 1)


def _ratio(sums: Float[np.ndarray, "*draws 2 3"], cost: float) -> Float[np.ndarray, "*draws"]:
    value = sums[..., 0] / (sums[..., 2] + cost * sums[..., 1])
    return value[..., 0] / value[..., 1]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']:<13} cost {row['cost']:<5} {row['acceptance']:<8} "
        f"stop {row['threshold']:<10} {row['tokens_per_call_stopped']:.2f} tokens "
        f"{row['drafted_per_call_stopped']:.2f} drafted; K={row['best_fixed']:<6} "
        f"{row['tokens_per_call_fixed']:.2f} tokens; per cost {row['tokens_per_cost_ratio']:.4f} "
        f"({row['ratio_low']:.4f}–{row['ratio_high']:.4f})"
    )
