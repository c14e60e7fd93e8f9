"""Train an EAGLE-3 head: build a new head, unroll its steps along texts, compute the loss, save it.

Unit u of a text is the embedding of token u + 1 beside the target's states of token u. Step 0 runs
over all units with the true states. Later steps start from some units, the anchors. At step i an
anchor u continues with token u + 1 + i and the layer's output at step i − 1; its query attends to
the units up to u as they were at step 0, and to the anchor's earlier steps. The scores are compared
with the target's row after token u + 1 + i. Source: EAGLE-3 (Li et al., arXiv 2503.01840),
training-time test. The saved folder has the format that speculators and vLLM read.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import save
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from cactus_theory.decoding.drafters.eagle3_head import CONFIG, KIND, WEIGHTS, Eagle3Head
from cactus_theory.decoding.models import text_config

from ..common.results import write_bytes, write_text

# version of the speculators format that is written
FORMAT = "0.9.0"
# rows of logits that are processed at once, few enough for a processor's cache
ROWS = 128
# weight of a place in the KL loss, relative to the place before
DECAY = 0.8


def reads_of(target: Any) -> tuple[int, ...]:
    """Return the layers whose states a head reads: low, middle and high, fewer for a small target.

    With 30 layers or more these are the format's layers, the highest being the third last.
    """
    count = text_config(target).num_hidden_layers
    return tuple(sorted({min(2, count - 1), count // 2, count - min(3, max(count // 10, 1))}))


def draft_vocabulary(
    texts: Iterable[Int[Tensor, "N"]], size: int, vocab: int
) -> Int[Tensor, "draft"]:
    """Return the ``size`` most frequent ids, ascending; of equally frequent ids the smaller."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids in texts:
        counts += torch.bincount(ids.long(), minlength=vocab)
    order = counts.sort(descending=True, stable=True).indices
    return order[: min(size, vocab)].sort().values


@torch.no_grad()
def build(target: Any, ids: Int[Tensor, "draft"], reads: Sequence[int], seed: int) -> Eagle3Head:
    """Return a new head that is initialised from the target's last layer.

    The output rows of the tokens ``ids`` are copied from the target. The head reads the hidden
    states of the layers ``reads``: the highest layer's state is passed on unchanged, and random
    weights, scaled by 0.1, are added for all read states. The weights for a token's embedding are
    random, too.
    """
    config = copy.deepcopy(text_config(target))
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-1:]
    options = {"draft_vocab_size": len(ids), "eagle_aux_hidden_state_layer_ids": list(reads)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, options, shares=True).float()
    head.ids, head.cut = ids.clone(), len(ids) != head.vocab
    last, own, hidden = target.model.layers[-1], head.core.model.layers[0], head.hidden
    head.core.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
    head.core.model.norm.weight.copy_(target.model.norm.weight)
    own.mlp.load_state_dict(last.mlp.state_dict())
    own.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    own.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
    own.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
    own.input_layernorm.load_state_dict(target.model.layers[0].input_layernorm.state_dict())
    for name in ("q_proj", "k_proj", "v_proj"):
        map, of_target = getattr(own.self_attn, name), getattr(last.self_attn, name)
        map.weight[:, hidden:] = of_target.weight
        if map.bias is not None:
            map.bias.copy_(of_target.bias)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    return head


def write(head: Eagle3Head, folder: Path, target: Any, name: str, places: int) -> None:
    """Write a head's float16 weights and configuration, each file atomically.

    ``name``, a folder or an id, tells servers which target the head is for; ``places`` is the
    number of drafted tokens.
    """
    weights = {
        stored.removeprefix("core.").removeprefix("model."): weight.detach().half().contiguous()
        for stored, weight in head.named_parameters()
    }
    del weights["embed_tokens.weight"]  # servers read the target's embedding
    if head.cut:
        weights["d2t"] = head.ids - torch.arange(len(head.ids))
        weights["t2d"] = torch.isin(torch.arange(head.vocab), head.ids)
    write_bytes(folder / WEIGHTS, save(weights))
    config = head.core.config
    known = type(config)().to_dict().keys() - {"architectures", "dtype", "transformers_version"}
    layer = {name: value for name, value in config.to_diff_dict().items() if name in known}
    layer |= {"model_type": config.model_type, "vocab_size": head.vocab}
    layer["head_dim"] = head.core.model.layers[0].self_attn.head_dim
    proposal = {"proposal_type": "greedy", "speculative_tokens": places}
    described = {
        "architectures": ["Eagle3Speculator"],
        KIND: "eagle3",
        "speculators_version": FORMAT,
        "torch_dtype": "float16",
        "draft_vocab_size": len(head.ids),
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": head.reads,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": layer,
    }
    write_text(folder / CONFIG, json.dumps(described, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Batch:
    """B texts of U units: embeddings, states of the read layers, target rows, and which rows count.

    A target row is kept as the input of the target's output layer (``rows``) and the logsumexp of
    the logits (``norms``). ``anchors`` are the units from which later steps start; ``real`` marks
    valid anchors, the others are padding.
    """

    embedded: Float[Tensor, "batch units hidden"]
    states: Float[Tensor, "batch units wide"]
    rows: Float[Tensor, "batch units hidden"]
    norms: Float[Tensor, "batch units"]
    counts: Bool[Tensor, "batch units"]
    anchors: Int[Tensor, "batch anchors"]
    real: Bool[Tensor, "batch anchors"]


class _Scored(torch.autograd.Function):
    """Loss and overlap of rows, a few at a time; the forward pass also computes the gradients."""

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
            if by_kl:  # −Σ q ln p over the tokens that the head has
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
    return target.get_output_embeddings().weight.detach()[ids]


class Unrolled(nn.Module):
    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head, self.layer = head, head.core.model.layers[0]
        attention = self.layer.self_attn
        self.width, self.scale = attention.head_dim, attention.scaling
        self.shared = attention.q_proj.out_features // attention.k_proj.out_features

    def forward(
        self, batch: Batch, weight: Tensor, places: int, by_kl: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss over all rows that count, and per place the sum of overlaps and the rows.

        ``weight`` has the target's output rows for the tokens of the draft vocabulary. Target mass
        on other tokens counts in no overlap, and the KL loss is −Σ q ln p over the draft
        vocabulary. By KL a place has ``DECAY`` times the weight of the place before; by total
        variation its weight is the probability of being reached. Anchors are weighted so that
        they stand for all units.
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
        self, embedded: Tensor, stream: Tensor, units: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "batch some hidden"]:
        """Return the layer's output before the final norm; append keys and values to ``memory``."""
        layer, attention = self.layer, self.layer.self_attn
        normed = layer.hidden_norm(stream)
        pairs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        turns = self.head.core.model.rotary_emb(stream, position_ids=units + len(memory))
        queries, keys, values = (
            map_(pairs).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for map_ in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *turns)
        memory.append((keys, values))
        seen = self.attended(queries, units, memory).transpose(1, 2).flatten(2)
        x = (normed if layer.norm_before_residual else stream) + attention.o_proj(seen)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def attended(
        self, queries: Tensor, units: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "batch heads some width"]:
        """Attend to the units up to the anchor as of step 0, and to the anchor's earlier steps."""
        (keys, values), *chain = [[repeat_kv(own, self.shared) for own in pair] for pair in memory]
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


def of(rows: Float[Tensor, "batch n ..."], at: Int[Tensor, "batch some"]) -> Tensor:
    return rows[torch.arange(len(rows))[:, None], at]
