"""How far sampling at another temperature is from a trace's target, in nats a token."""

from collections.abc import Sequence

import numpy as np
import torch

from cactus_theory.divergences import divergence
from cactus_theory.policies import policy as find_policy
from cactus_theory.traces.estimate import Estimate, combined, ratio_of_sums
from cactus_theory.traces.replays import ENTRIES, _judged
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.contract import find_verifier

# times the trace's own, then times the temperature that is read off these: between them the root
# of the KL is taken for a straight line in 1/t, which misses by less than 2e-4 on the shipped pair
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NEAR = (0.94, 0.97, 1.0, 1.03, 1.06)


def equal_temperature(trace: Trace, nats: float) -> Estimate | None:
    """Return the temperature below the trace's whose samples cost so many nats a token.

    KL of the tempered row from the target's, mean over the tokens of the target's own texts: all
    logged rows count as often as a lossless decode reaches them. The standard error is over texts.
    None where the coldest that is tried, .3 of the trace's, is nearer than that.
    """
    rough = _read(TEMPERATURES, [own.value for own in _tempered(trace, TEMPERATURES)], nats)
    if rough is None:
        return None
    near = sorted({min(rough * factor, 1.0) for factor in NEAR})

    def read(*curve: float) -> float:
        return trace.header.temperature * (_read(near, curve, nats) or near[0])

    return combined(np.vectorize(read), *_tempered(trace, near))


def _tempered(trace: Trace, temperatures: Sequence[float]) -> list[Estimate]:
    """Return the mean KL at each temperature."""
    spent, weight = np.zeros((len(temperatures), trace.texts)), np.zeros(trace.texts)
    ends, kl = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64), divergence("kl").value
    lossless, chain = find_policy("speculative"), find_verifier("chain")
    colder = [find_policy("tempered", temperature=own) for own in temperatures]
    for batch in trace.batches(ENTRIES):
        alive, going, _ = _judged(batch, lossless, chain, {}, ends)
        reached = torch.where(going, alive, 0.0)
        text = int(batch.text[0])
        weight[text] += float(reached.sum())
        q = batch.target_probs
        for place, rule in enumerate(colder):
            spent[place, text] += float((reached * kl(rule.emitted(q, q), q)).sum())
    return [ratio_of_sums(own, weight, trace.fingerprint) for own in spent]


def _read(temperatures: Sequence[float], curve: Sequence[float], nats: float) -> float | None:
    """Return where the curve over rising temperatures has so many nats, None beyond the coldest."""
    roots = np.sqrt(np.maximum.accumulate(curve[::-1]))
    if nats > roots[-1] ** 2:
        return None
    return float(1 / np.interp(np.sqrt(nats), roots, 1 / np.array(temperatures[::-1])))
