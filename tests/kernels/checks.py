"""Kernels against the float64 closed forms, by the same random numbers, and their counted laws.

Every function takes a device. On a CPU the torch path runs, and kernels where Triton interprets
them (TRITON_INTERPRET=1), a tenth of a second a request.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.kernels import LogitsVerdict, verify_logits
from cactus_theory.verify import Assignment, Draft, find_verifier
from tests.counts import p_value
from tests.kernels.closed_forms import compare, rows_of, sharp_seeds
from tests.kernels.hopper import LAWS, RULES, WIDTH, ZERO_RULES

Device = torch.device | str
Rule = tuple[str, str]  # a policy and a verifier
KINDS = ("smooth", "spiky", "tied", "masked", "one-hot", "alike", "equal", "low")
# logits of one batch: 2^27 float32 numbers are 512 MiB, and the closed forms hold several such
MOST_LOGITS = 2**25
# one test in so many fails by chance; the coins are seeded, so a failure stays one
FALSE_ALARM = 1e-4
# a small text: K = 2 drafted tokens of V = 4, rows that refuse often
TARGET = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.3, 0.2, 0.0), (0.25, 0.25, 0.1, 0.4))
DRAFTED = ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))


def kernel_agreement(
    device: Device,
    rows: int,
    vocab: int,
    seed: int,
    rules: Iterable[Rule] = RULES,
    width: int = WIDTH,
) -> Iterator[dict[str, Any]]:
    """Yield one row a policy and verifier: mismatches must be 0, of ``rows`` requests or more."""
    generator = torch.Generator(device=device).manual_seed(seed + vocab)
    batch = min(rows, max(len(KINDS), MOST_LOGITS // (vocab * (2 * width + 1))))
    for spec, verifier in rules:
        counted: Counter[str] = Counter()
        while counted["rows"] < rows:
            rule = ct.policy(spec)
            target, draft = logits(batch, width, vocab, generator)
            ids = drawn(draft, generator)
            given, positions = rows_of(target, draft, ids), torch.arange(batch, device=device)
            seeds = sharp_seeds(rule, verifier, given, positions, generator)
            verdict = verify_logits(
                rule, target, draft, ids, seeds=seeds, positions=positions, verifier=verifier
            )
            counted.update(compare(rule, verifier, given, seeds, positions, verdict))
        yield {"policy": spec, "verifier": verifier, **counted}


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
    probs = draft.flatten(0, 1).softmax(-1)
    return torch.multinomial(probs, 1, generator=generator).view(draft.shape[:2])


def kernel_laws(
    device: Device, trials: int, seed: int, rules: Iterable[Rule] = LAWS
) -> dict[Rule, float]:
    """Return the p-value of all that a step of K = 2 emits, by policy and verifier."""
    target, draft = (torch.tensor(rows, device=device).log() for rows in (TARGET, DRAFTED))
    found = {}
    for number, (spec, verifier) in enumerate(rules):
        rule = ct.policy(spec)
        seeds = _seeds(trials, seed + number, device)
        output = _steps(rule, verifier, target, draft, seeds).output_token_ids.cpu()
        law = _law(rule, verifier, *(_exact(rows) for rows in (target, draft)))
        base = target.shape[-1] + 1
        cell = ((output + 1) * base ** torch.arange(3)).sum(-1)
        found[spec, verifier] = p_value(torch.bincount(cell, minlength=base**3), law)
    return found


def excluded_tokens(device: Device, draws: int, seed: int) -> int:
    """Return how many tokens without target mass were emitted in so many steps; must be 0.

    Half of the vocabulary of 16 is excluded and holds most of the draft's mass.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    batch_limit, finished, emitted = 2**20, 0, 0
    for number, spec in enumerate(itertools.cycle(ZERO_RULES)):
        if finished >= draws:
            return emitted
        batch = min(batch_limit, draws - finished)
        target, draft = torch.randn(2, 2, 16, generator=generator, device=device).mul(3)
        target[:, ::2] = -torch.inf
        draft[:, ::2] += 2
        seeds = _seeds(batch, seed + number, device)
        output = _steps(ct.policy(spec), "chain", target, draft[:1], seeds).output_token_ids
        emitted += int(((output >= 0) & (output % 2 == 0)).sum())
        emitted += int((output[:, 0] < 0).sum())
        finished += batch
    return emitted


def _steps(
    rule: ct.Policy, verifier: str, target: Tensor, draft: Tensor, seeds: Tensor
) -> LogitsVerdict:
    """Return what requests of these seeds emit, all with the same rows (K + 1, V) and (K, V)."""
    batch, positions = len(seeds), torch.full_like(seeds, 11)
    generator = torch.Generator(device=seeds.device).manual_seed(int(seeds[0]))
    ids = drawn(draft.expand(batch, -1, -1), generator)
    return verify_logits(
        rule,
        target.expand(batch, -1, -1),
        draft.expand(batch, -1, -1),
        ids,
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


def _exact(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1).cpu()


def _seeds(count: int, seed: int, device: Device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (count,), generator=generator).to(device)
