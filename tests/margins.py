"""Every named tolerance of closed forms, decisions and laws beside the worst of 40 seeds.

``python -m tests.margins`` measures and writes ``tests/data/margins.csv``. A tolerance is a claim
about numbers on any machine, so each must be three times the worst error or more; what rows that
users bring may miss 1 by is a rule of the interface, and must be twice what a softmax misses it by.
"""

import argparse
import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory import emitted
from cactus_theory.base import arguments
from cactus_theory.base.files import write_whole
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from simulations.markov import Setting, enumerate_texts, markov_pair
from tests import test_divergences, test_emitted
from tests.formulas import ALL, by_hand
from tests.optimum import test_band_theorems, test_decide, test_promises, test_soft
from tests.policies import test_rules
from tests.rows import KINDS, pair
from tests.rules import CHAIN, SPECS
from tests.simulations.markov import test_texts
from tests.simulations.markov.places import follow_places
from tests.verify import test_block_theorems

SEEDS, MARGIN, DOOR = 40, 3.0, 2.0
TABLE = Path(__file__).parent / "data" / "margins.csv"
DELTAS = (1e-6, 1e-3, 0.1, 2.0)
ORDINARY_ROWS = (("smooth", "smooth"), ("zeros", "zeros"), ("smooth", "spiky"))
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class Claim:
    """A tolerance, what it bounds, and the error at one seed."""

    name: str
    bounds: str
    tolerance: float
    error: Callable[[int], float]
    least: float = MARGIN


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def solved(seed: int, kinds: tuple[str, str] = ("smooth", "smooth")):
    """Yield solved rows of every divergence at several budgets."""
    q, p = pair(20, 40, seed=seed, kinds=kinds)
    for spec in ALL:
        for delta in DELTAS:
            yield q, p, delta, spec, ct.optimal_acceptance(q, p, divergence=spec, delta=delta)


def over_budget(seed: int) -> float:
    found = solved(seed, ORDINARY_ROWS[seed % 3])
    return max(float(((s.divergence - d) / (1 + d)).max()) for _, _, d, _, s in found)


def uncertified(seed: int) -> float:
    return max(float(s.gap.abs().max()) for *_, s in solved(seed))


