r"""A worked design on one real row: protect a set of tokens, cap the ratio, keep the KL.

Tokens that end a sentence or a line decide how long a text gets; a lossy policy that emits the
draft's too often shortens it. The design forbids that, :math:`h_i \le q_i` on those tokens,
keeps other punctuation below ``cap`` times its target probability, and spends at most δ nats.
The table holds the row under one constraint after another, and what each costs at other budgets.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from solvers.design import Design, DesignedRow

from ..common.inputs import add_pair_arguments, load_model, load_prompts, log_rows
from ..common.results import publish

OUT = Path("paper_figures/data/design_example.csv")
SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"')
# tokens sampled after each prompt, to choose a row from
LOGGED_TOKENS = 32
# budgets of the curves, log-spaced in nats
SPAN = (3e-3, 1.0)
# tokens in the table: all that either row gives this much
SHOWN = 2e-4
COLUMNS = (
    "kind", "design", "token", "role", "q", "p", "h", "delta", "cap", "acceptance",
    "lossless", "kl", "price", "gap", "proof",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the committed table."""
    add = parser.add_argument
    add("--delta", type=float, default=0.1, help="KL budget in nats")
    add("--cap", type=float, default=1.5, help="largest ratio h/q of punctuation")
    add("--points", type=int, default=13, help="budgets of each curve")
    add("--row", type=int, help="logged row; by default the one that breaks both constraints most")
    add("--num-prompts", type=int, default=8)
    add_pair_arguments(parser)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    """Design the row, print the report and write the table."""
    names, end, q, p = logged(args)
    protected = closing_tokens(names, end)
    tokens = Tokens(names, protected, punctuation(names, protected))
    row = row_to_draw(q, p, tokens, args) if args.row is None else args.row
    if not 0 <= row < len(q):
        raise ValueError(f"row: must be from 0 to {len(q) - 1}; got {row}")
    rows, solved = table(q[row].numpy(), p[row].numpy(), tokens, args)
    print(
        f"row {row} of {len(q)}: of {len(names)} tokens {len(protected)} end a sentence or "
        f"a line, {len(tokens.capped)} are other punctuation\n"
    )
    for name, designed in solved.items():
        print(f"{name}\n{designed.report()}\n")
    publish(args, rows)
    print(f"{len(rows)} rows in {args.out}")
    return 0


def logged(
    args: argparse.Namespace,
) -> tuple[list[str], int | None, torch.Tensor, torch.Tensor]:
    """Return the tokens' texts, the one that ends a text, both models' rows along sampled text."""
    from transformers import AutoTokenizer

    prompts = load_prompts(args.prompts, args.target)[: args.num_prompts]
    target, draft = (load_model(folder) for folder in (args.target, args.draft))
    q, p = log_rows(target, draft, prompts, LOGGED_TOKENS, args.seed)
    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(args.target, **options)
    names = [tokenizer.decode([token]) for token in range(q.shape[-1])]
    return names, target.config.eos_token_id, q, p


def closing_tokens(names: list[str], end: int | None) -> list[int]:
    """Return the tokens that end a sentence, a line or the text."""
    return [
        token
        for token, name in enumerate(names)
        if token == end or "\n" in name or name.strip() in SENTENCE_ENDS
    ]


def punctuation(names: list[str], protected: list[int]) -> list[int]:
    """Return the other tokens without a letter or a digit."""
    return [
        token
        for token, name in enumerate(names)
        if token not in protected and not any(character.isalnum() for character in name)
    ]


@dataclass(frozen=True)
class Tokens:
    """The vocabulary and the two sets with constraints."""

    names: list[str]
    protected: list[int]
    capped: list[int]

    def role(self, token: int) -> str:
        """Return which constraint the token has."""
        kinds = {"protected": self.protected, "capped": self.capped}
        return next((kind for kind, tokens in kinds.items() if token in tokens), "free")


def row_to_draw(q: torch.Tensor, p: torch.Tensor, tokens: Tokens, args: argparse.Namespace) -> int:
    """Return the row whose optimum under KL alone breaks both other constraints most.

    Only rows that reject at least half: elsewhere those constraints, and not KL, set the limit.
    """
    best = ct.optimal_acceptance(q, p, delta=args.delta).target
    over_target = (best - q)[:, tokens.protected].clamp(min=0.0).sum(-1)
    over_cap = (best - args.cap * q)[:, tokens.capped].clamp(min=0.0).sum(-1)
    rejected = 1 - torch.minimum(q, p).sum(-1)
    return int((torch.minimum(over_target, over_cap) + (rejected >= 0.5).double()).argmax())


def designs(
    q: np.ndarray, p: np.ndarray, tokens: Tokens, cap: float, delta: float
) -> dict[str, Design]:
    """Return the designs, each with one constraint more than the last."""
    plain = Design(q, p).budget("kl", delta)
    guarded = plain.protect(tokens.protected)
    capped = guarded.cap(cap, tokens.capped, name="cap")
    return {"budget": plain, "protect": guarded, "cap": capped}


def table(
    q: np.ndarray,
    p: np.ndarray,
    tokens: Tokens,
    args: argparse.Namespace,
) -> tuple[list[dict[str, Any]], dict[str, DesignedRow]]:
    """Return the table's rows and the designs solved at the budget that is drawn."""
    solved = {
        name: design.solve() for name, design in designs(q, p, tokens, args.cap, args.delta).items()
    }
    rows = list(_tokens(q, p, tokens, solved))
    low, high = (math.log10(end) for end in SPAN)
    for delta in np.logspace(low, high, args.points).tolist():
        for name, design in designs(q, p, tokens, args.cap, delta).items():
            rows.append(_curve(name, delta, args.cap, q, design.solve()))
    rows += [_curve(name, args.delta, args.cap, q, row) for name, row in solved.items()]
    return rows, solved


def _tokens(
    q: np.ndarray,
    p: np.ndarray,
    tokens: Tokens,
    solved: dict[str, DesignedRow],
) -> Iterator[dict[str, Any]]:
    for design, row in solved.items():
        for token in np.argsort(-np.maximum(q, p)).tolist():
            if max(q[token], p[token]) >= SHOWN:
                yield _row(
                    kind="token",
                    design=design,
                    token=repr(tokens.names[token]),
                    role=tokens.role(token),
                    q=float(q[token]),
                    p=float(p[token]),
                    h=float(row.target[token]),
                )


def _curve(
    design: str, delta: float, cap: float, q: np.ndarray, row: DesignedRow
) -> dict[str, Any]:
    kl = ct.divergence("kl").value(torch.from_numpy(row.target), torch.from_numpy(q))
    return _row(
        kind="curve",
        design=design,
        delta=delta,
        cap=cap if design == "cap" else None,
        acceptance=row.acceptance,
        lossless=row.lossless,
        kl=float(kl),
        price=row.duals["budget kl"],
        gap=row.gap,
        proof=row.proof,
    )


def _row(**fields: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | fields
