"""Rules at temperature 0: how many tokens they accept, and how many of them they change.

A greedy target's row is one-hot, so no KL is finite where a rule changes a token; what is left is
the total variation of each token from the target's own, which is 1 if it was changed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.policies.mars import Mars
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.verify import Assignment, Draft, find_verifier

# every so many tokens of a greedy text a draft begins
STRIDE = 3
# the greedy drafts along one greedy text, and the target's raw logits along them, float64
Ids = Int[Tensor, "N K"]
Logits = Float[Tensor, "N K1 vocab"]


@torch.no_grad()
def drafted(
    pair: Any, prompts: list[list[int]], width: int, tokens: int, ends: list[int]
) -> Iterator[tuple[Ids, Logits]]:
    """Yield the drafts along the target's greedy text of each prompt."""
    sizes = {"num_draft_tokens": width, "max_new_tokens": tokens}
    options: dict[str, Any] = sizes | {"policy": "speculative", "temperature": 0.0}
    for prompt in prompts:
        found = generate(pair.target, pair.draft, torch.tensor([prompt]),
                         eos_token_ids=ends, **options)  # fmt: skip
        whole = [*prompt, *found.output_token_ids[0].tolist()]
        ids, logits = [], []
        for stop in range(len(prompt), len(whole), STRIDE):
            line = torch.tensor([whole[:stop]])
            for _ in range(width):
                line = torch.cat([line, pair.draft(line).logits[:, -1:].argmax(-1)], 1)
            ids.append(line[0, -width:])
            logits.append(pair.target(line).logits[0, -width - 1 :].double())
        yield torch.stack(ids), torch.stack(logits)


def accepted(spec: str, verifier: str, ids: Ids, logits: Logits) -> Int[Tensor, "N"]:
    """Return how many drafted tokens a policy and a verifier keep."""
    policy, (count, width) = ct.policy(spec), ids.shape
    if isinstance(policy, Mars):
        (z_1, z_2), (first, second) = (own[:, :-1].unbind(-1) for own in logits.topk(2, -1))
        kept = (ids == first) | ((ids == second) & (z_2 / z_1 > policy.theta))
        return kept.long().cumprod(-1).sum(-1)
    coins, draft = torch.full((count, width), 0.5).double(), Draft(ids, [width] * count, None)
    judge, assigned = find_verifier(verifier), Assignment((policy,))
    return judge.verify(assigned, logits.softmax(-1), draft, coins, coins[:, 0]).num_accepted


def counted(
    policy: str, verifier: str, texts: list[tuple[Ids, Logits]], ends: list[int], source: str
) -> dict[str, Estimate]:
    """Return tokens per call, changed tokens per token, and changed calls."""
    sums = np.zeros((4, len(texts)))
    for number, (ids, logits) in enumerate(texts):
        kept, ended = (
            accepted(policy, verifier, ids, logits),
            torch.isin(ids, torch.tensor(ends).long()),
        )
        length = (ended.cumsum(-1) == 0).sum(-1)  # up to the end of the text
        tokens = torch.minimum(kept, length) + 1
        emitted = torch.arange(ids.shape[1]) < torch.minimum(kept, tokens)[:, None]
        changed = (emitted & (ids != logits[:, :-1].argmax(-1))).sum(-1)
        sums[:, number] = len(kept), tokens.sum(), changed.sum(), (changed > 0).sum()
    calls, tokens, changed, touched = sums
    return {
        "tokens_per_call": ratio_of_sums(tokens, calls, source),
        "tv_per_token": ratio_of_sums(changed, tokens, source),
        "changed_calls": ratio_of_sums(touched, calls, source),
    }
