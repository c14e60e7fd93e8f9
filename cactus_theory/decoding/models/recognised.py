"""Decide whether the fast pass supports a model: every module must be transformers', unchanged.

The fast pass reads weights, and computes what the modules' classes do without calling the modules.
So a model is supported only if each module has the class of the family, the forward function of
that class, no hooks and ordinary weights. All other models run in transformers' forward pass.
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
# module of hooks that transformers leaves on a model after returning hidden states; they do nothing
CAPTURING = "transformers.utils.output_capturing"
# last word of a module's name (# for a number) → suffix of its class after the family's name
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
    """Return the reason why the fast pass does not support a model, None if it does."""
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return f"the fast pass supports {', '.join(FAMILIES)} and not {name}"
    if (change := changed(model)) is not None:
        return change
    family, home = name.removesuffix("ForCausalLM"), sys.modules[type(model).__module__]
    for path, module in model.named_modules():
        word = re.sub(r"^\d+$", "#", path.rpartition(".")[2])
        expected = OF_TORCH.get(word) or getattr(home, f"{family}{OWN.get(word)}", None)
        if word != "act_fn" and type(module) is not expected:  # activations are called as they are
            return f"its layers are quantised or adapted: {path} is a {type(module).__name__}"
        if not of_library(type(module).forward):
            return f"the forward of {type(module).__name__} was replaced"
    if model.model.embed_tokens.max_norm is not None:
        return "its embeddings change as they are read"
    functions = check.optional_module("transformers.modeling_utils", "llm").ALL_ATTENTION_FUNCTIONS
    config = text_config(model)
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "eager") and not of_library(functions.get(kind)):
        return "its attention is another's function"
    if getattr(model.model.rotary_emb, "rope_type", None) not in ROTARY:
        return "its rotary table depends on the text"
    window = getattr(config, "sliding_window", None)
    # without ``layer_types`` a window applies to every layer
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < capacity and "sliding_attention" in kinds:
        return "its sliding window is shorter than the text"
    return None


def changed(model: Any) -> str | None:
    """Return, in words, the first change of a module object in a model; None without changes.

    Changes are hooks, a replaced forward function or ``prepare_inputs_for_generation``, and weights
    that are no plain parameters. Classes of modules are not checked.
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
    """Return whether an attribute of an object replaces a method of the object's class."""
    method = vars(module).get(name)
    whose = getattr(method, "__self__", None), getattr(method, "__func__", None)
    # the method of the class, bound to this object, is no replacement
    return method is not None and whose != (module, getattr(type(module), name, None))


def _hooks(module: Any) -> list[Any]:
    everywhere = nn.modules.module
    tables = [module._forward_hooks, module._forward_pre_hooks]
    tables += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
    hooks = [hook for table in tables if table for hook in table.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) != CAPTURING]


@lru_cache(maxsize=256)
def of_library(function: Any) -> bool:
    """Return whether a function, and each function that it wraps, is of torch or transformers."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(("torch.", "transformers.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
