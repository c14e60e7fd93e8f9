"""Causal LMs that decode: the library's forward pass, a fast Llama-like one, one ragged cache."""

from cactus_theory.decoding.models.cache import text_config as text_config
from cactus_theory.decoding.models.model_with_cache import CachedModel as CachedModel
from cactus_theory.decoding.models.model_with_cache import longest_text as longest_text
