"""Rules at temperature 0: how many tokens they accept, and how many of them they change.

A greedy target's row is one-hot, so no KL is finite where a rule changes a token; what is left is
the total variation of each token from the target's own, which is 1 if it was changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.policies.mars import Mars, near_runner_up
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.verify import Assignment, Draft, find_verifier

from .settings import Rule

# every so many tokens of a greedy text a draft begins
STRIDE = 3


@dataclass(frozen=True)
class Cycle:
    """A greedy draft after a greedy text, and the target's rows of temperature 1 along it.

    Attributes
    ----------
    ids : (K,). ``q`` : (K + 1, V) float64. ``top`` : (K + 1,) the largest raw logit of each.
    text : number of the text.
    """

    ids: Int[Tensor, "K"]
    q: Float[Tensor, "K1 vocab"]
    top: Float[Tensor, "K1"]
    text: int


@torch.no_grad()
def cycles(
    pair: Any, prompts: list[list[int]], width: int, tokens: int, ends: list[int]
) -> Iterator[Cycle]:
    """Yield drafts along the target's greedy text of each prompt."""
    for text, prompt in enumerate(prompts):
        options = {"num_draft_tokens": width, "max_new_tokens": tokens, "eos_token_ids": ends}
        ids = torch.tensor([prompt])
        found = generate(
            pair.target, pair.draft, ids, policy="speculative", temperature=0.0, **options
        )
        whole = [*prompt, *found.output_token_ids[0].tolist()]
        for stop in range(len(prompt), len(whole), STRIDE):
            line = torch.tensor([whole[:stop]])
            for _ in range(width):
                line = torch.cat([line, pair.draft(line).logits[:, -1:].argmax(-1)], 1)
            logits = pair.target(line).logits[0, -width - 1 :].double()
            yield Cycle(line[0, -width:], logits.softmax(-1), logits.amax(-1), text)


def accepted(rule: Rule, cycle: Cycle) -> int:
    """Return how many drafted tokens a rule keeps."""
    width, q, policy = len(cycle.ids), cycle.q, ct.policy(rule.policy)
    if isinstance(policy, Mars):
        near, second = near_runner_up(q[:-1], cycle.top[:-1], policy.theta)
        kept = (cycle.ids == q[:-1].argmax(-1)) | (near & (cycle.ids == second))
        return int(kept.long().cumprod(-1).sum())
    coins = torch.full((1, width), 0.5).double()
    draft = Draft(cycle.ids[None], [width], None)
    judge, assigned = find_verifier(rule.verifier), Assignment((policy,))
    verdict = judge.verify(assigned, q[None], draft, coins, coins[:, 0])
    return int(verdict.num_accepted[0])


def counted(rule: Rule, drafts: list[Cycle], ends: list[int], source: str) -> dict[str, Estimate]:
    """Return tokens per call, changed tokens per token, and changed calls, by text."""
    texts = max(cycle.text for cycle in drafts) + 1
    calls, tokens, changed, touched = np.zeros((4, texts))
    for cycle in drafts:
        ended = [place for place, own in enumerate(cycle.ids.tolist()) if own in ends]
        kept = accepted(rule, cycle)
        own = min(kept + 1, ended[0] + 1) if ended else kept + 1
        other = cycle.ids != cycle.q[:-1].argmax(-1)
        count = int(other[: min(kept, own)].sum())
        calls[cycle.text] += 1
        tokens[cycle.text] += own
        changed[cycle.text] += count
        touched[cycle.text] += count > 0
    return {
        "tokens_per_call": ratio_of_sums(tokens, calls, source),
        "tv_per_token": ratio_of_sums(changed, tokens, source),
        "changed_calls": ratio_of_sums(touched, calls, source),
    }
