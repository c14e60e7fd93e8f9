"""The main job: two language models in, tables and two pictures out.

Logs both models' rows along texts of the target, compares policies on these rows at equal nats,
solves the optimal acceptance on one row in two ways, and decodes the same prompts with each policy
at the knob that was solved for ``--nats``. Writes CSV, PDF and PNG files to ``--out``.

For each policy the fastest K (drafted tokens per round) is shown. Decodes are made as by
``python -m simulations throughput``: interleaved, with the nats from a metered repeat.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.tables import rule, text_table
from cactus_theory.commands.flags import add_nats, given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding import Pair
from cactus_theory.divergences import read_divergence
from cactus_theory.optimum.acceptance import OptimalAcceptance
from cactus_theory.traces.log import log_shown
from cactus_theory.tuning.families import family_of
from cactus_theory.tuning.knobs import checked_level

from .common.decode import Harness
from .common.grid import PLAIN, Grid, configs
from .common.inputs import add_decode_arguments, prompt_ids
from .common.results import publish
from .throughput import speed_rows, speeds

# Cactus is there twice: with a solved budget, and at a published budget
POLICIES = "lenience", "cactus", "cactus:delta=1", "band"
# nats per token at which policies are compared, beside --nats
NATS = 0.02, 0.05, 0.1, 0.2, 0.4
PICTURES = "policies", "band_row"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_decode_arguments(
        parser, policies=POLICIES, out="demo", widths=[3, 7], repeats=3, num_prompts=8,
        max_new_tokens=48,
    )  # fmt: skip
    add_nats(parser, "nats a token that the decoded policies spend (%(default)g)", default=0.05)


def run(args: argparse.Namespace) -> int:
    checked_level(args.nats, "--nats")
    for spec in args.policy:  # a typo raises before models are loaded
        family_of(spec, read_divergence("kl"))
    asked, pair = given_prompts(args)[: args.num_prompts], loaded(args)
    prompts = prompt_ids(args, pair, asked)

    print(rule("policies at equal nats, on rows along texts of the target"))
    sizes = {"num_draft_tokens": max(args.num_draft_tokens), "max_new_tokens": args.max_new_tokens}
    options = {"texts": len(prompts), "seed": args.seed, **sizes}
    trace = log_shown(pair, prompts, args.out / "trace", 1, **options)
    found = ct.compare(args.policy, trace, nats=sorted({*NATS, args.nats}))
    print(f"{found}\n")
    tables = {"equal_nats": found.lines, "band_row": solve(*trace.rows(), pair)}

    at = [line for line in found.lines if line["asked"] in (None, args.nats) and line["nats"]]
    print(rule(f"decoding {len(prompts)} prompts at {args.nats:g} nats a token"))
    lines = configs(
        [PLAIN], ["speculative", *(line["policy"] for line in at)], args.num_draft_tokens, [1]
    )
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    grid = Grid(lines, len(prompts), args.repeats, seed=args.seed)
    runs = grid.runs(grid.fill(
        lambda job: harness.decode(job.config, job.group, repeat=job.repeat,
                                   meter=job.repeat == 0).record))  # fmt: skip
    tables["policies"] = speed_rows(runs, args.seed)
    print(speeds(tables["policies"]))
    _write(tables, args, pair.dtype)
    return 0


def _write(tables: dict[str, list[dict[str, Any]]], args: argparse.Namespace, dtype: str) -> None:
    from paper_figures.__main__ import draw

    for name, rows in tables.items():
        publish(args, rows, args.out / f"{name}.csv", dtype=dtype)
    for name in PICTURES:
        draw(name, args.out, args.out)
    files = sorted(path.name for path in args.out.iterdir() if path.suffix in (".csv", ".png"))
    print(f"written to {args.out}/: {', '.join(files)}; trace/ for cactus-theory compare")


# budget of the solved row, in nats
SOLVED_DELTA = 0.1
# least and largest probability of a lossless rejection on the row that is plotted
DRAWN_REJECTIONS = (0.3, 0.5)
# least probability, under q or p, of a token that is plotted
DRAWN_MASS = 1e-4
PROGRAM_TOLERANCE = 1e-6
SOLVED_HEADS = ("", "acceptance", "price dA/dδ", "proof of optimality", "seconds")


def solve(q: Tensor, p: Tensor, pair: Pair) -> list[dict[str, Any]]:
    from solvers import optimal

    print(rule(f"the optimal acceptance on one row, KL ≤ {SOLVED_DELTA} nats"))
    rejected = (q - p).clamp(min=0.0).sum(-1)
    row = row_to_draw(q, rejected)
    start = time.perf_counter()
    optimum = ct.optimal_acceptance(q[row], p[row], delta=SOLVED_DELTA)
    elapsed = time.perf_counter() - start
    program = optimal.solve(q[row].numpy(), p[row].numpy(), divergence="kl", delta=SOLVED_DELTA)
    accepted = float(optimum.acceptance)
    lines = [
        ("lossless", f"{1 - float(rejected[row]):.9f}", "", "", ""),
        (
            "closed form", f"{accepted:.9f}", f"{float(optimum.price):.6f}",
            f"certificate gap {float(optimum.gap):.1e}", f"{elapsed:.4f}",
        ),
        (
            f"cvxpy ({program.solver})", f"{program.acceptance:.9f}", f"{program.price:.6f}",
            f"dual gap {program.gap:.1e}", f"{program.seconds:.4f}",
        ),
    ]  # fmt: skip
    print(text_table(SOLVED_HEADS, lines))
    distance = abs(accepted - program.acceptance)
    outcome = "agree" if distance <= PROGRAM_TOLERANCE else "DISAGREE"
    print(f"closed form and program {outcome}: they differ by {distance:.1e}\n")
    return _token_rows(q[row], p[row], optimum, pair)


def row_to_draw(q: Tensor, rejected: Tensor) -> int:
    """Return the index of the row to plot: the largest entropy among rows with some rejections."""
    low, high = DRAWN_REJECTIONS
    entropy = -torch.xlogy(q, q).sum(-1)
    fair = (rejected >= low) & (rejected <= high)
    if not bool(fair.any()):
        return int(rejected.argmax())
    return int(torch.where(fair, entropy, -1.0).argmax())


def _token_rows(
    q: Tensor, p: Tensor, optimum: OptimalAcceptance, pair: Pair
) -> list[dict[str, Any]]:
    """Return the row's tokens in the order of p/q, with the band's and Cactus's emitted law."""
    cactus = ct.policy("cactus", delta=SOLVED_DELTA)
    emitted, spent = ct.emitted_law(cactus, q, p), ct.audit(cactus, q, p)
    order = (p / q).argsort()
    cumulative = q[order].cumsum(0)
    drawn = torch.maximum(q, p)[order] > DRAWN_MASS
    return [
        {
            "token": repr(pair.tokenizer.decode([int(token)])),
            "target_mass_below": float(below - q[token]),
            "q": float(q[token]),
            "p": float(p[token]),
            "band": float(optimum.target[token]),
            "cactus": float(emitted[token]),
            "lower": float(optimum.lower),
            "upper": float(optimum.upper),
            "delta": SOLVED_DELTA,
            "acceptance": float(optimum.acceptance),
            "nats": float(optimum.divergence),
            "cactus_acceptance": float(spent.acceptance),
            "cactus_nats": float(spent.divergences["kl"]),
            "speculative": float(torch.minimum(q, p).sum()),
        }
        for token, below in zip(order[drawn], cumulative[drawn], strict=True)
    ]
