"""A batch of vLLM's model runner V2 in the layout of ``verify_logits``."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.kernels import verify_logits
from cactus_theory.policies import Policy

# the digits of π, as 62 bits: a request whose seed differs from another's by this is no accident
SALT = 0x3141592653589793


@dataclass(frozen=True)
class Requests:
    """The drafts of a batch in the layout of :func:`cactus_theory.kernels.verify_logits`.

    Attributes
    ----------
    target : (R, K + 1, V) logits at temperature 1.
    draft : (R, K, V) logits at temperature 1, None for certain drafts.
    drafted : (R, K) int64, −1 ends a draft.
    seeds, positions : (R,) int64.
    heat : (R,) float32, 0 for greedy requests, else 1.
    """

    target: Float[Tensor, "R K1 V"]
    draft: Float[Tensor, "R K V"] | None
    drafted: Int[Tensor, "R K"]
    seeds: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    heat: Float[Tensor, "R"]

    def judged(self, rule: Policy, verifier: str) -> tuple[Tensor, Tensor]:
        """Return the emitted tokens (R, K + 1) int64, and how many (R,) int32.

        What follows them is 0. A row with a NaN in it gives some token of the vocabulary.
        """
        found = verify_logits(
            rule, self.target, self.draft, self.drafted, seeds=self.seeds,
            positions=self.positions, temperature=self.heat, verifier=verifier,
        )  # fmt: skip
        tokens = found.output_token_ids.clamp_(0, self.target.shape[-1] - 1)
        return tokens, (found.num_accepted + 1).int()

    def some(self, places: Int[Tensor, "some"]) -> "Requests":
        """Return some of the requests, copied."""
        draft = None if self.draft is None else self.draft[places]
        rest = (self.drafted, self.seeds, self.positions, self.heat)
        return Requests(self.target[places], draft, *(part[places] for part in rest))


def requests_of(
    target_logits: Float[Tensor, "rows V"],
    draft_logits: Float[Tensor, "slots K W"] | None,
    draft_sampled: Int[Tensor, "rows"],
    cu_num_logits: Int[Tensor, "R1"],
    pos: Int[Tensor, "rows"],
    idx_mapping: Int[Tensor, "R"],
    temperature: Float[Tensor, "slots"],
    seed: Int[Tensor, "slots"],
    num_speculative_steps: int,
) -> Requests:
    """Return a batch of the engine in padded layout; nothing is read on the host.

    ``draft_sampled`` holds at each row the token that led to it: a request's drafted tokens are
    those of all its rows but the first.
    """
    slots, starts = idx_mapping.long(), cu_num_logits[:-1].long()
    width = num_speculative_steps
    count, rows = len(slots), len(target_logits)
    heat = temperature[slots].float()
    sampled, draft = heat > 0, None
    if draft_logits is not None:
        target_logits = target_logits[:, : draft_logits.shape[-1]]
        draft = draft_logits[slots, :width, : target_logits.shape[-1]].float()
        draft = draft.div_(torch.where(sampled, heat, 1.0)[:, None, None])
    place = torch.arange(width + 1, device=slots.device)
    at = (starts[:, None] + place).clamp(max=rows - 1)
    if rows == count * (width + 1):
        target = target_logits.unflatten(0, (count, width + 1))
    else:
        target = target_logits[at]
    there = place[1:] < (cu_num_logits[1:].long() - starts)[:, None]
    drafted = torch.where(there, draft_sampled.long()[at[:, 1:]], -1)
    seeds, positions = seed[slots] ^ SALT, pos.long()[at[:, 0]] + 1
    return Requests(target, draft, drafted, seeds, positions, sampled.float())
