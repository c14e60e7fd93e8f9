"""Which models the fast pass computes: those whose every module is the library's, unchanged.

The fast pass reads weights and computes what the modules' classes say. So it takes a model only if
each module has the class that the family gives it, the forward function of that class, no hooks
and ordinary weights. Every other model runs in the library's forward pass, which calls the modules.
"""

import re
import sys
from functools import lru_cache
from typing import Any

from torch import nn

from cactus_theory.base import arguments as check
from cactus_theory.decoding.models.cache import text_config

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the text
# module of hooks that stay on a model once asked for hidden states, and else do nothing
CAPTURING = "transformers.utils.output_capturing"
# last word of a module's name (# for a number) → what follows the family's name in its class
OWN = {"": "ForCausalLM", "model": "Model", "#": "DecoderLayer", "self_attn": "Attention"}
OWN |= {"mlp": "MLP", "rotary_emb": "RotaryEmbedding"}
NORMS = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
OWN |= dict.fromkeys(NORMS, "RMSNorm")
LINEAR = ("lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_TORCH = dict.fromkeys(LINEAR, nn.Linear) | {
    "layers": nn.ModuleList,
    "embed_tokens": nn.Embedding,
}


def obstacle(model: Any, capacity: int) -> str | None:
    """Return why the fast pass cannot compute exactly this model, None if it can."""
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return f"the fast pass supports {', '.join(FAMILIES)} and not {name}"
    if (change := changed(model)) is not None:
        return change
    family, home = name.removesuffix("ForCausalLM"), sys.modules[type(model).__module__]
    for path, module in model.named_modules():
        last = re.sub(r"^\d+$", "#", path.rpartition(".")[2])
        expected = OF_TORCH.get(last) or getattr(home, f"{family}{OWN.get(last)}", None)
        if last != "act_fn" and type(module) is not expected:  # which is called as it is
            return f"its layers are quantised or adapted: {path} is a {type(module).__name__}"
        if not of_library(type(module).forward):
            return f"the forward of {type(module).__name__} was replaced"
    if model.model.embed_tokens.max_norm is not None:
        return "its embeddings change as they are read"
    known = check.optional_module("transformers.modeling_utils", "llm").ALL_ATTENTION_FUNCTIONS
    config = text_config(model)
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "eager") and not of_library(known.get(kind)):
        return "its attention is another's function"
    if getattr(model.model.rotary_emb, "rope_type", None) not in ROTARY:
        return "its rotary table depends on the text"
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < capacity and "sliding_attention" in kinds:
        return "its sliding window is shorter than the text"
    return None


def changed(model: Any) -> str | None:
    """Return the change to an object among a model's modules, in words; None for none.

    Hooks, a forward function or a ``prepare_inputs_for_generation`` of its own, weights of
    another kind. Classes of modules are not looked at.
    """
    for path, module in model.named_modules():
        at = f" at {path}" if path else ""
        if any(_hooks(module)) or hasattr(module, "_hf_hook"):
            return f"the model has hooks{at}"
        if replaced(module) or (not path and replaced(module, "prepare_inputs_for_generation")):
            return f"the model's forward or what prepares its inputs was replaced{at}"
        kinds = set(map(type, module._parameters.values()))
        if kinds - {nn.Parameter, type(None)}:
            return f"the model's weights are of another kind{at}"
    return None


def replaced(module: Any, name: str = "forward") -> bool:
    """Return whether an object has a method that is not its class's."""
    method = vars(module).get(name)
    whose = getattr(method, "__self__", None), getattr(method, "__func__", None)
    return method is not None and whose != (module, getattr(type(module), name, None))


def _hooks(module: Any) -> list[Any]:
    everywhere = nn.modules.module
    tables = [module._forward_hooks, module._forward_pre_hooks]
    tables += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
    hooks = [hook for table in tables if table for hook in table.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) != CAPTURING]


@lru_cache(maxsize=256)
def of_library(function: Any) -> bool:
    """Return whether a function, and whatever it wraps, is written in torch or transformers."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(("torch.", "transformers.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
