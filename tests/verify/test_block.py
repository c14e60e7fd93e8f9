"""A block on a CPU equals the dense formulas under the same coins, and its edges are right."""

import math
from dataclasses import replace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import Policy
from cactus_theory.policies.policy import PathState, one_hot
from cactus_theory.policies.tilt import tilt_of
from cactus_theory.verify import Draft, find_verifier
from cactus_theory.verify.on_device import block_on_device
from tests.amounts import amount, some
from tests.rows import KINDS, pair
from tests.rules import RULES
from tests.verify.blocks import LAST_COIN, Case, assert_equal, dense, one, random_case

SPECS = (
    "speculative",
    "band:price=1",
    "band:price=0.8,divergence=pearson_chi2",
    "band:price=0.8,divergence=reverse_kl",
    "band:price=0.4,divergence=jensen_shannon",
    "band:delta=0.05",
    "band:delta=0.02,divergence=reverse_kl",
    "cactus:delta=0.1",
    "mixture:alpha=0.3",
    "lenience:lenience=0.5",
    "band:price=1,per_row=True",
    "band:price=0.8,divergence=pearson_chi2,per_row=True",
    "band:price=0.8,divergence=reverse_kl,per_row=True",
    "band:price=0.4,divergence=jensen_shannon,per_row=True",
    "band:price=0.3,divergence=renyi:a=0.5",
    "band:price=0",
    "band:price=inf",
    "band:price=0.5,head=0.3,hold=1",
    "band:price=0.4,divergence=squared_hellinger,floor=0+2",
    "band:price=0.4,floor=0+2,head=0.4",
)
# fewer of the wide ones in the plain suite
WIDE = [(vocab, spec) for vocab in (40, 9000) for spec in SPECS]
ROUNDING = 1e-12


def seeds(vocab: int) -> range:
    return range(amount(1, 3) if vocab > 1000 else amount(2, 20))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("vocab", "spec"), [*((3, spec) for spec in SPECS), *some(WIDE, 6)])
def test_equals_the_dense_formulas(vocab: int, spec: str, deterministic: bool) -> None:
    """Masses of inner nodes have P in them, where a deterministic path looked ahead, too."""
    assigned = one(spec)
    ends = set()
    for seed in seeds(vocab):
        case = random_case(vocab, seed)
        if deterministic:
            case = replace(case, draft=replace(case.draft, probs=None))
        verdict = assert_equal(assigned, case)
        looks_ahead = deterministic and assigned.policies[0].look_ahead is not None
        nodes = [node for row in range(len(case.q)) for node in verdict.nodes(row)]
        assert all(math.isnan(node.raised) != (looks_ahead and node.drafted) for node in nodes)
        ends |= set(verdict.num_accepted.tolist())
    assert 0 in ends and (max(ends) > 0 or deterministic)


