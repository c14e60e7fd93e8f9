"""Defaults of decoding, for ``ct.generate``, the hook for Hugging Face and every command.

Commands that log rows, or time whole grids, have other sizes by default, which their help names.
Tolerances are in ``tolerances.py``, confidence levels in ``significance.py``.
"""

# lossless sampling, and strict greedy decoding, which takes its place at temperature 0
POLICY, STRICT = "speculative", "regret:price=inf"
VERIFIER = "chain"
NUM_DRAFT_TOKENS = 4
# of a text, in commands, which need some limit; in Python callers name the limit
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0
SEED = 0
DIVERGENCE = "kl"
