"""Names for ``--help`` and flags, listed here without the modules that import torch.

``tests/commands/test_help.py`` compares these lists with the registries.
"""

import re

POLICIES = tuple(
    "speculative lenience mixture cactus cactus_exact band relaxed top_k typical thresholds fuzzy "
    "truncated regret".split()
)
DIVERGENCES = tuple(
    "kl reverse_kl total_variation pearson_chi2 neyman_chi2 squared_hellinger jensen_shannon "
    "max_divergence alpha renyi".split()
)
VERIFIERS = ("block", "chain", "tree")
# where bonus tokens, and tokens of rounds without a draft, are drawn from
UNDRAFTED = ("policy", "target")
# drafts by name, for every command and ``read_drafter``; ``./ngram`` would be a folder
DRAFTERS = (
    "ngram, ngram:longest=4, exit:20 (the target's first layers), skip:3 (the target without 3 of "
    "its layers) and 4bit (the target in 4 bits), both slow, to log rows with; or none"
)
# ways to draft where the draft is a distribution
MODES = ("sampled", "greedy")
AUTO = "auto"
# names of dtypes that models are loaded in
DTYPES = (AUTO, "float32", "bfloat16", "float16")
# a model's id on the hub: NAME, or OWNER/NAME
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
