"""Hugging Face's own ``generate``, drafted and metered: what each answer has spent so far.

``custom_generate=speculative_generate`` is all it takes. The meter is exact, and a ``Ledger``
keeps every answer below its cap at every length; other policies only do so on average.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding import Ledger, load_pair, speculative_generate

from ..common.inputs import PAIR, PROMPTS, prompts_of
from . import CACTUS, INK, OPTIMUM, SOFT

CAP = 0.05  # nats a token
COLOURS = {
    "cactus:delta=0.006": CACTUS,
    "band:price=1": OPTIMUM,
    f"Ledger, cap {CAP:g}": SOFT,
}


@dataclass(frozen=True)
class Result:
    """By policy: nats spent after each token of each answer (B, N), and tokens per call."""

    spent: dict[str, Tensor]
    tokens_per_call: dict[str, float]


def measure(quick: bool = False) -> Result:
    """Return what a batch of prompts spends under three policies."""
    pair = load_pair(PAIR / "target", PAIR / "draft")
    prompts = prompts_of(PROMPTS)[: 2 if quick else 12]
    inputs = pair.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    spent, per_call = {}, {}
    for name in COLOURS:
        policy = Ledger("band:price=0.5", CAP) if name.startswith("Ledger") else name
        output = pair.target.generate(
            **inputs,
            do_sample=True,
            max_new_tokens=12 if quick else 64,
            custom_generate=speculative_generate,
            draft_model=pair.draft,
            policy=policy,
            num_draft_tokens=4,
            seed=0,
            meter=True,
            return_dict_in_generate=True,
        )
        decode = output.result
        spent[name] = torch.where(
            decode.output_token_ids < 0, torch.nan, decode.token_charges.cumsum(1)
        )
        per_call[name] = decode.num_tokens / decode.row_calls
    return Result(spent, per_call)


def say(result: Result) -> str:
    lines = []
    for name, spent in result.spent.items():
        rates = [float(row[~row.isnan()][-1]) / int((~row.isnan()).sum()) for row in spent]
        lines.append(
            f"{name:20} {result.tokens_per_call[name]:.2f} tokens a call; nats a token: mean "
            f"{sum(rates) / len(rates):.4f}, largest answer {max(rates):.4f}"
        )
    return "\n".join(lines)


def draw(figure: Any, result: Result) -> None:
    """Draw what each answer has spent after each of its tokens."""
    for axes, (name, spent) in zip(
        figure.subplots(1, len(result.spent), sharey=True), result.spent.items(), strict=True
    ):
        places = torch.arange(1, spent.shape[1] + 1)
        axes.plot(places, spent.T, color=COLOURS[name], lw=0.9, alpha=0.8)
        axes.plot(places, CAP * places, color=INK, ls=":", label=f"{CAP:g} nats a token")
        axes.set_xlabel("new tokens")
        axes.set_title(name)
    figure.axes[0].set_ylabel("nats spent so far, each answer")
    figure.axes[0].legend(frameon=False, fontsize=7.5)
