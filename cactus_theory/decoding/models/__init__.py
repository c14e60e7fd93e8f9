"""Run causal LMs over a cache with a length per row, by transformers' pass or a faster one."""

from cactus_theory.decoding.models.cache import text_config as text_config
from cactus_theory.decoding.models.model_with_cache import CachedModel as CachedModel
from cactus_theory.decoding.models.model_with_cache import longest_text as longest_text