def coins(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.accept, case.draw


@pytest.mark.parametrize("spec", some(SPECS, 4))
def test_the_verdict_on_a_device_is_the_dense_one(spec: str) -> None:
    """Run what a device runs on the CPU; a coin that equals its value does not pass."""
    assigned = one(spec)
    for seed in seeds(3):
        case = random_case(3, seed)
        walk, accepted, last = dense(assigned, case)
        found = block_on_device(assigned, case.q, case.draft, *coins(case))
        assert found.num_accepted.equal(accepted) and found.last.equal(last)
        at_border = block_on_device(assigned, case.q, case.draft, walk.value[:, 1:], case.draw)
        assert at_border.num_accepted.tolist() == [0] * len(last)


BOUNDED = [
    own
    for own, rule in RULES.items()
    if type(rule).bounds is not Policy.bounds
    and type(rule).target is not Policy.target
    and not tilt_of(rule)
]


@pytest.mark.parametrize("kinds", some([(a, b) for a in KINDS for b in KINDS], 4))
@pytest.mark.parametrize("spec", some(BOUNDED, 12))
def test_bounds_from_entries_hold(spec: str, kinds: tuple[str, str]) -> None:
    rule = ct.policy(spec)
    count = amount(20, 200)
    q, p = pair(count, 4, seed=3, kinds=kinds)
    p[0] = one_hot(torch.tensor([2]), q)[0]
    source = torch.Generator().manual_seed(1)
    alive = torch.rand(count, generator=source, dtype=torch.float64).clamp(min=1e-6)
    alive[: count // 2] = 1.0
    h = rule.target(q, p, PathState(alive))
    assert h is not None
    assert bool((h <= rule.highest * (1 + 1e-9) * q + 1e-14)[q > 0].all())
    if rule.between:  # what h leaves is no more than what q leaves
        most = (alive[:, None] * q - p).clamp(min=0.0)
        assert bool(((alive[:, None] * h - p) <= most + 1e-14).all())
    on = p > 0
    low, high = (bound[on] for bound in rule.bounds(q, p))
    ratio, reached = (h / p)[on], alive[:, None].expand_as(p)[on]
    tiny = p.new_tensor(1e-300)
    if getattr(rule, "head", 0.0):  # h of all rows together sums to 1 to the last few digits
        tiny = 1e-14 / p[on]
    assert bool((ratio <= high * (1 + 1e-9) + tiny).all())
    if rule.name == "band":  # from a ratio of 1 on it does not matter by how much
        low, ratio = ((reached * own).clamp(max=1.0) for own in (low, ratio))
    assert bool((low * (1 - 1e-9) <= ratio + tiny).all())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("spec", ["speculative", "band:price=1", "cactus:delta=0.1"])
@pytest.mark.parametrize("name", ["chain", "block"])
def test_a_draft_of_no_tokens(name: str, spec: str, deterministic: bool) -> None:
    q = random_case(3, 0).q[:, :1]
    ids, empty = torch.zeros(5, 0, dtype=torch.int64), torch.zeros(5, 0, dtype=torch.float64)
    draft = Draft(ids, [0] * 5, None if deterministic else q[:, :0])
    draw = torch.linspace(0, LAST_COIN, 5, dtype=torch.float64)
    law = find_verifier(name).law(one(spec), q, draft)
    assert law.stop.equal(torch.ones(5, 1, dtype=torch.float64)) and law.alive.equal(law.stop)
    assert torch.allclose(law.last, q, atol=ROUNDING) and law.emitted.shape == (5, 0, 3)
    verdict = find_verifier(name).verify(one(spec), q, draft, empty, draw)
    assert verdict.num_accepted.tolist() == [0] * 5
    assert verdict.output_token_ids.shape == (5, 1)
    above = q[:, 0].cumsum(-1)[torch.arange(5), verdict.last]
    mass = q[torch.arange(5), 0, verdict.last]
    assert bool(((above > draw) & (above - mass <= draw + ROUNDING)).all())


def verified(spec: str, q, p, ids, accept, draw=0.0, dtype=torch.float64):
    """Return (accepted, last) of one path, rows not validated."""
    rows = [None if own is None else torch.tensor([own], dtype=dtype) for own in (q, p)]
    given = torch.tensor([accept], dtype=torch.float64), torch.tensor([draw], dtype=torch.float64)
    assert rows[0] is not None
    verdict = ct.verify_block(
        ct.policy(spec), rows[0], rows[1], torch.tensor([ids]), coins=given, validate=False
    )
    return int(verdict.num_accepted), int(verdict.last)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Refuse by rounding alone: p is above q by an ulp, so that nothing of (q − p)₊ is left."""
    q, p = [[0.5, 0.25, 0.25]] * 2, [[0.5 + 2.0**-53, 0.25, 0.25]]
    for draw, token in ((0.0, 0), (0.6, 1), (LAST_COIN, 2)):
        assert verified("speculative", q, p, [0], [LAST_COIN], draw) == (0, token)


def test_the_verdict_on_an_empty_residual_is_to_go_back() -> None:
    """A path with P < 1 never ends where nothing of (P q − p)₊ is left, not even by a coin of 0."""
    q, p = [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]
    for spec in ("speculative", "band:price=inf"):
        assert verified(spec, q, p, [0, 0], [0.0, 0.9]) == (0, 1)


@pytest.mark.parametrize("spec", SPECS)
def test_tokens_the_draft_excludes(spec: str) -> None:
    """Draft tokens of p = 0, which rounding may do: accepted iff the row h has them."""
    p = [[0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]
    bonus, some_row = [0.0, 0.0, 1.0], [0.1, 0.8, 0.1]
    refused = [0.5, 0.0, 0.5]
    for coin in (0.0, LAST_COIN):
        assert verified(spec, [some_row, some_row, bonus], p, [1, 1], [coin] * 2) == (2, 2)
        assert verified(spec, [refused, some_row, bonus], p, [1, 1], [coin] * 2)[0] == 0
        assert verified(spec, [refused, refused, bonus], p, [1, 1], [coin] * 2)[0] == 0


@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
def test_a_token_whose_draft_row_is_nan_ends_no_round_with_a_bonus(verify):
    q = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    p = torch.tensor([[[0.5, 0.5], [math.nan, math.nan]]])
    coins = torch.zeros(1, 2), torch.zeros(1)
    with pytest.raises(ValueError, match="rows that decide a token"):
        verify(ct.policy("speculative"), q, p, torch.tensor([[0, 1]]), coins=coins, validate=False)
