"""Defaults of a decode, of ``ct.generate``, the hook for Hugging Face and every command; levels.

Commands that log rows, or time whole grids, have sizes of their own, which their help names.
Tolerances are in ``tolerances.py``, what makes a difference significant in ``significance.py``.
"""

POLICY = "speculative"
VERIFIER = "chain"
NUM_DRAFT_TOKENS = 4
# of a text; a command needs some limit, in Python it is named
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0
SEED = 0
DIVERGENCE = "kl"

# K that tune tries, closer together where a token more matters more
TUNED_WIDTHS = (1, 2, 3, 4, 6, 8, 12)
# fewest texts whose errors say anything
FEWEST_TEXTS = 5
# joint confidence level of all intervals of expect: one table in a hundred is wrong somewhere
EXPECTED = 0.99
# probability of no alarm on a healthy engine, all tests of a comparison together
QUIET = 0.98
# risk that the bound of promise from readings is wrong
RISK = 0.05
