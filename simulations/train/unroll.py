"""An EAGLE-3 head in training: its steps unrolled along the target's texts, and their loss.

Unit u of a text stands for token u + 1: that token's embedding beside the states of token u. Step 0
runs over all units, with their true states. At step i every unit u, an anchor, goes on with token
u + 1 + i and the layer's own output of the step before: its query sees the units up to the anchor
as they were at step 0, and its own chain. What it scores there is held against the target's row
after token u + 1 + i. Source: EAGLE-3 (Li et al., arXiv 2503.01840), training-time test.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head

# rows of logits that are worked on at once: they stay in a processor's cache
ROWS = 128
# weight of a place by KL, of the one before it
DECAY = 0.8


@dataclass(frozen=True)
class Batch:
    """Texts (B, U units): embeddings, states of the read layers, the target's rows and which count.

    A row of the target is what its head made the logits of, and their logsumexp over all tokens.
    ``anchors`` are units from which later steps go on, any valid index where there are fewer.
    """

    embedded: Float[Tensor, "batch units hidden"]
    states: Float[Tensor, "batch units wide"]
    rows: Float[Tensor, "batch units hidden"]
    norms: Float[Tensor, "batch units"]
    counts: Bool[Tensor, "batch units"]
    anchors: Int[Tensor, "batch anchors"]
    real: Bool[Tensor, "batch anchors"]


class _Scored(torch.autograd.Function):
    """Loss and overlap of rows; gradients are made going forward, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, states, weight, rows, target_weight, norms, shares, by_kl) -> Any:
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else weight.dtype
        small, states = weight.to(kind), states.to(kind)
        gradient = states.new_empty(len(states), len(weight))
        losses, overlaps = torch.empty(2, len(states)).unbind()
        for start in range(0, len(states), ROWS):
            at = slice(start, start + ROWS)
            q = (rows[at] @ target_weight.t()).float().sub_(norms[at, None]).exp_()
            p = (states[at] @ small.t()).float()
            log_total = p.logsumexp(-1, keepdim=True)
            if by_kl:  # −Σ q ln p, of the tokens that the head has
                losses[at] = q.sum(-1) * log_total[:, 0] - (q * p).sum(-1)
            p = p.sub_(log_total).exp_()
            overlaps[at] = torch.minimum(q, p).sum(-1)
            if by_kl:
                slope = p.mul_(q.sum(-1, keepdim=True)).sub_(q)
            else:
                losses[at] = 1 - overlaps[at]
                won = p * (p < q)
                slope = p.mul_(won.sum(-1, keepdim=True)).sub_(won)
            gradient[at] = slope.mul_(shares[at, None])
        ctx.save_for_backward(gradient @ small, gradient.t() @ states)
        ctx.mark_non_differentiable(overlaps)
        return (losses * shares).sum(), overlaps

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        of_states, of_weight = ctx.saved_tensors
        return of_states * upstream[0], of_weight * upstream[0], None, None, None, None, None


def rows_of(target: Any, ids: Int[Tensor, "draft"]) -> Float[Tensor, "draft hidden"]:
    """Return the rows of a target's head for the tokens of a draft."""
    return target.get_output_embeddings().weight.detach()[ids]


class Unrolled(nn.Module):
    """The steps of a head over a batch."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head, self.layer = head, head.core.model.layers[0]
        attention = self.layer.self_attn
        self.width, self.scale = attention.head_dim, attention.scaling
        self.shared = attention.q_proj.out_features // attention.k_proj.out_features

    def forward(
        self, batch: Batch, weight: Tensor, places: int, by_kl: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of all rows that count, and by place the overlaps' sum and the rows (K,).

        ``weight`` are the target's rows of the draft's tokens. Mass of the target off these is
        lost to any head: it is in no overlap, and KL is −Σ q ln p over the draft's tokens. By KL a
        place weighs ``DECAY`` times the one before it, else as much as it would be reached. Anchors
        stand for all units.
        """
        units = torch.arange(batch.counts.shape[1]).expand_as(batch.counts)
        kind, counted = self.head.fc.weight.dtype, batch.counts
        stream = self.head.fc(batch.states.to(kind))
        reached, total = counted.float(), stream.new_zeros(())
        overlaps, counts = torch.zeros(2, places).unbind()
        memory: list[tuple[Tensor, Tensor]] = []
        for step in range(places):
            if step == 1:
                units, counted = batch.anchors, batch.real
                stream, reached = of(stream, units), of(reached, units)
                reached = reached * (batch.counts.sum() / counted.sum().clamp(min=1))
            at = units + step
            inside = at < batch.counts.shape[1]
            at = torch.where(inside, at, 0)
            stream = self.step(of(batch.embedded, at).to(kind), stream, units, memory)
            counted = counted & inside & of(batch.counts, at)
            if not bool(counted.any()):
                break
            loss, overlap = _Scored.apply(
                self.head.core.model.norm(stream)[counted], self.head.core.lm_head.weight,
                of(batch.rows, at)[counted], weight, of(batch.norms, at)[counted],
                reached[counted], by_kl,
            )  # fmt: skip
            total = total + loss
            overlaps[step], counts[step] = overlap.sum(), len(overlap)
            kept = overlap.new_full(overlap.shape, DECAY) if by_kl else overlap
            reached = torch.zeros_like(reached).masked_scatter_(counted, kept * reached[counted])
        return total, overlaps, counts

    def step(
        self,
        embedded: Float[Tensor, "batch some hidden"],
        stream: Float[Tensor, "batch some hidden"],
        units: Int[Tensor, "batch some"],
        memory: list[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "batch some hidden"]:
        """Return the layer's output, before the final norm; its keys and values are kept."""
        layer, attention = self.layer, self.layer.self_attn
        normed = layer.hidden_norm(stream)
        pairs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        cos, sin = self.head.core.model.rotary_emb(stream, position_ids=units + len(memory))
        cos, sin = cos[:, None], sin[:, None]
        queries = turned(self.heads(attention.q_proj(pairs)), cos, sin)
        keys = turned(self.heads(attention.k_proj(pairs)), cos, sin)
        memory.append((keys, self.heads(attention.v_proj(pairs))))
        seen = self.attended(queries, units, memory).transpose(1, 2).flatten(2)
        x = (normed if layer.norm_before_residual else stream) + attention.o_proj(seen)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def attended(
        self, queries: Tensor, units: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "batch heads some width"]:
        """Attend to the units up to the anchor as they were at step 0, then to the own chain."""
        shared = [(k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1))
                  for k, v in memory]  # fmt: skip
        (keys, values), chain = shared[0], shared[1:]
        if not chain:
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scale
            )
        hidden = torch.arange(keys.shape[2]) > units[:, None, :, None]
        scores = (queries @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, *((queries * k).sum(-1, keepdim=True) for k, _ in chain)], -1)
        weights = (scores.float() * self.scale).softmax(-1).to(values.dtype)
        seen = weights[..., : keys.shape[2]] @ values
        for place, (_, value) in enumerate(chain, keys.shape[2]):
            seen = seen + weights[..., place : place + 1] * value
        return seen

    def heads(self, x: Tensor) -> Float[Tensor, "batch heads units width"]:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)


def of(rows: Float[Tensor, "batch n ..."], at: Int[Tensor, "batch some"]) -> Tensor:
    """Return the entries of each row at indices of its own."""
    return rows[torch.arange(len(rows))[:, None], at]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
