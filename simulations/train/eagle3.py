"""A new head for a target, its draft vocabulary, and the folder that speculators and vLLM read."""

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor

from cactus_theory.decoding.drafters.eagle3_head import CONFIG, KIND, WEIGHTS, Eagle3Head
from cactus_theory.decoding.models import text_config

from ..common.results import write_bytes, write_text

# version of the format that is written
FORMAT = "0.9.0"


def reads_of(target: Any) -> tuple[int, ...]:
    """Return the layers whose states a head reads: low, middle and high, fewer of a flat target.

    Those of the format for 30 layers or more; it reads the third last, which is deep in these.
    """
    count = text_config(target).num_hidden_layers
    return tuple(sorted({min(2, count - 1), count // 2, count - min(3, max(count // 10, 1))}))


def draft_vocabulary(
    texts: Iterable[Int[Tensor, "N"]], size: int, vocab: int
) -> Int[Tensor, "draft"]:
    """Return the ids that occur most often, ascending; of equals the first."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids in texts:
        counts += torch.bincount(ids.long(), minlength=vocab)
    order = counts.sort(descending=True, stable=True).indices
    return order[: min(size, vocab)].sort().values


@torch.no_grad()
def build(target: Any, ids: Int[Tensor, "draft"], reads: Sequence[int], seed: int) -> Eagle3Head:
    """Return a new head that begins as the target's last layer: it scores what that would.

    Its rows for the tokens ``ids`` are the target's; the last of the read states goes through, and
    what it makes of a token's embedding is random.
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
    """Write a head's float16 weights and configuration, each file whole or not at all.

    ``name`` of the target is for who serves both; ``places`` are the tokens that are drafted.
    """
    weights = {
        stored.removeprefix("core.").removeprefix("model."): weight.detach().half().contiguous()
        for stored, weight in head.named_parameters()
    }
    del weights["embed_tokens.weight"]  # the target's is read
    if head.cut:
        numbers = torch.arange(len(head.ids))
        weights |= {
            "d2t": head.ids - numbers,
            "t2d": torch.isin(torch.arange(head.vocab), head.ids),
        }
    write_bytes(folder / WEIGHTS, save(weights))
    described = _described(head, target, name, places)
    write_text(folder / CONFIG, json.dumps(described, indent=2, allow_nan=False) + "\n")


def _described(head: Eagle3Head, target: Any, name: str, places: int) -> dict[str, Any]:
    config = head.core.config
    known = type(config)().to_dict().keys() - {"architectures", "dtype", "transformers_version"}
    layer = {name: value for name, value in config.to_diff_dict().items() if name in known}
    layer |= {"model_type": config.model_type, "vocab_size": head.vocab}
    layer["head_dim"] = head.core.model.layers[0].self_attn.head_dim
    proposal = {"proposal_type": "greedy", "speculative_tokens": places}
    return {
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
