"""The soft band as a policy: knobs, tables of values, and certain drafts to their end."""

import json
import math
from decimal import Decimal, localcontext
from pathlib import Path as File

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding._meter import Meter
from cactus_theory.divergences import divergence
from cactus_theory.optimum.soft import ONE_TOKEN, Worth
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._knobs import ValueTable, read_values
from cactus_theory.policies._records import Path
from cactus_theory.policies.soft_band import SoftBand
from cactus_theory.verify import Assignment, Block, Draft, find_verifier
from tests.amounts import amount, some
from tests.rows import pair, rows

KNOTS = (0.3, 0.6, 1.0)
CHEAP = ((1.0, 1.0, 1.0), (1.9, 1.5, 1.2), (2.5, 1.8, 1.3))
DEAR = ((1.0, 1.0, 1.0), (1.3, 1.3, 1.1), (1.5, 1.4, 1.1))
TABLE = ValueTable("kl", KNOTS, (1.0, 4.0), (CHEAP, DEAR))
# a dozen float64 operations
ROUNDING = 1e-12


@pytest.fixture
def table(tmp_path: File) -> str:
    (tmp_path / "values.json").write_text(json.dumps(TABLE.as_json()))
    return str(tmp_path / "values.json")


def soft(spec: str) -> SoftBand:
    found = ct.policy(f"soft_band:{spec}")
    assert isinstance(found, SoftBand)
    return found


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"price": 0}, r"price: must lie in \(0, inf\]; got 0"),
        ({"price": -1}, r"price: must lie in \(0, inf\]; got -1"),
        ({"price": math.nan}, "price: must lie in .*nan"),
        ({"price": 1, "depth": -1}, "depth: must be at least 0; got -1"),
        ({"price": 1, "divergence": "total_variation"}, "divergence: must be .* smooth generator"),
        ({"price": 1, "divergence": "renyi:a=2"}, "divergence: must be an f-divergence"),
        ({"price": 1, "divergence": "max_divergence"}, "divergence: must be an f-divergence"),
        ({"price": 1, "divergence": "kll"}, "kll"),
        ({"price": 1, "values": "nowhere.json"}, "values: .*nowhere.json: must be a readable file"),
    ],
)
def test_bad_knobs_are_named(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ct.policy("soft_band", **knobs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "must say format 1; got 2"),
        ({"format": True}, "must say format 1; got True"),
        ({"slopes": [[[1, 2, 3]] * 3] * 2}, r"slopes that do not fall.*\(1.0, 2.0, 3.0\)"),
        ({"slopes": [[[1, 0, -1]] * 3] * 2}, "slopes that do not fall"),
        ({"slopes": [[[1, 1]] * 3] * 2}, "one up to each knot"),
        ({"slopes": [[[1, 1, 1]] * 3]}, "as many tables as prices"),
        ({"slopes": [[[1, 1, 1]] * 3, [[1, 1, 1]] * 2]}, "all as long"),
        ({"slopes": [[["x", 1, 1]] * 3] * 2}, "could not convert"),
        ({"knots": [0.6, 0.3, 1.0]}, "knots that do not rise"),
        ({"knots": [0.3, 0.6, 0.9]}, "knots that do not rise from above 0 to 1"),
        ({"prices": [4.0, 1.0]}, "prices that do not rise"),
        ({"prices": [0.0, 1.0]}, "prices that do not rise from above 0"),
        ({"prices": [1.0, math.inf]}, "prices that do not rise"),
        ({"prices": None}, "must hold a table of values"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: File, change: dict, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(TABLE.as_json() | change))
    with pytest.raises(ValueError, match=message) as refused:
        ct.policy("soft_band", price=1, values=str(file))
    assert str(refused.value).startswith("values: ") and str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_table_is_one_line(tmp_path: File) -> None:
    for content in ("{", "{}", "[]", "3"):
        file = tmp_path / f"{len(content)}{ord(content[0])}.json"
        file.write_text(content)
        with pytest.raises(ValueError, match="values: ") as refused:
            ct.policy("soft_band", price=1, values=str(file))
        assert "\n" not in str(refused.value)


def test_values_are_of_one_divergence(table: str) -> None:
    with pytest.raises(ValueError, match="values: must be learned for reverse_kl; .* is for kl"):
        soft(f"price=1,values={table},divergence=reverse_kl")


def test_a_table_is_read_as_it_was_written(table: str) -> None:
    assert read_values(table) == TABLE


def test_a_learned_table_needs_no_file(table: str) -> None:
    rule, read = ct.policy("soft_band", price=2, values=TABLE), soft(f"price=2,values={table}")
    assert rule == read and rule.spec != read.spec == f"soft_band:price=2.0,values={table}"
    assert rule.worths == read.worths  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="values: .learned.: must be a readable file"):
        ct.policy(rule.spec)


