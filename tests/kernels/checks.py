"""Kernels against the float64 closed forms, by the same random numbers, and their counted laws.

Every function takes a device and returns plain rows. Without CUDA they run where
Triton interprets kernels (TRITON_INTERPRET=1), a tenth of a second a request.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.kernels import (
    LogitsVerdict,
    draft_from_logits,
    random_numbers,
    verify_logits,
)
from cactus_theory.verify import Assignment, Draft, find_verifier
from cactus_theory.verify.draw import pick
from tests.kernels.closed_forms import compare, rows_of, sharp_seeds
from tests.kernels.hopper import CHAIN, LAWS, WIDTH, ZERO_RULES

Device = torch.device | str
BLOCK = ("speculative", "band:price=2,per_row=True")
RULES = (*((spec, "chain") for spec in CHAIN), *((spec, "block") for spec in BLOCK))

KINDS = ("smooth", "spiky", "tied", "masked", "one-hot", "alike", "equal", "low")
# logits of one batch: 2^27 float32 numbers are 512 MiB, and the closed forms hold several such
MOST_LOGITS = 2**25
# one test in so many fails by chance; the coins are seeded, so a failure stays one
FALSE_ALARM = 1e-4
# cells with a smaller expected count are counted as one
LEAST_EXPECTED = 8
# a small text: K = 2 drafted tokens of V = 4, rows that refuse often
TARGET = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.3, 0.2, 0.0), (0.25, 0.25, 0.1, 0.4))
DRAFTED = ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))
# 16 tokens of which lossless sampling accepts 60 %; were the coin that of the draft, a small one,
# which drafts token 0, would also accept it
SHARED_DRAFT, SHARED_RATIO = 0.12, 0.2
SHARED_ACCEPTANCE = 0.6


def kernel_agreement(
    device: Device, rows: int, vocabularies: Sequence[int], seed: int
) -> list[dict[str, Any]]:
    """Return one row a vocabulary, policy and verifier: mismatches must be 0.

    ``rows`` is how many requests each combination tries; each has WIDTH drafted tokens.
    """
    checks = []
    for vocab in vocabularies:
        generator = torch.Generator(device=device).manual_seed(seed + vocab)
        batch_limit = max(len(KINDS), MOST_LOGITS // (vocab * (2 * WIDTH + 1)))
        for spec, verifier in RULES:
            counted = {"rows": 0, "excluded": 0, "mismatches": 0}
            for start in range(0, rows, batch_limit):
                batch = min(batch_limit, rows - start)
                for name, count in _agree(spec, verifier, batch, vocab, generator).items():
                    counted[name] += count
            checks.append(
                {
                    "check": f"kernel {verifier} against the closed form", "vocabulary": vocab,
                    "policy": spec, **counted, "passed": not counted["mismatches"],
                }
            )  # fmt: skip
    return checks


def _agree(
    spec: str, verifier: str, batch: int, vocab: int, generator: torch.Generator
) -> dict[str, int]:
    rule, device = ct.policy(spec), generator.device
    target, draft = logits(batch, WIDTH, vocab, generator)
    ids = drawn(draft, generator)
    rows, positions = rows_of(target, draft, ids), torch.arange(batch, device=device)
    seeds = sharp_seeds(rule, verifier, rows, positions, generator)
    verdict = verify_logits(
        rule, target, draft, ids, seeds=seeds, positions=positions, verifier=verifier
    )
    return compare(rule, verifier, rows, seeds, positions, verdict)


def logits(batch: int, width: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return target (B, K + 1, V) and draft (B, K, V) logits of every kind in turn."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    target, draft = normal(batch, width + 1, vocab), normal(batch, width, vocab)
    for number, kind in enumerate(KINDS):
        members = slice(number, None, len(KINDS))
        q, p = target[members], draft[members]
        common = q[:, :width]
        if kind == "spiky":
            q.mul_(6)
            p.mul_(6).add_(common, alpha=0.5)
        elif kind == "tied":
            q.round_()
            p.round_()
        elif kind == "masked":
            q.masked_fill_(normal(*q.shape) > 0.5, -torch.inf)
            q[..., 0] = 0.0
            p.masked_fill_(normal(*p.shape) > 1.0, -torch.inf)
            p[..., -1] = 0.0
        elif kind == "one-hot":
            q[..., vocab // 2] += 40.0
            p[..., vocab // 3] += 40.0
        elif kind == "alike":
            p.mul_(0.5).add_(common)
        elif kind == "equal":
            p.copy_(common)
        elif kind == "low":
            q.mul_(2).sub_(1e4)
            p.mul_(2).add_(1e4)
    return target, draft


def drawn(draft: Tensor, generator: torch.Generator) -> Tensor:
    """Return one token from each draft row, by torch's own generator."""
    flat = draft.reshape(-1, draft.shape[-1])
    uniform = torch.rand(flat.shape, generator=generator, device=flat.device)
    noise = -torch.log(-torch.log(uniform.clamp(min=1e-30)).clamp(min=1e-30))
    return (flat + noise).argmax(-1).view(draft.shape[:2])


