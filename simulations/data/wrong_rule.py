"""A rule that is wrong by design: ``check`` finds the rows on which its claim is false."""

import numpy as np

import cactus_theory as ct


@ct.rule(budget="kl <= delta emitted", direction=+1, strict=0.0)
def wrong_rule(q, p, n, *, delta=0.25):
    """Accept the drafted token n as if the target liked it a little better."""
    raised = q[n] + np.sqrt(2 * delta * q[n] * (1 - q[n]))
    return min(1, raised / p[n])