def test_a_path_may_hold_what_specs_are_parted_by(table: str) -> None:
    odd = File(table).rename(File(table).with_name("a,b={c}:d.json"))
    rule = ct.policy("soft_band", price=2, values=str(odd))
    assert ct.policy(rule, price=3).values.file == str(odd)  # type: ignore[attr-defined]


def test_a_file_that_was_rewritten_gives_its_new_table(table: str) -> None:
    old, new = TABLE.as_json(), TABLE.as_json()
    new["prices"][-1] += 1  # as many characters, in the same moment
    before = soft(f"price=1,values={table}")
    File(table).write_text(json.dumps(old))
    assert read_values(table) == TABLE
    File(table).write_text(json.dumps(new))
    assert read_values(table).prices == tuple(new["prices"])
    assert before.values == TABLE  # a policy that was made keeps what it was made of


def test_values_between_prices_and_beyond(table: str) -> None:
    for price, slopes in ((1.0, CHEAP), (0.01, CHEAP), (4.0, DEAR), (100.0, DEAR)):
        found = soft(f"price={price},values={table}").worths
        for own, expected in zip(found, slopes, strict=True):
            assert own.knots == KNOTS and own.slopes == pytest.approx(expected, abs=ROUNDING)
    half = soft(f"price=2,values={table}").worths  # half way in the logarithm
    for own, low, high in zip(half, CHEAP, DEAR, strict=True):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        assert own.slopes == pytest.approx(middle, abs=ROUNDING)


def test_more_tokens_to_follow_than_the_table_has(table: str) -> None:
    rule = soft(f"price=1,values={table}")
    last = Worth(KNOTS, CHEAP[-1])
    assert rule.worth([0, 2, 3, 99]) == [Worth(KNOTS, CHEAP[0]), last, last, last]
    q, p = pair(3, 8, seed=2)
    alive = torch.full((3,), 0.7, dtype=torch.float64)
    found = rule.target_in_block(q, p, Path(alive, torch.tensor([2, 2, 2])))
    assert found.equal(rule.target_in_block(q, p, Path(alive, torch.tensor([9, 9, 9]))))
    other = rule.target_in_block(q, p, Path(alive, torch.tensor([1, 1, 1])))
    assert float((found - other).abs().max()) > 1e-3


def test_an_infinite_price_is_lossless(table: str) -> None:
    q, p = pair(3, 8, seed=2)
    for spec in ("price=inf", f"price=inf,values={table}", "price=inf,divergence=reverse_kl"):
        rule = soft(spec)
        assert rule.target(q, p).equal(q) and rule.worths == (ONE_TOKEN,)
        ids = torch.tensor([[0, 1]] * 3)
        law = find_verifier("block").law(
            Assignment((rule,)), q[None], Draft(ids[:1], [2], p[None, :2])
        )
        assert torch.allclose(law.emitted[0], q[:2], atol=ROUNDING)
        assert rule.certain_path(q[:, :2], torch.tensor([2, 2, 2])) is None


def test_a_single_row_stands_at_the_root_with_depth_tokens_to_follow(table: str) -> None:
    q, p = pair(4, 8, seed=3)
    root = torch.ones(4, dtype=torch.float64)
    laws = []
    for depth in (0, 1, 2):
        rule = soft(f"price=1,values={table},depth={depth}")
        laws.append(rule.target(q, p))
        left = torch.full((4,), depth)
        assert laws[-1].equal(rule.target_in_block(q, p, Path(root, left)))
        assert torch.allclose(ct.emitted_law(rule, q, p), laws[-1], atol=ROUNDING)
        found = ct.audit(rule, q, p)
        kept = torch.minimum(p, laws[-1]).sum(-1)
        assert torch.allclose(found.acceptance, kept, atol=ROUNDING)
    assert torch.allclose(laws[0], ct.policy("band:price=1").target(q, p), atol=1e-9)  # type: ignore[attr-defined]
    assert all(float((own - laws[0]).abs().max()) > 1e-3 for own in laws[1:])


