"""The band in blocks, deterministic drafts to their end: THEORY.md, Theorems 14 and 26."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding.meter import Meter
from cactus_theory.divergences import read_divergence
from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.policies.band import Band
from cactus_theory.policies.policy import PathState, one_hot
from cactus_theory.verify import Assignment, Block, Draft, find_verifier
from cactus_theory.verify.node import Node
from tests.amounts import amount, some
from tests.rows import pair, rows, two_tokens

# a dozen float64 operations
ROUNDING = 1e-12


def band(spec: str) -> Band:
    found = ct.policy(f"band:{spec}")
    assert isinstance(found, Band)
    return found


def deterministic(width: int, seed: int, vocab: int = 3):
    """Return rows (1, K + 1, V), drafted ids (1, K) and q of the drafted tokens."""
    q = rows(1, width + 1, vocab, seed=seed)
    ids = torch.randint(vocab, (1, width), generator=torch.Generator().manual_seed(seed))
    return q, ids, q[:, :width].gather(-1, ids[..., None])[..., 0]


def value_of(rule: ct.Policy, q, ids, price: float) -> float:
    law = find_verifier("block").law(Assignment((rule,)), q, Draft(ids, [ids.shape[1]], None))
    tokens = 1 + float(law.alive[0, 1:].sum())
    spent = read_divergence("kl").value(law.emitted[0], q[0, :-1])
    return tokens - price * float((law.alive[0, :-1] * spent).sum())


@pytest.mark.parametrize("width", range(1, 6))
@pytest.mark.parametrize("price", some((0.3, 1.0, 4.0), 2))
def test_a_deterministic_draft_has_the_gibbs_law(width: int, price: float) -> None:
    """Compare with ν ln E_q e^{N/ν} for N tokens of the block, the best there is."""
    for seed in range(amount(2, 20)):
        q, ids, q_n = deterministic(width, seed)
        mean, alive = 0.0, 1.0
        for place, own in enumerate(q_n[0].tolist(), 1):
            mean, alive = mean + alive * (1 - own) * math.exp(place / price), alive * own
        best = price * math.log(mean + alive * math.exp((width + 1) / price))
        assert value_of(band(f"price={price}"), q, ids, price) == pytest.approx(best, abs=ROUNDING)
        plain = value_of(band(f"price={price},per_row=true"), q, ids, price)
        assert plain == pytest.approx(best, abs=ROUNDING) if width == 1 else plain < best


BOXED = ("hold=0", "floor=0+1", "hold=0,floor=1", "head=0.6", "head=0.4,hold=2", "floor=3,head=0.3")


def most_within_boxes(q, ids, spec: str, price: float) -> float:
    """Return the most tokens minus ν times KL of next-token laws in boxes, by a convex program."""
    cvxpy = pytest.importorskip("cvxpy")
    boxes = band(f"price={price},{spec}").boxes
    vocab, reached, value, rules = q.shape[-1], 1.0, 1.0, []
    for row, token in zip(q[0, :-1].numpy(), ids[0].tolist(), strict=True):
        g = cvxpy.Variable(vocab, nonneg=True)
        fixed = [x for x in range(vocab) if x in boxes.held]
        low = [x for x in range(vocab) if x in boxes.floored]
        off = [x for x in range(vocab) if row[x] < boxes.head * row.max()]
        rules += [cvxpy.sum(g) == reached, *(g[x] == reached * row[x] for x in fixed),
                  *(g[x] >= reached * row[x] for x in low),
                  *(g[x] <= reached * row[x] for x in off)]  # fmt: skip
        value = value + g[token] - price * cvxpy.sum(cvxpy.rel_entr(g, reached * row))
        reached = g[token]
    return cvxpy.Problem(cvxpy.Maximize(value), rules).solve(solver="CLARABEL")


@pytest.mark.parametrize("spec", some(BOXED, 3))
def test_looking_ahead_within_boxes_is_the_best(spec: str) -> None:
    """Theorem 26: rows that keep tokens' chances, held against a program over whole blocks."""
    for seed in range(amount(4, 20)):
        q, ids, _ = deterministic(1 + seed % 3, seed, vocab=4)
        price = (0.3, 1.0, 4.0)[seed % 3]
        found = value_of(band(f"price={price},{spec}"), q, ids, price)
        assert found == pytest.approx(most_within_boxes(q, ids, spec, price), abs=1e-7)


def by_decimals(q_n: list[float], price: float) -> list[float]:
    """Return q z/(1 − q + q z), z backwards from e^{1/ν}, with more digits than needed."""
    with localcontext() as digits:
        digits.prec, digits.Emax, digits.Emin = 700, 10**6, -(10**6)
        unit = (1 / Decimal(price)).exp()
        follows, found = unit, []
        for own in map(Decimal, reversed(q_n)):
            found.append(float(own * follows / (1 - own + own * follows)))
            follows = unit * (1 - own + own * follows)
        return found[::-1]