def kernel_laws(device: Device, trials: int, seed: int) -> list[dict[str, Any]]:
    """Return a chi-square test a policy and verifier: of all that a step of K = 2 emits."""
    target, draft = (torch.tensor(rows, device=device).log() for rows in (TARGET, DRAFTED))
    checks = []
    for number, (spec, verifier) in enumerate(LAWS):
        rule = ct.policy(spec)
        seeds = _seeds(trials, seed + number, device)
        output = _steps(rule, verifier, target, draft, seeds).output_token_ids
        expected = trials * _law(rule, verifier, *map(_exact, (target, draft)))
        base = target.shape[-1] + 1
        cell = ((output + 1) * base ** torch.arange(3, device=device)).sum(-1)
        counts = torch.bincount(cell, minlength=base**3).double()
        statistic, dof = chi_square(counts.cpu(), expected.cpu())
        p_value = float(torch.special.gammaincc(_number(dof / 2), _number(statistic / 2)))
        checks.append(
            {
                "check": f"law of a step, {verifier}, {spec}", "trials": trials,
                "statistic": statistic, "dof": dof, "p_value": p_value,
                "passed": p_value > FALSE_ALARM,
            }
        )  # fmt: skip
    return checks


def kernel_streams(device: Device, trials: int, seed: int) -> list[dict[str, Any]]:
    """Return how often one of 16 tokens is accepted, and how often if streams were shared."""
    q, p = shared_rows()
    seeds = _seeds(trials, seed, device)
    logits = [row.log().float().to(device)[None] for row in (q, p)]
    step = _steps(ct.policy("speculative"), "chain", logits[0].expand(2, -1), logits[1], seeds)
    measured = float(step.num_accepted.double().mean())
    shared = float(shared_acceptance(q, p, seeds))
    deviation = math.sqrt(SHARED_ACCEPTANCE * (1 - SHARED_ACCEPTANCE) / trials)
    limit = math.sqrt(2) * float(torch.erfinv(_number(1 - FALSE_ALARM)))
    power = float(torch.special.ndtr(_number(abs(shared - SHARED_ACCEPTANCE) / deviation - limit)))
    z = (measured - SHARED_ACCEPTANCE) / deviation
    return [
        {
            "check": "acceptance and draft draw from streams of their own", "trials": trials,
            "expected": SHARED_ACCEPTANCE, "measured": measured, "if_shared": shared,
            "power": power, "z": z, "passed": abs(z) < limit,
        }
    ]  # fmt: skip