def test_it_is_rebuilt_from_its_spec(table: str) -> None:
    for spec in (
        "price=1.0",
        f"price=0.7,values={table},depth=2",
        "price=0.25,divergence=alpha:a=0.5,ahead=False",
    ):
        rule = soft(spec)
        assert ct.policy(rule.spec) == rule and rule.spec == f"soft_band:{spec}"


def certain(width: int, seed: int, vocab: int = 3):
    """Return rows (1, K + 1, V), drafted ids (1, K) and q of the drafted tokens."""
    q = rows(1, width + 1, vocab, seed=seed)
    ids = torch.randint(vocab, (1, width), generator=torch.Generator().manual_seed(seed))
    return q, ids, q[:, :width].gather(-1, ids[..., None])[..., 0]


def value_of(rule: ct.Policy, q, ids, price: float) -> float:
    law = find_verifier("block").law(Assignment((rule,)), q, Draft(ids, [ids.shape[1]], None))
    tokens = 1 + float(law.alive[0, 1:].sum())
    spent = divergence("kl").value(law.emitted[0], q[0, :-1])
    return tokens - price * float((law.alive[0, :-1] * spent).sum())


@pytest.mark.parametrize("width", range(1, 6))
@pytest.mark.parametrize("price", some((0.3, 1.0, 4.0), 2))
def test_a_certain_draft_has_the_gibbs_law(width: int, price: float) -> None:
    """Compare with ν ln E_q e^{N/ν} for N tokens of the block, the best there is."""
    for seed in range(amount(2, 20)):
        q, ids, q_n = certain(width, seed)
        mean, alive = 0.0, 1.0
        for place, own in enumerate(q_n[0].tolist(), 1):
            mean, alive = mean + alive * (1 - own) * math.exp(place / price), alive * own
        best = price * math.log(mean + alive * math.exp((width + 1) / price))
        assert value_of(soft(f"price={price}"), q, ids, price) == pytest.approx(best, abs=ROUNDING)
        plain = value_of(soft(f"price={price},ahead=false"), q, ids, price)
        assert plain == pytest.approx(best, abs=ROUNDING) if width == 1 else plain < best


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
def test_certain_drafts_at_the_ends_of_numbers(price: float) -> None:
    cases = [[1e-300, 0.3, 1.0], [1.0, 1e-300, 1e-300], [0.0, 0.5, 1.0], [1e-12, 0.0, 1 - 1e-12]]
    q_n = torch.tensor(cases, dtype=torch.float64)
    found = soft(f"price={price}").certain_path(q_n, torch.tensor([3] * 4))
    assert found is not None
    for own, case in zip(found.tolist(), cases, strict=True):
        # 1/ν of 1000 is subtracted from logarithms of that size
        assert own == pytest.approx(by_decimals(case, price), rel=1e-9, abs=1e-300)


def test_tokens_beyond_a_short_draft_are_not_read() -> None:
    q_n = rows(2, 4, seed=1)
    rule, counts = soft("price=0.7"), torch.tensor([2, 0])
    found = rule.certain_path(q_n, counts)
    changed = q_n.clone()
    changed[0, 2:], changed[1] = 0.99, 0.01
    again = rule.certain_path(changed, counts)
    assert found is not None and again is not None
    assert found[0, :2].equal(again[0, :2])
    assert found[0, :2].tolist() == pytest.approx(by_decimals(q_n[0, :2].tolist(), 0.7))


