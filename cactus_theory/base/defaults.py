"""Defaults of a decode, of ``ct.generate``, the hook for Hugging Face and every command.

Commands that log rows, or time whole grids, have sizes of their own, which their help names.
Tolerances are in ``tolerances.py``, confidence levels in ``significance.py``.
"""

# lossless sampling, and strict greedy decoding, its place at temperature 0
POLICY, STRICT = "speculative", "regret:price=inf"
VERIFIER = "chain"
NUM_DRAFT_TOKENS = 4
# of a text; a command needs some limit, in Python it is named
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0
SEED = 0
DIVERGENCE = "kl"