@pytest.mark.parametrize("price", [1e-3, 1.0, 1e3])
def test_deterministic_drafts_at_the_ends_of_numbers(price: float) -> None:
    cases = [[1e-300, 0.3, 1.0], [1.0, 1e-300, 1e-300], [0.0, 0.5, 1.0], [1e-12, 0.0, 1 - 1e-12]]
    q_n = torch.tensor(cases, dtype=torch.float64)
    found = LookAhead(price).path(*two_tokens(q_n), torch.tensor([3] * 4))
    for own, case in zip(found.tolist(), cases, strict=True):
        # 1/ν of 1000 is subtracted from logarithms of that size
        assert own == pytest.approx(by_decimals(case, price), rel=1e-9, abs=1e-300)


def test_tokens_beyond_a_short_draft_are_not_read() -> None:
    q_n = rows(2, 4, seed=1)
    ahead, counts = LookAhead(0.7), torch.tensor([2, 0])
    found = ahead.path(*two_tokens(q_n), counts)
    changed = q_n.clone()
    changed[0, 2:], changed[1] = 0.99, 0.01
    again = ahead.path(*two_tokens(changed), counts)
    assert found[0, :2].equal(again[0, :2])
    assert found[0, :2].tolist() == pytest.approx(by_decimals(q_n[0, :2].tolist(), 0.7))


def test_only_kl_looks_ahead() -> None:
    assert band("price=0.7").look_ahead == LookAhead(0.7)
    for spec in ("price=1,per_row=true", "price=1,divergence=reverse_kl", "price=inf"):
        assert band(spec).look_ahead is None


class Watched(Block):
    """A block verifier that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list = []

    def verify(self, assigned, target_probs, draft, accept, draw):
        verdict = super().verify(assigned, target_probs, draft, accept, draw)
        self.seen.append((target_probs.clone(), draft, verdict))
        return verdict


@pytest.mark.parametrize("spec", ["price=0.7", "price=0.7,per_row=true"])
def test_the_meter_of_a_greedy_drafter(spec: str) -> None:
    pytest.importorskip("transformers")
    from cactus_theory.decoding import ModelDrafter, generate
    from tests.decoding.conftest import disturbed, random_llama

    target, watched = random_llama(), Watched()
    result = generate(
        target, ModelDrafter(disturbed(target), greedy=True), torch.tensor([[1, 5, 9]]),
        policy=f"band:{spec}", num_draft_tokens=3, max_new_tokens=24, verifier=watched,
    )  # fmt: skip
    kl, spent, accepted = read_divergence("kl"), [], 0
    for q, draft, verdict in watched.seen:
        count, passed = draft.lengths[0], int(verdict.num_accepted[0])
        assert draft.probs is None
        accepted += passed
        q_n = [float(q[0, place, draft.token_ids[0, place]]) for place in range(count)]
        ahead, alive = by_decimals(q_n, 0.7), 1.0
        for place in range(min(passed + 1, count)):
            n = int(draft.token_ids[0, place])
            if "per_row" in spec:
                path = PathState(torch.tensor([alive], dtype=torch.float64))
                row = one_hot(torch.tensor([n]), q[0, :1])
                h = band(spec).target(q[:, place], row, path)
            else:
                h = q[:, place] * (1 - ahead[place]) / (1 - q_n[place])
                h[0, n] = ahead[place]
            alive = min(1.0, alive * float(h[0, n]))
            spent.append(float(kl.value(h, q[:, place])[0]))
    assert accepted == result.num_accepted
    assert result.reading.rows == len(spent) > 10
    assert (
        result.reading.emitted_divergence == pytest.approx(sum(spent), rel=1e-9)
        and sum(spent) > 0.1
    )


def test_the_meter_tells_policies_and_drafts_apart() -> None:
    """Mix rows of deterministic drafts, which know what follows, with others, and two policies."""
    q, p = pair(4, 5, seed=6)
    rules = band("price=0.7"), band("price=2,per_row=true")
    ids = torch.tensor([1, 2, 0, 3])
    p[:2] = one_hot(ids[:2], q[:2])
    alive = torch.tensor([0.9, 0.8, 0.7, 1.0], dtype=torch.float64)
    paths = zip(alive.tolist(), (0.8, math.nan, math.nan, math.nan), strict=True)
    meter = Meter()
    meter.add(
        [
            Node(Block(), rules[row % 2], q[row].numpy(), p[row].numpy(), int(ids[row]), *path)
            for row, path in enumerate(paths)
        ]
    )
    first = q[0] * 0.2 / (1 - q[0, 1])
    first[1] = 0.8
    plain = rules[0].target(q[2:3], p[2:3], PathState(alive[2:3]))
    second = rules[1].emitted(q[[1, 3]], p[[1, 3]])
    h = torch.stack([first, second[0], plain[0], second[1]])
    spent = read_divergence("kl").value(h, q)
    assert meter.sums()[1] == pytest.approx(float(spent.sum()), abs=ROUNDING)


def test_a_deterministic_token_an_ulp_above_one_stays_deterministic() -> None:
    above = torch.tensor([[0.6, 1 + 2.0**-52, 0.3]], dtype=torch.float64)
    counts = torch.tensor([3])
    raised, exact = (
        LookAhead(0.5).path(*two_tokens(q), counts) for q in (above, above.clamp(max=1))
    )
    assert raised.equal(exact) and raised[0, 1] == 1