def test_looking_ahead_is_the_band_for_one_token_and_more_for_several() -> None:
    q, ids, q_n = certain(1, 4)
    rule = soft("price=0.7")
    raised = rule.certain_path(q_n, torch.tensor([1]))
    assert raised is not None
    band = ct.policy("band:price=0.7")
    h = band.target(q[:, 0], one_hot(ids[:, 0], q[:, 0]))  # type: ignore[attr-defined]
    assert float(raised[0, 0]) == pytest.approx(float(h[0, ids[0, 0]]), abs=ROUNDING)
    _, _, q_n = certain(3, 4)
    three = rule.certain_path(q_n, torch.tensor([3]))
    alone = [rule.certain_path(q_n[:, own : own + 1], torch.tensor([1])) for own in range(3)]
    assert three is not None and all(own is not None for own in alone)
    excess = [float(three[0, own] - alone[own][0, 0]) for own in range(3)]  # type: ignore[index]
    assert excess[0] > 1e-3 and excess[1] > 1e-3 and excess[2] == pytest.approx(0, abs=ROUNDING)


def test_only_kl_looks_ahead() -> None:
    _, _, q_n = certain(2, 1)
    for spec in ("price=1,ahead=false", "price=1,divergence=reverse_kl", "price=inf"):
        assert soft(spec).certain_path(q_n, torch.tensor([2])) is None


class Watched(Block):
    """A block verifier that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list = []

    def verify(self, assigned, target_probs, draft, accept, draw):
        verdict = super().verify(assigned, target_probs, draft, accept, draw)
        self.seen.append((target_probs.clone(), draft, verdict))
        return verdict


@pytest.mark.parametrize("spec", ["price=0.7", "price=0.7,ahead=false"])
def test_the_meter_of_a_greedy_drafter(spec: str) -> None:
    pytest.importorskip("transformers")
    from cactus_theory.decoding import ModelDrafter, generate
    from tests.decoding.conftest import disturbed, random_llama

    target, watched = random_llama(), Watched()
    result = generate(
        target, ModelDrafter(disturbed(target), greedy=True), torch.tensor([[1, 5, 9]]),
        policy=f"soft_band:{spec}", num_draft_tokens=3, max_new_tokens=24, verifier=watched,
    )  # fmt: skip
    kl, spent, accepted = divergence("kl"), [], 0
    for q, draft, verdict in watched.seen:
        count, kept = draft.lengths[0], int(verdict.num_accepted[0])
        assert draft.probs is None
        accepted += kept
        q_n = [float(q[0, place, draft.token_ids[0, place]]) for place in range(count)]
        ahead, alive = by_decimals(q_n, 0.7), 1.0
        for place in range(min(kept + 1, count)):
            n = int(draft.token_ids[0, place])
            if "ahead" in spec:  # the band of p/P: P h_n = min(1, …) where a token is worth one
                path = Path(torch.tensor([alive], dtype=torch.float64), torch.tensor([0]))
                row = one_hot(torch.tensor([n]), q[0, :1])
                h = soft(spec).target_in_block(q[:, place], row, path)
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
    """Mix rows of certain drafts, which know what follows, with others, and two policies."""
    q, p = pair(4, 5, seed=6)
    rules = soft("price=0.7"), ct.policy("band:price=2")
    ids = torch.tensor([1, 2, 0, 3])
    p[:2] = one_hot(ids[:2], q[:2])
    choice = torch.tensor([0, 1, 0, 1])
    nothing = math.nan
    raised = torch.tensor([0.8, nothing, nothing, nothing], dtype=torch.float64)
    alive = torch.tensor([0.9, 0.8, 0.7, 1.0], dtype=torch.float64)
    path = Path(alive, torch.tensor([1, 0, 1, 0]), raised)
    meter = Meter(rules, "kl", "block")
    meter.add(q, p, choice, path)
    first = q[0] * 0.2 / (1 - q[0, 1])
    first[1] = 0.8
    plain = rules[0].target_in_block(q[2:3], p[2:3], Path(alive[2:3], torch.tensor([1])))
    band = rules[1].emitted(q[[1, 3]], p[[1, 3]])
    h = torch.stack([first, band[0], plain[0], band[1]])
    spent = divergence("kl").value(h, q)
    assert meter.sums()[1] == pytest.approx(float(spent.sum()), abs=ROUNDING)


def test_a_certain_token_an_ulp_above_one_stays_certain() -> None:
    above = torch.tensor([[0.6, 1 + 2.0**-52, 0.3]], dtype=torch.float64)
    counts = torch.tensor([3])
    policy = ct.policy("soft_band:price=0.5")
    raised, exact = (policy.certain_path(q, counts) for q in (above, above.clamp(max=1)))
    assert raised.equal(exact) and raised[0, 1] == 1
