"""Names that ``--help`` lists, without the modules that register them, which import torch.

``tests/commands/test_help.py`` compares these lists with the registries.
"""

POLICIES = tuple(
    "speculative lenience mixture cactus cactus_exact band relaxed top_k typical thresholds fuzzy "
    "truncated regret".split()
)
DIVERGENCES = tuple(
    "kl reverse_kl total_variation pearson_chi2 neyman_chi2 squared_hellinger jensen_shannon "
    "max_divergence alpha renyi".split()
)
VERIFIERS = ("block", "chain", "tree")
# who draws the bonus token and the tokens of rounds without a draft
UNDRAFTED = ("policy", "target")
