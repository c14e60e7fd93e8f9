"""How far sampling at another temperature is from a trace's target, in nats a token."""

import numpy as np
import torch

from cactus_theory.policies import policy as find_policy
from cactus_theory.traces.estimate import Estimate, PerText
from cactus_theory.traces.replays import ENTRIES, _judged
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.registry import find_verifier

# times the trace's own; between them the root of the KL is read off straight lines in 1/t, which
# misses the temperature by less than 2e-4 on the shipped pair
TEMPERATURES = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0)


def equal_temperature(trace: Trace, nats: float) -> Estimate | None:
    """Return the temperature below the trace's whose samples cost so many nats a token.

    KL of the tempered row from the target's, mean over the tokens of the target's own texts: all
    logged rows count as often as a lossless decode reaches them. The standard error is over texts.
    None where the coldest that is tried, .3 of the trace's, is nearer than that.
    """
    spent, weight = _tempered(trace)
    whole = _read(spent.sum(0) / weight.sum(), nats)
    if whole is None:
        return None
    others = np.array([_all_but(spent, weight, text, nats) for text in range(trace.texts)])
    hot = trace.header.temperature
    return Estimate(hot * whole, hot * others, trace.fingerprint)


def _tempered(trace: Trace) -> tuple[PerText, PerText]:
    """Return Σ weight · KL by text and temperature, and Σ weight by text."""
    spent, weight = np.zeros((trace.texts, len(TEMPERATURES))), np.zeros(trace.texts)
    ends = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64)
    lossless, chain = find_policy("speculative"), find_verifier("chain")
    for batch in trace.batches(ENTRIES):
        alive, going, _ = _judged(batch, lossless, chain, {}, ends)
        reached = torch.where(going, alive, 0.0)
        text = int(batch.text[0])
        weight[text] += float(reached.sum())
        logs = batch.target_probs.log()
        for place, temperature in enumerate(TEMPERATURES[:-1]):
            kl = _from_tempered(logs, temperature)
            spent[text, place] += float((reached * kl).sum())
    return spent, weight


def _from_tempered(logs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL of rows at a temperature from the rows, of which these are the logarithms."""
    scaled = logs / temperature
    law = scaled.softmax(-1)
    mean = torch.where(law > 0, law * logs, 0.0).sum(-1)
    return ((1 / temperature - 1) * mean - scaled.logsumexp(-1)).clamp(min=0.0)


def _read(curve: PerText, nats: float) -> float | None:
    """Return where the curve over TEMPERATURES has so many nats."""
    roots = np.sqrt(np.maximum.accumulate(curve[::-1]))
    if nats > roots[-1] ** 2:
        return None
    return float(1 / np.interp(np.sqrt(nats), roots, 1 / np.array(TEMPERATURES[::-1])))


def _all_but(spent: PerText, weight: PerText, text: int, nats: float) -> float:
    """Return the same without one text, NaN where it is out of reach."""
    others = np.arange(len(weight)) != text
    found = _read(spent[others].sum(0) / weight[others].sum(), nats) if others.any() else None
    return float("nan") if found is None else found