def uncertified_anywhere(seed: int) -> float:
    kinds = KINDS[seed % 4], KINDS[seed // 4 % 4]
    return max(float(s.gap.abs().max()) for *_, s in solved(seed, kinds))


def row_sums(seed: int) -> float:
    kinds = ORDINARY_ROWS[seed % 3]
    return max(float((s.target.sum(-1) - 1).abs().max()) for *_, s in solved(seed, kinds))


def by_three_ways(seed: int) -> float:
    """The acceptance of a point of the path asked for by δ, by its acceptance and by its price."""
    worst = 0.0
    for q, p, _, spec, s in solved(seed):
        again = ct.optimal_acceptance(q, p, divergence=spec, acceptance=s.acceptance.clamp(max=1))
        worst = max(worst, apart(again.acceptance, s.acceptance))
    return worst


def value_by_hand(seed: int) -> float:
    q, h = pair(20, 9, seed=seed, kinds=ORDINARY_ROWS[seed % 3])
    worst = 0.0
    for spec in ALL:
        exact = by_hand(spec, h.numpy(), q.numpy())
        found = ct.divergence(spec).value(h, q).numpy()
        finite = np.isfinite(exact) & (exact > 1e-12)
        worst = max(
            worst, float(np.max(abs(found / np.where(finite, exact, 1) - 1)[finite], initial=0))
        )
    return worst


def fast_law(seed: int) -> float:
    q, p = pair(8, 7, seed=seed, kinds=ORDINARY_ROWS[seed % 3])
    rules = [CHAIN[spec] for spec in SPECS if spec in CHAIN]
    return max(apart(rule.emitted(q, p), Policy.emitted(rule, q, p)) for rule in rules)


def law_of_a_step(verifier: str, spec: str) -> Callable[[int], float]:
    """What a verifier emits at a drafted place, all coins integrated out, against the policy's."""

    def error(seed: int) -> float:
        q, p = pair(6, 5, seed=seed, kinds=ORDINARY_ROWS[seed % 3])
        rule, judge = ct.policy(spec), find_verifier(verifier)
        ids, worst = torch.arange(5), torch.zeros_like(q)
        for row in range(len(q)):
            target = torch.stack([q[row], q[row]]).expand(5, 2, 5)
            draft = Draft(ids[:, None], [1] * 5, p[row].expand(5, 1, 5))
            law = judge.law(Assignment((rule,)), target, draft)
            stay = p[row] * law.stop[:, 1]
            worst[row] = stay + ((p[row] * law.stop[:, 0])[:, None] * law.last[:, 0]).sum(0)
        return apart(worst, rule.emitted(q, p))

    return error


def budget_of_an_audit(seed: int) -> float:
    q, p = pair(12, 30, seed=seed, kinds=ORDINARY_ROWS[seed % 3])
    worst = 0.0
    for spec in (
        "band:delta=0.1",
        "band:delta=0.001",
        "lenience:lenience=0.5",
        "mixture:alpha=0.4",
    ):
        seen = ct.audit(ct.policy(spec), q, p)
        worst = max(worst, float((seen.spent - seen.declares.budget.amount).max()))
    return worst


def decided_in_float64(seed: int) -> float:
    worst = 0.0
    for divergence in test_decide.PRICED:
        q, p = test_decide.rows(1, 9, torch.float64, seed=seed, zeros=bool(seed % 2))
        rule, tokens = ct.policy("band", price=1.0, divergence=divergence), torch.arange(9)
        wide = q.expand(9, 9), p.expand(9, 9)
        turn = test_decide.thresholds(
            q[0], p[0], lambda coin, w=wide, r=rule, t=tokens: r.decide(*w, t, coin).kept
        )
        phi, drafted = rule.acceptance(q, p, tokens[None])[0], p[0] > 0
        worst = max(worst, float((turn - phi).abs()[drafted].max()))
    return worst


def decided_in_float32(seed: int) -> float:
    worst = 0.0
    for divergence in test_decide.BUDGETED:
        for delta in test_decide.BUDGETS:
            q, p = test_decide.rows(2, 20, torch.float32, seed=seed, noise=2.0)
            kind = ct.divergence(divergence)
            budget = float(kind.to_generator(torch.tensor(delta, dtype=torch.float64)))
            solved = map(test_decide.solved, test_decide.at_budget(q, p, kind.generator, budget))
            _, *found = zip(*solved, strict=True)
            exact = [row.double() / row.double().sum(-1, keepdim=True) for row in (q, p)]
            edges = (torch.tensor(e, dtype=torch.float64) for e in found)
            law = test_decide.law_of_edges(*exact, *(edge[:, None] for edge in edges))
            best = ct.policy(f"band:delta={delta},divergence={divergence}").emitted(*exact)
            worst = max(worst, float((law - best).abs().sum(-1).max() / 2))
    return worst


def spent_per_proposal(seed: int) -> float:
    """How far D(h⁽ⁿ⁾‖q) is from δ; near γ = 1 a last digit of 1 − γ would be many of D."""
    source = torch.Generator().manual_seed(seed)
    q_n = 10 ** (-6 * torch.rand(50, generator=source, dtype=torch.float64)) / 2
    worst = 0.0
    for spec in ("kl", "reverse_kl", "pearson_chi2", "squared_hellinger", "jensen_shannon"):
        gamma = ct.policy(f"cactus_exact:delta=0.1,divergence={spec}").gamma(q_n)
        binds = gamma < 1
        both = (torch.stack([row, 1 - row], -1)[binds].numpy() for row in (gamma, q_n))
        worst = max(worst, float(np.max(abs(by_hand(spec, *both) - 0.1), initial=0)))
    return worst


def soft_rows_sum(seed: int) -> float:
    q, p = pair(6, 9, seed=seed, kinds=ORDINARY_ROWS[seed % 3])
    worst = 0.0
    for spec in test_soft.SPECS:
        found = test_soft.solved(q, p, 0.6, spec, 1.0)
        worst = max(worst, float((found.sum(-1) - 1).abs().max()))
    return worst


def blocks_enumerated(seed: int) -> float:
    tree = test_block_theorems.Tree(seed, 3, 2, bool(seed % 2))
    reached, following = tree.verified()
    worst = 0.0
    for prefix, share in reached.items():
        chance = float(np.prod([tree.p[prefix[:i]][x] for i, x in enumerate(prefix)]))
        worst = max(worst, abs(share - chance * tree.alive[prefix]))
        if not tree.leaf[prefix]:
            worst = max(worst, float(abs(following[prefix] - share * tree.h[prefix]).max()))
    return worst


def texts_in_two_ways(seed: int) -> float:
    two = markov_pair(3, order=1 + seed % 2, seed=seed, distance=1.5)
    setting = Setting("band:price=1", 2, 4, ("chain", "block")[seed % 2])
    exact, places = enumerate_texts(two, setting), follow_places(two, setting)
    gaps = [
        abs(m - k - t)
        for m, k, t in zip(places.metered, places.kl, places.information, strict=True)
    ]
    return max(abs(sum(places.kl) - exact.kl), abs(sum(places.metered) - exact.meter.mean), *gaps)


def softmax_sums(dtype: torch.dtype) -> Callable[[int], float]:
    """How far from 1 a softmax of this precision sums at V = 151,936."""

    def error(seed: int) -> float:
        source = torch.Generator().manual_seed(seed)
        logits = (1 + seed % 5) * torch.randn(151_936, generator=source)
        row = logits.double().softmax(-1) if dtype == torch.float64 else logits.softmax(-1)
        return abs(float(row.to(dtype).sum(dtype=torch.float64)) - 1)

    return error


def claims() -> list[Claim]:
    """Return every tolerance with its measurement."""
    promises, decide, soft = test_promises, test_decide, test_soft
    found = [
        Claim("OVER_BUDGET", "D − δ of the optimum, over 1 + δ", promises.OVER_BUDGET, over_budget),
        Claim("ORDINARY", "gap of the certificate, ordinary rows", promises.ORDINARY, uncertified),
        Claim("ORDINARY", "|Σh − 1| of the optimum", promises.ORDINARY, row_sums),
        Claim(
            "CERTIFIED", "gap of the certificate, any row", promises.CERTIFIED, uncertified_anywhere
        ),
        Claim(
            "SAME_POINT", "acceptance by δ and by acceptance", promises.SAME_POINT, by_three_ways
        ),
        Claim(
            "BY_HAND", "D against its formula, relative", test_divergences.BY_HAND, value_by_hand
        ),
        Claim("EXACT", "fast emitted law against enumeration", test_emitted.EXACT, fast_law),
        Claim(
            "BUDGET_TOLERANCE",
            "spent beyond a kept budget",
            emitted.BUDGET_TOLERANCE,
            budget_of_an_audit,
        ),
        Claim("CLOSE", "D of an exact proposal against δ", test_rules.CLOSE, spent_per_proposal),
        Claim("1e-12", "coin at which a decision turns, float64", 1e-12, decided_in_float64),
        Claim(
            "FLOAT32_LAW", "law of float32 decisions, TV", decide.FLOAT32_LAW, decided_in_float32
        ),
        Claim("ROUNDING", "|Σh − 1| of the soft band", soft.ROUNDING, soft_rows_sum),
        Claim(
            "EXACT",
            "blocks enumerated against Theorem 12",
            test_block_theorems.EXACT,
            blocks_enumerated,
        ),
        Claim("EXACT", "texts added up in two ways", test_texts.EXACT, texts_in_two_ways),
    ]
    for verifier, spec in (
        ("chain", "band:price=1"),
        ("chain", "cactus:delta=0.3"),
        ("block", "band:price=1"),
    ):
        about = f"law of one step, {verifier}, {spec}"
        found.append(
            Claim("EXACT", about, test_band_theorems.EXACT / 1e3, law_of_a_step(verifier, spec))
        )
    for dtype, name in DTYPES.items():
        tolerance = arguments.ROW_SUM_TOLERANCE[dtype]
        about = f"|Σ − 1| of a softmax, V = 151,936, {name}"
        found.append(Claim("ROW_SUM_TOLERANCE", about, tolerance, softmax_sums(dtype), DOOR))
    return found


def measured(seeds: int) -> list[dict[str, object]]:
    """Return a row a tolerance: the worst error of ``seeds`` seeds, and the margin."""
    rows = []
    for claim in claims():
        worst = max(claim.error(seed) for seed in range(seeds))
        margin = claim.tolerance / worst if worst > 0 else math.inf
        rows.append(
            {
                "tolerance": claim.name,
                "bounds": claim.bounds,
                "value": f"{claim.tolerance:g}",
                "worst": f"{worst:.2g}",
                "margin": f"{margin:.3g}",
                "at least": f"{claim.least:g}",
            }
        )
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.margins", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(options.seeds)
    text = io.StringIO()
    text.write(f"# command: python -m tests.margins --seeds {options.seeds}\n")
    text.write(f"# torch: {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(options.out, text.getvalue().encode())
    return int(any(float(str(row["margin"])) < float(str(row["at least"])) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
