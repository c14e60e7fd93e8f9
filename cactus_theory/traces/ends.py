"""How likely the end of a text is under a policy's law, over the target: do answers get longer?"""

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
# standard errors that a ratio is away from 1 before anything is said of it: 1 false word in 20
SURE = 2.0
# ratio below which two digits show fewer ends: rounding alone moves lossless laws by 1e-16
SEEN = 0.995


def end_ratio(trace: Trace, policy: str | Policy) -> Estimate:
    """Return Σ h_e/Σ q_e over the ends e of a trace's texts, at the starts of its drafts.

    The logged decode was lossless, so that these follow beginnings of the target's own texts; NaN
    where no end has any mass there.

    Raises
    ------
    ValueError
        An unknown policy, a broken trace.
    """
    rule, sums = read_policy(policy).at_ends(trace.ends), np.zeros((2, trace.texts))
    for batch in trace.batches(ENTRIES, 1):
        if not batch.draft_token_ids.shape[1]:
            continue
        ids, q, p = batch.draft_token_ids[:, 0], batch.target_probs[:, 0], batch.draft_probs
        nodes = nodes_of_rows(Chain(), rule, q, one_hot(ids, q) if p is None else p[:, 0])
        write_laws(node for node in nodes if node.solved is None)
        for end in trace.ends:
            h_end = math.fsum(node.h(end) for node in nodes)
            sums[:, batch.text[0]] += h_end, float(q[:, end].sum())
    return ratio_of_sums(sums[0], sums[1], trace.fingerprint)


def tells(trace: Trace) -> bool:
    """Return whether the trace has ends, behind the target's own beginnings."""
    return bool(trace.ends) and trace.header.setting.policy == LOSSLESS


def foretold(value: float | None, error: float | None) -> str:
    """Return in words that answers get longer, nothing where a ratio of ends is no sign of it."""
    if value is None or error is None or not value + SURE * error < SEEN:  # NaN says nothing
        return ""
    return (
        "answers will probably get longer: after the target's own beginnings an end is "
        f"{value:.2f} ± {error:.2f} times as likely as under the target; a band's floor=eos makes "
        "it at least as likely"
    )