def zero_tokens(device: Device, draws: int, seed: int) -> dict[str, Any]:
    """Return how many tokens without target mass were emitted in so many steps; must be 0.

    Half of the vocabulary of 16 is excluded and holds most of the draft's mass.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    batch_limit, finished, emitted = 2**20, 0, 0
    rules = [ct.policy(spec) for spec in ZERO_RULES]
    for number, rule in enumerate(itertools.cycle(rules)):
        if finished >= draws:
            break
        batch = min(batch_limit, draws - finished)
        target, draft = torch.randn(2, 2, 16, generator=generator, device=device).mul(3)
        target[:, ::2] = -torch.inf
        draft[:, ::2] += 2
        seeds = _seeds(batch, seed + number, device)
        output = _steps(rule, "chain", target, draft[:1], seeds).output_token_ids
        emitted += int(((output >= 0) & (output % 2 == 0)).sum())
        emitted += int((output[:, 0] < 0).sum())
        finished += batch
    return {
        "check": "tokens without target mass are never emitted", "draws": finished,
        "emitted": emitted, "passed": emitted == 0,
    }  # fmt: skip


def _steps(
    rule: ct.Policy, verifier: str, target: Tensor, draft: Tensor, seeds: Tensor
) -> LogitsVerdict:
    """Return what requests of these seeds emit, all with the same rows (K + 1, V) and (K, V)."""
    batch, positions = len(seeds), torch.full_like(seeds, 11)
    ids = [
        draft_from_logits(row.expand(batch, -1), seeds=seeds, positions=positions, place=place)
        for place, row in enumerate(draft)
    ]
    return verify_logits(
        rule,
        target.expand(batch, -1, -1),
        draft.expand(batch, -1, -1),
        torch.stack(ids, 1),
        seeds=seeds,
        positions=positions,
        verifier=verifier,
    )


def _law(rule: ct.Policy, verifier: str, q: Tensor, p: Tensor) -> Tensor:
    """Return the probability of each output, by its number to the base V + 1."""
    vocab, width = q.shape[-1], len(p)
    paths = torch.tensor(list(itertools.product(range(vocab), repeat=width)))
    rows = [row.expand(len(paths), -1, -1) for row in (q, p)]
    draft = Draft(paths, [width] * len(paths), rows[1])
    law = find_verifier(verifier).law(Assignment((rule,)), rows[0], draft)
    chance = p.gather(1, paths.T).prod(0)
    probabilities = torch.zeros((vocab + 1) ** (width + 1), dtype=torch.float64)
    for count, token in itertools.product(range(width + 1), range(vocab)):
        output = torch.full((len(paths), width + 1), -1)
        output[:, :count], output[:, count] = paths[:, :count], token
        cell = ((output + 1) * (vocab + 1) ** torch.arange(width + 1)).sum(-1)
        probabilities.index_add_(0, cell, chance * law.stop[:, count] * law.last[:, count, token])
    return probabilities


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; rare cells are counted as one.

    A cell of probability 0 that is counted makes it infinite.
    """
    if bool((counts[expected == 0] > 0).any()):
        return math.inf, 1
    rare = expected < LEAST_EXPECTED
    cells = [
        (counts[~rare], expected[~rare]),
        (counts[rare].sum()[None], expected[rare].sum()[None]),
    ]
    pooled = [torch.cat(part) for part in zip(*cells, strict=True)]
    counted = pooled[1] > 0
    gap = (pooled[0] - pooled[1])[counted]
    return float((gap**2 / pooled[1][counted]).sum()), int(counted.sum()) - 1


def shared_rows() -> tuple[Tensor, Tensor]:
    """Return q and p over 16 tokens; Σ min(p, q) is SHARED_ACCEPTANCE."""
    p = torch.full((16,), (1 - SHARED_DRAFT) / 15, dtype=torch.float64)
    p[0] = SHARED_DRAFT
    ratio = torch.ones_like(p)
    ratio[0] = SHARED_RATIO
    lost = 1 - SHARED_ACCEPTANCE - SHARED_DRAFT * (1 - SHARED_RATIO)
    ratio[1:10] = 1 - lost / (9 * p[1])
    q = ratio * p
    q[10:] += (1 - q.sum()) / 6
    return q, p


def shared_acceptance(q: Tensor, p: Tensor, seeds: Tensor) -> Tensor:
    """Return the share of drafted tokens accepted by the draft's own coins."""
    q, p, zero = q.to(seeds.device), p.to(seeds.device), torch.zeros_like(seeds)
    coins = random_numbers.coins(seeds, zero + 11, zero[:, None], random_numbers.DRAFT)[:, 0]
    drafted = pick(p.expand(len(seeds), -1), coins)
    return (coins < q[drafted] / p[drafted]).double().mean()


def _exact(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1).cpu()


def _seeds(count: int, seed: int, device: Device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (count,), generator=generator).to(device)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
