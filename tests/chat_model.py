"""A chat model without a download: two random layers, 49,152 tokens, a tokenizer with a template.

Its law is peaked (the likeliest token has a few percent), and its texts are readable ASCII.
"""

import string
from itertools import islice, product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 49_152
START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = ("<|endoftext|>", START, END)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a byte-level BPE of 49,152 tokens: bytes, then pairs, triples and words of ASCII."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    joined = [
        *product(("Ġ", "Ċ", *map(chr, range(33, 127))), repeat=2),
        *product(map("".join, product(("Ġ", *letters), letters)), letters),
        *product(map("".join, product("Ġ", letters, letters)), letters),
        *product(map("".join, product(letters, letters, letters)), letters),
    ]
    tokens = dict.fromkeys([*SPECIAL, *bytes_])
    merges = {left + right: (left, right) for left, right in joined}
    merges = dict(islice(merges.items(), VOCABULARY - len(tokens)))
    ids = {token: place for place, token in enumerate([*tokens, *merges])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=list(merges.values())))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=SPECIAL[0],
        bos_token=START,
        eos_token=END,
        pad_token=END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def chat_model(seed: int = 0, vocabulary: int = VOCABULARY, **config: Any) -> LlamaForCausalLM:
    """Return a random Llama of two layers and width 32, whose embeddings are also its head."""
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**shape | config)).eval()
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return model


def near(model: LlamaForCausalLM, seed: int = 1, noise: float = 0.03) -> LlamaForCausalLM:
    """Return a draft: a copy of the model whose matrices are off by ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    draft = LlamaForCausalLM(model.config).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * noise)
    return draft
