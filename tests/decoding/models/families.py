"""Every causal-LM family of the installed transformers, shrunk to some thousand weights."""

import contextlib
import io
from collections.abc import Mapping

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

WINDOW = 7  # shorter than the texts decoded
SIZES = {
    40: ("vocab_size",),
    32: ("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "embedding_size")
    + ("emb_dim", "dim", "attention_hidden_size", "dense_attention_size"),
    48: ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff")
    + ("ffn_hidden_size", "dff", "hidden_dim", "ffn_hidden_dim", "dense_intermediate_size"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "top_k_experts")
    + ("encoder_layers", "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k")
    + ("num_key_value_heads", "num_decoder_layers", "num_encoder_layers", "num_kv_heads"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
    + ("encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts")
    + ("moe_num_experts", "num_encoder_attention_heads", "num_decoder_attention_heads")
    + ("index_n_heads", "index_topk", "rotary_dim"),
    8: ("head_dim", "attention_head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim")
    + ("v_head_dim", "d_kv", "index_head_dim"),
    16: ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "mamba_d_state", "state_size"),
    96: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    1: ("n_group", "topk_group", "n_shared_experts", "bos_token_id", "num_shared_experts"),
    0: ("pad_token_id",),
    WINDOW: ("sliding_window", "attention_window", "window_size", "local_attention"),
}
SMALL = {name: size for size, names in SIZES.items() for name in names}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
UNSAID = ("head_dim", "num_key_value_heads")  # None stands for a quotient of other sizes
NONE = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "quantization_config")


class Families(Mapping):
    """{name of the model class: (its configuration's class, the class)}, imported when asked."""

    def __init__(self):
        self.types = {}
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            for name in names if isinstance(names, tuple | list) else (names,):
                self.types.setdefault(name, model_type)

    def __getitem__(self, name):
        config = CONFIG_MAPPING[self.types[name]]
        models = MODEL_FOR_CAUSAL_LM_MAPPING[config]
        models = models if isinstance(models, tuple) else (models,)
        return config, next(model for model in models if model.__name__ == name)

    def __iter__(self):
        return iter(sorted(self.types))

    def __len__(self):
        return len(self.types)


def families():
    """Return every causal-LM family; importing all of them would take seconds."""
    return Families()


def small_config(config_class, **options):
    """Return a configuration with every size that is known by name made small."""
    default = config_class()
    if "text_config" in getattr(config_class, "sub_configs", {}):
        return small_config(config_class.sub_configs["text_config"], **options)
    given = {name: size for name, size in SMALL.items() if _plain(default, name)}
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = SMALL["num_attention_heads"]  # one latent for all heads
    given |= {name: None for name in NONE if hasattr(default, name)}
    kinds = list(dict.fromkeys(_read(default, "layer_types") or ()))
    if kinds and not isinstance(getattr(config_class, "layer_types", None), property):
        count = max(2, len(kinds))
        given["layer_types"] = (kinds * 2)[:count]
        given |= {name: count for name in LAYERS if name in given}
    return config_class(**(given | options))


def build(config_class, model_class, dtype=torch.float64, **options):
    """Return a random model; sizes that no name told may not make it large."""
    config = small_config(config_class, **options)
    config._experts_implementation = "eager"  # the grouped one knows no float64
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in model_class(config).parameters())
    if weights > 2e7:
        raise ValueError(f"{model_class.__name__} has {weights:,} weights")
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        model = model_class(config).to(dtype).eval()
        with torch.no_grad():  # biases start as zeros and norms as ones: neither would show
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
    for name in NONE:
        setattr(model.generation_config, name, None)
    return model


def own_greedy(model, ids, new):
    """Return what the library's greedy search writes after each row alone."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    texts = []
    for row in ids:
        mask = torch.ones_like(row[None])
        texts.append(model.generate(row[None], attention_mask=mask, **options)[0, len(row) :])
    return [text.tolist() for text in texts]


def _read(config, name):
    try:
        return getattr(config, name, None)
    except Exception:  # some configurations refuse attributes that vary by layer
        return None


def _plain(config, name):
    value = _read(config, name)
    known = isinstance(value, int) or (name in UNSAID and hasattr(config, name))
    return known and not isinstance(getattr(type(config), name, None), property)
