"""What a policy is inside vLLM when drafts are deterministic: one number added to one logit.

A logits processor cannot see how drafts are verified. For a draft that is certain of its tokens
(greedy, n-gram) it need not: the engine verifies losslessly, and the optimum is the drafted
token's logit plus T/price; the optimum of whole paths adds more where a path may go on. Rows are
the target's along paths of the example trace, in the flat layout that the processor gets.
"""

from dataclasses import dataclass
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.vllm.bias import drafted_bias, lifts_of

from . import INK, OPTIMUM, SOFT, shipped_trace

PRICES = (8.0, 4.0, 2.0, 1.4, 1.0, 0.7, 0.5)
PATHS, QUICK_PATHS = 68, 12
POLICIES = {"band": "band:price={}", "soft band": "soft_band:price={}"}
SHOWN = 1.0  # price of the biases that are drawn


@dataclass(frozen=True)
class Result:
    """What biases do: (prices, 2) of KL a token and tokens a call, lossless, and biases (K,)."""

    curves: dict[str, torch.Tensor]
    lossless: tuple[float, float]
    biases: dict[str, torch.Tensor]
    entries: torch.Tensor


def measure(quick: bool = False) -> Result:
    """Return tokens a call and KL a token for both policies, exactly."""
    cycles = list(shipped_trace())
    width = max(len(cycle.draft_token_ids) for cycle in cycles)
    cycles = [cycle for cycle in cycles if len(cycle.draft_token_ids) == width]
    cycles = cycles[: QUICK_PATHS if quick else PATHS]
    # flat: K + 1 rows each
    logits = torch.cat([cycle.target_probs.double().log() for cycle in cycles])
    drafted = torch.cat([torch.nn.functional.pad(cycle.draft_token_ids, (0, 1), value=-1)
                         for cycle in cycles])  # fmt: skip
    biases = {name: [bias_of(spec.format(price), logits, drafted, width) for price in PRICES]
              for name, spec in POLICIES.items()}  # fmt: skip
    curves = {
        name: torch.tensor([kl_and_tokens(logits, drafted, bias, width) for bias in rows])
        for name, rows in biases.items()
    }
    of_a_path = {name: rows[PRICES.index(SHOWN)][:width] for name, rows in biases.items()}
    none = torch.zeros_like(drafted, dtype=torch.float64)
    entries = logits.softmax(-1).gather(1, drafted.clamp(min=0)[:, None])[:width, 0]
    return Result(curves, kl_and_tokens(logits, drafted, none, width), of_a_path, entries)


def bias_of(spec: str, logits: torch.Tensor, drafted: torch.Tensor, width: int) -> torch.Tensor:
    """Return what the logits processor adds to each row's drafted token, at temperature 1."""
    temperatures = torch.ones(len(logits))
    return drafted_bias(lifts_of([ct.policy(spec)]), logits, drafted, temperatures, width=width)


def kl_and_tokens(
    logits: torch.Tensor, drafted: torch.Tensor, bias: torch.Tensor, width: int
) -> tuple[float, float]:
    """Return KL a token and tokens a call of lossless verification of biased logits."""
    place = drafted.clamp(min=0)[:, None]
    q = logits.softmax(-1)
    h = logits.scatter_add(1, place, bias[:, None]).softmax(-1)
    cost = torch.where(h > 0, h * (h / q).log(), 0.0).nansum(-1).view(-1, width + 1)[:, :width]
    acceptance = h.gather(1, place).view(-1, width + 1)[:, :width]
    alive = torch.nn.functional.pad(acceptance.cumprod(1), (1, 0), value=1.0)  # i or more accepted
    tokens = float(alive.sum(1).mean())
    return float((alive[:, :width] * cost).sum(1).mean()) / tokens, tokens


def say(result: Result) -> str:
    band, soft = result.curves["band"], result.curves["soft band"]
    at = PRICES.index(SHOWN)
    return (
        f"price {SHOWN:g}: the band adds {1 / SHOWN:g} to every drafted logit, makes "
        f"{band[at, 1]:.3f} tokens a call and spends {band[at, 0]:.4f} nats a token\n"
        f"the block adds {', '.join(f'{b:.2f}' for b in result.biases['soft band'])} on the first "
        f"path: {soft[at, 1]:.3f} tokens, {soft[at, 0]:.4f} nats; "
        f"lossless: {result.lossless[1]:.3f}"
    )


def draw(figure: Any, result: Result) -> None:
    """Draw the biases of one path, and tokens a call against KL a token."""
    left, right = figure.subplots(1, 2)
    places = torch.arange(1, len(result.entries) + 1).numpy()
    for shift, (name, colour) in zip((-0.2, 0.2), LOOK.items(), strict=True):
        left.bar(places + shift, result.biases[name].numpy(), 0.36, color=colour, label=name)
        right.plot(*result.curves[name].T.numpy(), color=colour, marker="o", ms=3, label=name)
    names = [
        f"{place}\nq = {entry:.2f}"
        for place, entry in zip(places, result.entries.tolist(), strict=True)
    ]
    left.set_xticks(places, names)
    left.set(xlabel="place in the draft", ylabel="added to the drafted logit")
    left.set_title(f"Bias on one path, price {SHOWN:g}")
    right.plot(*result.lossless, color=INK, marker="s", ms=5, ls="none", label="lossless")
    right.set(xlabel="emitted KL (nats a token)", ylabel="tokens a call")
    right.set_title("What it makes and what it costs")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=7.5)


LOOK = {"band": OPTIMUM, "soft band": SOFT}
