"""Compare a budget in nats per token with rounding errors, and with a lower temperature.

Rounding errors depend on the shape of a forward pass. So even a lossless decode, which verifies K
tokens in one pass, does not have exactly the law of decoding without a draft. A budget below this
noise floor cannot be told apart from rounding errors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.prepare import dtype_of
from cactus_theory.divergences import read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import Estimate, combined, ratio_of_sums
from cactus_theory.traces.replays import batch_law
from cactus_theory.traces.trace import ENTRIES, Trace
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class NoiseFloor:
    """Divergence of rows of a pass over several tokens from rows of single-token passes.

    Attributes
    ----------
    per_token : mean KL of a row of a pass over ``width`` tokens from the single-token pass's row,
        in nats per token; at temperature 0 the mean regret of the former row's argmax.
    standard_error : standard error of ``per_token`` over texts.
    divergence : ``kl`` or ``regret``.
    changed : share of rows for which the argmax differs.
    rows, width, dtype : number of rows compared, tokens of a wide pass, number format of the model.
    """

    per_token: float
    standard_error: float
    divergence: str
    changed: float
    rows: int
    width: int
    dtype: str


@torch.inference_mode()
def noise_floor(
    target_model: Any,
    prompts_ids: Sequence[Sequence[int]],
    *,
    width: int = defaults.NUM_DRAFT_TOKENS + 1,
    max_new_tokens: int = 32,
    temperature: float = defaults.TEMPERATURE,
    seed: int = 0,
    on_text: Callable[[int], Any] | None = None,
) -> NoiseFloor:
    """Measure how far a target's rows depend on the width of the pass that computes them.

    The result is the mean KL of the rows of passes over ``width`` tokens from the rows of
    single-token passes at the same places. The texts are drawn from the single-token passes; each
    of the two kinds of pass has a cache. At temperature 0 the result is a regret instead:
    under the single-token pass's row, by how many nats the wide pass's argmax is less likely than
    the likeliest token. (At temperature 0 the widths give different texts only at near ties.)

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    prompts_ids : token ids of each prompt.
    width : tokens of a wide pass: K + 1 for K drafted tokens.
    max_new_tokens, temperature, seed : of the texts.
    on_text : called with the number of texts that are done; returns True to leave out the rest.

    Raises
    ------
    ValueError
        No prompt or an empty prompt, sizes below 1, a negative temperature, a model without a
        cache that this package knows.
    """
    for name, size in {"width": width, "max_new_tokens": max_new_tokens}.items():
        check.whole_number(name, size, 1)
    check.finite("temperature", temperature, 0)
    if not prompts_ids or not all(map(len, prompts_ids)):
        raise ValueError("prompts_ids: must hold prompts of at least one token; got none or empty")
    source, spent, changed = torch.Generator().manual_seed(seed), [], 0
    for prompt in prompts_ids:
        single, wide = (CachedModel(target_model, len(prompt) + max_new_tokens) for _ in range(2))
        rows, new = [_rows(single, list(prompt), temperature)], []
        for coin in torch.rand(max_new_tokens, generator=source, dtype=torch.float64, device="cpu"):
            drawn = int(pick(rows[-1].exp(), coin[None].to(rows[-1].device)))
            new.append(drawn if temperature else int(rows[-1].argmax()))
            rows.append(_rows(single, new[-1:], temperature))
        _rows(wide, list(prompt), temperature)
        parts = [new[start : start + width] for start in range(0, len(new), width)]
        # the rows after each new token, by wide passes (h) and by single-token passes (q)
        log_h = torch.cat([_rows(wide, part, temperature, len(part)) for part in parts])
        log_q, best = torch.cat(rows[1:]), log_h.argmax(-1, keepdim=True)
        changed += int((best[:, 0] != log_q.argmax(-1)).sum())
        if temperature:
            log_ratio = torch.where(log_h > -torch.inf, log_h - log_q, 0.0)
            kl = (log_h.exp() * log_ratio).sum(-1)
            spent.append(float(kl.clamp(min=0.0).sum()))  # rounding may make it negative
        else:
            spent.append(float((log_q.amax(-1) - log_q.gather(-1, best)[:, 0]).sum()))
        if on_text is not None and on_text(len(spent)) is True:
            break
    mean = ratio_of_sums(np.array(spent), np.full(len(spent), float(max_new_tokens)), "texts")
    count = len(spent) * max_new_tokens
    return NoiseFloor(
        per_token=mean.value,
        standard_error=mean.standard_error,
        divergence="kl" if temperature else REGRET.spec,
        changed=changed / count,
        rows=count,
        width=width,
        dtype=dtype_of([target_model]),
    )


def _rows(
    model: CachedModel, ids: list[int], temperature: float, keep: int = 1
) -> Float[Tensor, "keep vocab"]:
    """Feed tokens to the model; return the log-probabilities after the last ``keep`` tokens."""
    tokens = torch.tensor([ids], device=model.model.device)
    logits = model.feed(tokens, [len(ids)], [keep])[0, :keep].double()
    return (logits / (temperature or 1.0)).log_softmax(-1)


# temperatures t, relative to the trace's, on a coarse grid; and relative to the solution on that
# grid. Between neighbours √KL is interpolated linearly in 1/t: error below 2e-4 on the shipped pair
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NEAR = (0.94, 0.97, 1.0, 1.03, 1.06)


def equal_temperature(trace: Trace, nats: float) -> Estimate | None:
    """Return the temperature, below the trace's, at which sampling spends ``nats`` per token.

    The nats are the KL of the tempered row from the target row, averaged over tokens of the
    target's texts: each logged row counts as often as a lossless decode reaches it. The standard
    error is over texts. None if even 0.3 of the trace's temperature spends less.
    """
    curve = [estimate.value for estimate in _tempered(trace, TEMPERATURES)]
    rough = _temperature_at(nats, TEMPERATURES, curve)
    if rough is None:
        return None
    near = sorted({min(rough * factor, 1.0) for factor in NEAR})

    def solved(*curve: float) -> float:
        # with a text left out the coldest of this narrow grid may spend less than ``nats``
        return trace.header.temperature * (_temperature_at(nats, near, curve) or near[0])

    return combined(np.vectorize(solved), *_tempered(trace, near))


def _tempered(trace: Trace, temperatures: Sequence[float]) -> list[Estimate]:
    """Return the nats per token of sampling at multiples (``temperatures``) of the trace's."""
    spent, weight = np.zeros((len(temperatures), trace.texts)), np.zeros(trace.texts)
    kl = read_divergence("kl").value
    lossless, chain = read_policy("speculative"), find_verifier("chain")
    # with a tilt θ the row that is emitted is q^(1+θ), divided by its sum
    colder = [read_policy("speculative", tilt=1 / heat - 1) for heat in temperatures]
    for batch in trace.batches(ENTRIES):
        alive, going, _ = batch_law(batch, lossless, chain, {}, trace.ends)
        reached = torch.where(going, alive, 0.0)
        text = int(batch.text[0])  # the rounds of a batch are of one text
        weight[text] += float(reached.sum())
        q = batch.target_probs
        for place, policy in enumerate(colder):
            spent[place, text] += float((reached * kl(policy.emitted(q, q), q)).sum())
    return [ratio_of_sums(sums, weight, trace.fingerprint) for sums in spent]


def _temperature_at(
    nats: float, temperatures: Sequence[float], curve: Sequence[float]
) -> float | None:
    """Return the temperature at which the curve reaches ``nats``; None if not even the coldest.

    ``curve`` has the nats at each of the rising ``temperatures``.
    """
    # reversed, as np.interp needs rising points; rounding could make them fall
    roots = np.sqrt(np.maximum.accumulate(curve[::-1]))
    if nats > roots[-1] ** 2:
        return None
    return float(1 / np.interp(np.sqrt(nats), roots, 1 / np.array(temperatures[::-1])))
