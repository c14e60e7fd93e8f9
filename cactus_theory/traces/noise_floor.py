"""Two comparisons for a budget in nats a token: rounding error, and a lower temperature.

Rounding differs with the shape of a pass, so that even a lossless decode that verifies K tokens at
once has not quite the law of one without a draft. That is the floor under every budget.
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
    """Divergence between rows of a pass over several tokens and of single-token passes.

    Attributes
    ----------
    per_token, standard_error : mean KL of a wide pass's row from a single pass's, in nats, and
        its error over texts; at temperature 0 the mean regret of its argmax.
    divergence : ``kl`` or ``regret``.
    changed : share of rows with another argmax in the wide pass.
    rows, width, dtype : rows compared, tokens of a wide pass, of the model.
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
    """Return the mean KL, in nats, of rows of passes of ``width`` tokens from those of one each.

    The texts are the target's own, drawn from the single passes; both have a cache of their own.
    At temperature 0 it is the regret of the wide pass's argmax under the single pass's row: what
    greedy texts that part at near ties give away.

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    prompts_ids : token ids of each prompt.
    width : tokens of a wide pass: K + 1 where K are drafted.
    max_new_tokens, temperature, seed : of the texts.
    on_text : called with how many are done; True leaves out the rest.

    Raises
    ------
    ValueError
        No prompt or an empty one, sizes below 1, a negative temperature, a family without a cache.
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
            own = int(pick(rows[-1].exp(), coin[None].to(rows[-1].device)))
            new.append(own if temperature else int(rows[-1].argmax()))
            rows.append(_rows(single, new[-1:], temperature))
        _rows(wide, list(prompt), temperature)
        parts = [new[start : start + width] for start in range(0, len(new), width)]
        log_h = torch.cat([_rows(wide, part, temperature, len(part)) for part in parts])
        log_q, best = torch.cat(rows[1:]), log_h.argmax(-1, keepdim=True)
        changed += int((best[:, 0] != log_q.argmax(-1)).sum())
        if temperature:
            gap = torch.where(log_h > -torch.inf, log_h - log_q, 0.0)
            spent.append(float((log_h.exp() * gap).sum(-1).clamp(min=0.0).sum()))
        else:
            spent.append(float((log_q.amax(-1) - log_q.gather(-1, best)[:, 0]).sum()))
        if on_text is not None and on_text(len(spent)) is True:
            break
    mean = ratio_of_sums(np.array(spent), np.full(len(spent), float(max_new_tokens)), "texts")
    count = len(spent) * max_new_tokens
    told = "kl" if temperature else REGRET.spec, changed / count, count, width
    return NoiseFloor(mean.value, mean.standard_error, *told, dtype_of([target_model]))


def _rows(
    model: CachedModel, ids: list[int], temperature: float, keep: int = 1
) -> Float[Tensor, "keep vocab"]:
    """Feed tokens; return the log-probabilities after the last ``keep`` of them."""
    tokens = torch.tensor([ids], device=model.model.device)
    logits = model.feed(tokens, [len(ids)], [keep])[0, :keep].double()
    return (logits / (temperature or 1.0)).log_softmax(-1)


# temperatures over the trace's own, and over the one read off these: between neighbours √KL is
# interpolated linearly in 1/t, with an error below 2e-4 on the shipped pair
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NEAR = (0.94, 0.97, 1.0, 1.03, 1.06)


def equal_temperature(trace: Trace, nats: float) -> Estimate | None:
    """Return the temperature below the trace's whose samples cost so many nats a token.

    KL of the tempered row from the target's, mean over the tokens of the target's own texts: all
    logged rows count as often as a lossless decode reaches them. The standard error is over texts.
    None where the coldest that is tried, 0.3 of the trace's, is nearer than that.
    """
    rough = _read(
        TEMPERATURES, [estimate.value for estimate in _tempered(trace, TEMPERATURES)], nats
    )
    if rough is None:
        return None
    near = sorted({min(rough * factor, 1.0) for factor in NEAR})

    def read(*curve: float) -> float:
        return trace.header.temperature * (_read(near, curve, nats) or near[0])

    return combined(np.vectorize(read), *_tempered(trace, near))


def _tempered(trace: Trace, temperatures: Sequence[float]) -> list[Estimate]:
    spent, weight = np.zeros((len(temperatures), trace.texts)), np.zeros(trace.texts)
    kl = read_divergence("kl").value
    lossless, chain = read_policy("speculative"), find_verifier("chain")
    colder = [read_policy("speculative", tilt=1 / heat - 1) for heat in temperatures]
    for batch in trace.batches(ENTRIES):
        alive, going, _ = batch_law(batch, lossless, chain, {}, trace.ends)
        reached = torch.where(going, alive, 0.0)
        text = int(batch.text[0])
        weight[text] += float(reached.sum())
        q = batch.target_probs
        for place, policy in enumerate(colder):
            spent[place, text] += float((reached * kl(policy.emitted(q, q), q)).sum())
    return [ratio_of_sums(sums, weight, trace.fingerprint) for sums in spent]


def _read(temperatures: Sequence[float], curve: Sequence[float], nats: float) -> float | None:
    """Return where the curve over rising temperatures has so many nats, None beyond the coldest."""
    roots = np.sqrt(np.maximum.accumulate(curve[::-1]))
    if nats > roots[-1] ** 2:
        return None
    return float(1 / np.interp(np.sqrt(nats), roots, 1 / np.array(temperatures[::-1])))
