"""Compute how likely a policy ends a text, relative to the target, to foretell longer answers."""

import math

import numpy as np

from cactus_theory.base import defaults
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.policy import one_hot
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.traces.trace import ENTRIES, Trace
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.node import nodes_of_rows, write_laws

LOSSLESS = defaults.POLICY
# standard errors by which a ratio must lie below 1 for a warning: about 1 of 20 would be false
SURE = 2.0
# upper end that such a ratio must lie below, as two digits then show fewer ends; also, rounding
# moves lossless laws by 1e-16, which must not raise a warning
SEEN = 0.995


def end_ratio(trace: Trace, policy: str | Policy) -> Estimate:
    """Return how likely an end of text is under a policy's law h, relative to q: Σ h_e/Σ q_e.

    The sums are over the end tokens e and over the first place of each draft. The logged decode is
    lossless, so that these places follow beginnings of texts of the target. NaN if no end token
    has a probability above 0 at these places.

    Raises
    ------
    ValueError
        An unknown policy, a broken trace.
    """
    rule = read_policy(policy).at_ends(trace.ends)
    h_sums, q_sums = np.zeros((2, trace.texts))
    for batch in trace.batches(ENTRIES, 1):  # drafts are cut to their first place
        if not batch.draft_token_ids.shape[1]:  # rounds without a draft
            continue
        ids, q, p = batch.draft_token_ids[:, 0], batch.target_probs[:, 0], batch.draft_probs
        nodes = nodes_of_rows(Chain(), rule, q, one_hot(ids, q) if p is None else p[:, 0])
        # rows with a solver give single entries of h; the laws of all others are computed together
        write_laws(node for node in nodes if node.solved is None)
        text = int(batch.text[0])  # the rounds of a batch are of one text
        for end in trace.ends:
            h_sums[text] += math.fsum(node.h(end) for node in nodes)
            q_sums[text] += float(q[:, end].sum())
    return ratio_of_sums(h_sums, q_sums, trace.fingerprint)


def has_end_ratio(trace: Trace) -> bool:
    """Return whether :func:`end_ratio` has a meaning: a lossless decode of texts that have ends."""
    return bool(trace.ends) and trace.header.setting.policy == LOSSLESS


def warning_of_longer_answers(value: float | None, error: float | None) -> str:
    """Return a warning that answers get longer; empty where the ratio of ends is no sign of it."""
    if value is None or error is None or not value + SURE * error < SEEN:  # NaN gives no warning
        return ""
    return (
        "answers will probably get longer: after the target's own beginnings an end is "
        f"{value:.2f} ± {error:.2f} times as likely as under the target; a band's floor=eos makes "
        "it at least as likely"
    )
