"""The network of an EAGLE-3 head, loaded from a folder in the format of ``speculators``.

One Llama layer reads a token's embedding and a second vector, the *stream*, which is made of the
target's hidden states, in a few layers, at the token *before*. If the token before was drafted,
there are no such states, and the stream is the layer's output at that token, before the final norm.
The head scores ``draft_vocab_size`` tokens; token i of these has the target's id i + ``d2t[i]``.
All other tokens have p = 0. Source: EAGLE-3 (Li et al., arXiv 2503.01840).
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.recognised import ROTARY

CONFIG, WEIGHTS, KIND = "config.json", "model.safetensors", "speculators_model_type"
LAYERS, LAYER = "eagle_aux_hidden_state_layer_ids", "transformer_layer_config"
# FREE: options of training, serving and the file, which are ignored; READ and OF_LAYER: known
# options of the head's configuration and of its layer's
FREE = set("architectures auto_map dtype torch_dtype transformers_version _name_or_path".split())
FREE |= set("id2label label2id initializer_range use_cache return_dict pad_token_id".split())
FREE |= set("bos_token_id eos_token_id embed_requires_grad speculators_version".split())
READ = FREE | {KIND, LAYER, LAYERS, "draft_vocab_size", "norm_before_residual"}
READ |= {"target_hidden_size", "speculators_config"}
SIZES = {"hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"}
SIZES |= {"num_attention_heads", "num_key_value_heads", "head_dim"}
OF_LAYER = FREE | SIZES | {"model_type", "num_hidden_layers", "hidden_act", "rms_norm_eps"}
OF_LAYER |= {"rope_parameters", "rope_scaling", "rope_theta", "attention_bias", "mlp_bias"}
# kind of rotary table → its parameters beside the base
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
YARN += ("original_max_position_embeddings", "truncate")
OF_ROPE = {"default": (), "linear": ("factor",), "llama3": LLAMA3, "yarn": YARN}
# rule for the value of each option, options that may not be null, and a test for each rule
TRUTH, POSITIVE, SIZE = "true or false", "a positive number", "an integer of at least 1"
RULES: dict[str, str] = dict.fromkeys(("rms_norm_eps", "rope_theta", *LLAMA3, *YARN), POSITIVE)
RULES |= dict.fromkeys(("norm_before_residual", "attention_bias", "mlp_bias", "truncate"), TRUTH)
RULES |= dict.fromkeys(SIZES | {"draft_vocab_size"}, SIZE) | {LAYERS: "layers"}
NEEDED = {*LLAMA3[:3], "rms_norm_eps", "attention_bias", "mlp_bias"} | SIZES
NEEDED -= {"num_key_value_heads", "head_dim"}
FOLLOWS: dict[str | None, Callable[[Any], bool]] = {
    None: lambda value: True,
    TRUTH: lambda value: type(value) is bool,
    POSITIVE: lambda value: type(value) in (int, float) and 0 < value < math.inf,
    SIZE: lambda value: type(value) is int and value > 0,
    "layers": lambda value: type(value) is list and {*map(type, value)} == {int},
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# tensors of the format beside the head's weights, which are read elsewhere or not at all
BESIDE = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
EMBEDDING = "embed_tokens.weight"


def holds_head(folder: str | Path) -> bool:
    """Return whether a folder holds a draft head in the format of speculators.

    ValueError for heads in other formats.
    """
    try:
        options = dict(json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    others = {"draft_vocab_size", "eagle_config"} & options.keys()
    if KIND not in options and (others or "Eagle" in str(options.get("architectures"))):
        raise ValueError(
            "draft: must be a head as speculators writes it; got one as SafeAILab's EAGLE, "
            f"SpecForge and Model-Optimizer write them, in {str(folder)!r}. Convert it: `pip "
            f"install speculators`, `speculators convert {folder} --algorithm eagle3 --verifier "
            "TARGET --output-path FOLDER`"
        )
    return KIND in options


class Eagle3Head(nn.Module):
    """The network of an :class:`Eagle3Drafter`: one decoder layer with linear maps and norms.

    Attributes
    ----------
    ids : the target's id of each token that the head scores, int64.
    reads : layers of the target whose states are read, None for the format's default layers.
    shares : whether the head uses the target's embedding, because the head's folder has none.
    cut : whether the head scores only a part of the target's vocabulary.
    """

    ids: Tensor
    settings: Tensor

    def __init__(self, config: Any, options: dict[str, Any], shares: bool) -> None:
        library = check.optional_module("transformers", "llm")
        super().__init__()
        self.vocab, self.hidden, self.shares = config.vocab_size, config.hidden_size, shares
        # the number of tokens that the head scores, and so of the rows of its LM head
        config.vocab_size = size = options.get("draft_vocab_size") or self.vocab
        self.reads: list[int] | None = options.get(LAYERS)
        wide, bias = 2 * self.hidden, config.attention_bias
        self.fc = nn.Linear(len(self.reads or (0, 0, 0)) * self.hidden, self.hidden, bias=False)
        self.core = library.LlamaForCausalLM(config)
        layer, attention = self.core.model.layers[0], self.core.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # they read pairs: embedding and stream
            setattr(attention, name, nn.Linear(wide, getattr(attention, name).out_features, bias))
        layer.hidden_norm = type(layer.input_layernorm)(self.hidden, config.rms_norm_eps)
        layer.norm_before_residual = options.get("norm_before_residual") or False
        self.core.model.embed_tokens = nn.Embedding(1 if shares else self.vocab, self.hidden)
        self.register_buffer("ids", torch.arange(size))
        self.cut = size != self.vocab
        # for fingerprints of state dicts
        settings = [layer.norm_before_residual, *(self.reads or ())]
        self.register_buffer("settings", torch.tensor(settings, dtype=torch.int64, device="cpu"))

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype | None = torch.float32) -> Self:
        """Return the head in a folder, ready for inference; ``dtype`` None keeps the stored dtype.

        Raises
        ------
        ValueError
            Files that are missing or unreadable, an unsupported option, tensors that are missing,
            unknown or of a wrong shape, ids outside the target's vocabulary.
        ModuleNotFoundError
            transformers or safetensors are not installed (extra llm).
        """
        library = check.optional_module("safetensors.torch", "llm")
        try:
            options = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
            config = _layer_config(options)
            weights = library.load_file(Path(folder) / WEIGHTS)
            with torch.device("meta"):  # no memory for weights that the file lacks
                head = cls(config, options, shares=EMBEDDING not in weights)
            offsets = weights.pop("d2t", None)
            head._fill(weights, dtype)
            head.cut, head.ids = offsets is not None, _ids(offsets, weights.get("t2d"), head)
            rotary = head.core.model.rotary_emb  # tables on ``meta`` have no values: make them anew
            head.core.model.rotary_emb = type(rotary)(config)
        except Exception as error:  # JSON, safetensors, OS and shape errors share no narrower base
            last = str(error).rpartition("\n")[2].strip()  # the last line has the reason
            raise ValueError(
                f"draft: must be a head that speculators wrote; {last} in {str(folder)!r}"
            ) from error
        return head.eval().requires_grad_(False)

    def of_target(self, rows: Float[Tensor, "*rows draft"]) -> Float[Tensor, "*rows V"]:
        """Return rows of logits over the target's vocabulary, −∞ for tokens the head lacks."""
        if not self.cut:
            return rows
        whole = rows.new_full((*rows.shape[:-1], self.vocab), -torch.inf)
        return whole.index_copy_(-1, self.ids, rows)

    def _fill(self, weights: dict[str, Tensor], dtype: torch.dtype | None) -> None:
        """Load a file's tensors as weights; ValueError if any is missing, unknown or misshapen."""
        filled = {"ids": self.ids, "settings": self.settings}
        for name, parameter in self.state_dict().items():
            stored = name.removeprefix("core.").removeprefix("model.")
            if stored == EMBEDDING and self.shares:  # only its dtype is read
                filled[name] = filled["fc.weight"].new_zeros(parameter.shape)
            elif name not in filled:
                if stored not in weights:
                    raise ValueError(f"{stored} is not there")
                tensors.check_tensor(stored, weights[stored], f"one of {DTYPES}", *DTYPES)
                filled[name] = weights.pop(stored).to(dtype)
                if filled[name].shape != parameter.shape:
                    shapes = tuple(parameter.shape), tuple(filled[name].shape)
                    raise ValueError(f"{stored}: must have shape {shapes[0]}; got {shapes[1]}")
        if unknown := sorted(weights.keys() - BESIDE):
            raise ValueError(f"{unknown[0]}: is no tensor of such a head; got one")
        self.load_state_dict(filled, assign=True)

    def layers(self, target_model: Any) -> Sequence[int]:
        """Return the numbers of the target's layers whose hidden states the head reads."""
        count = text_config(target_model).num_hidden_layers
        return self.reads or (2, count // 2, count - 3)


def _layer_config(options: Any) -> Any:
    """Return the configuration of the head's layer; ValueError for an unsupported option.

    An unknown option is allowed if its value is false, empty or transformers' default.
    """
    library = check.optional_module("transformers", "llm")
    acts = check.optional_module("transformers.activations", "llm").ACT2FN
    options = _table({CONFIG: options}, CONFIG)
    layer = _table(options, LAYER)
    of_file, of_layer = library.PretrainedConfig().to_dict(), library.LlamaConfig().to_dict()
    names = "rope_parameters", "rope_scaling"
    tables = [table for name in names if (table := _table(layer, name))]
    rope = dict(tables[0]) if tables else {}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    base, width = rope.get("rope_theta", layer.get("rope_theta")), layer.get("hidden_size")
    # option, its value, the values allowed, and these in words
    for name, value, allowed, rule in (
        (KIND, options.get(KIND), ("eagle3",), "eagle3"),
        ("model_type", layer.get("model_type"), ("llama",), "llama"),
        ("num_hidden_layers", layer.get("num_hidden_layers"), (1,), "1"),
        ("hidden_act", layer.get("hidden_act", "silu"), [*acts], "a name that transformers has"),
        ("rope_type", kind, ROTARY, f"one of {', '.join(ROTARY)}"),
        ("rope_scaling", tables[1:], ([],), "left out beside rope_parameters"),
        ("rope_theta", layer.get("rope_theta"), (None, base), f"that of rope_parameters, {base}"),
        ("target_hidden_size", options.get("target_hidden_size"), (None, width), f"{width}"),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: must be {rule}; got {value!r}")
    # a needed parameter that is missing is null, which the rules below reject
    rope = {name: None for name in OF_ROPE[kind] if name in NEEDED} | rope
    # a table, the options known in it, and transformers' defaults
    for given, known, defaults in (
        (options, READ, of_file),
        (layer, OF_LAYER, of_layer),
        (rope, {"rope_theta", *OF_ROPE[kind]}, {}),
    ):
        for name, value in given.items():
            # null leaves an option out; other values must follow the option's rule
            fits, rule = value is None and name not in NEEDED, RULES.get(name)
            if name not in known:  # allowed if the value has no effect
                fits = value is False or value in (None, [], {}, defaults.get(name))
                of_layer_only = given is options and name in OF_LAYER
                rule = f"left out, or in {LAYER}" if of_layer_only else "left out"
            elif not fits:
                fits = FOLLOWS[rule](value)
            if not fits and not name.startswith("base_model_"):
                raise ValueError(f"{name}: must be {rule}; got {value!r}")
    # the padding id is not used, and may lie beyond the vocabulary
    return library.LlamaConfig(**layer | {"pad_token_id": None})


def _table(options: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(value := options.get(name) or {}, dict):
        raise ValueError(f"{name}: must be a JSON object; got {value!r}")
    return value


def _ids(offsets: Tensor | None, marked: Tensor | None, head: Eagle3Head) -> Int[Tensor, "draft"]:
    """Return the target's ids of the head's tokens: token i has id i + ``offsets[i]``."""
    size, vocab = len(head.core.lm_head.weight), head.vocab
    if offsets is None and size != vocab:
        raise ValueError("d2t is not there")
    offsets = torch.zeros(size, dtype=torch.int64, device="cpu") if offsets is None else offsets
    tensors.check_tensor("d2t", offsets, "int32 or int64", torch.int32, torch.int64)
    ids = torch.arange(len(offsets), device="cpu") + offsets
    if len(ids.unique()) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(f"d2t: must give {size} ids below {vocab}, each once; got others")
    if marked is not None and not marked.nonzero()[:, 0].equal(ids.sort().values):
        raise ValueError("t2d: must mark the ids that d2t gives; got others")
    return ids
