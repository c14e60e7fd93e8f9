"""Faults against what they are by hand, and runs of real decodes with them."""

import itertools
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cactus_theory.policies import read_policy
from cactus_theory.policies.reshaped import Truncated
from cactus_theory.traces.expect import expectations
from cactus_theory.traces.faults import (
    FAULTS,
    Rows,
    visible_faults,
    with_faults,
)
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from tests.amounts import thorough
from tests.traces.conftest import rows_of

EXACT = 1e-12
BY_NAME = {own.name: own for own in FAULTS}
LOSSLESS = Assignment((read_policy("speculative"),))
HEAT = 0.5
CHAIN = find_verifier("chain")


def drafted(seed: int, width: int = 3) -> tuple[torch.Tensor, Draft]:
    source = torch.Generator().manual_seed(seed)
    q, p = rows_of(source, 2, width + 1, 5), rows_of(source, 2, width, 5)
    ids = torch.randint(5, (2, width), generator=source)
    return q, Draft(ids, [width] * 2, p)


def alive(name: str, q: torch.Tensor, draft: Draft, judge: str = "chain") -> torch.Tensor:
    verifier = BY_NAME[name].planted(find_verifier(judge), HEAT)
    return verifier.law(LOSSLESS, q, draft).alive


def kept(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return 1 and the products of these rows' entries at the drafted tokens."""
    own = rows.gather(-1, ids[..., None])[..., 0].clamp(max=1.0)
    return torch.cat([torch.ones(2, 1, dtype=torch.float64), own.cumprod(-1)], -1)


def raw(rows: torch.Tensor) -> torch.Tensor:
    hot = rows**HEAT
    return hot / hot.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(3))
def test_faults_are_what_they_say(seed: int) -> None:
    q, draft = drafted(seed)
    p, ids = draft.probs, draft.token_ids
    assert p is not None
    for name, ratios in {
        "no-draft-law": q[:, :-1],
        "rows-late": q[:, 1:] / p,
        "rows-early": q[:, [0, 0, 1]] / p,
        "law-before-temperature": q[:, :-1] / raw(p),
        "target-temperature": raw(q)[:, :-1] / p,
        "target-top-k": q[:, :-1] / p,  # which cuts nothing from five tokens
        "coin-zero": torch.ones_like(p),
    }.items():
        assert torch.allclose(alive(name, q, draft), kept(ratios, ids), atol=EXACT, rtol=0), name
    chain = find_verifier("chain").law(LOSSLESS, q, draft).alive
    assert torch.equal(alive("block-by-token", q, draft, "block"), chain)


def test_a_coin_of_0_keeps_no_token_that_is_impossible() -> None:
    q, draft = drafted(0)
    q[0, 1] = torch.tensor([0.25, 0.0, 0.25, 0.25, 0.25])
    draft.token_ids[0, 1] = 1
    assert alive("coin-zero", q, draft).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def other_laws(q: torch.Tensor, p: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by fault the law that tokens come from, and how probably each one is kept."""
    hot, cold = raw(p), p ** (HEAT / 0.3) / (p ** (HEAT / 0.3)).sum(-1, keepdim=True)
    target = q ** (HEAT / 0.3) / (q ** (HEAT / 0.3)).sum(-1, keepdim=True)
    likeliest = torch.eye(5, dtype=torch.float64)[p.argmax(-1)]
    return {
        "draft-temperature": (hot, q[:, :-1] / hot),
        "both-temperature 0.3": (cold, target[:, :-1] / cold),
        "both-temperature 1": (hot, raw(q)[:, :-1] / hot),
        "greedy-drafts": (likeliest, q[:, :-1]),
    }


@pytest.mark.parametrize("name", list(other_laws(*[torch.ones(1, 2, 5), torch.ones(1, 1, 5)])))
def test_tokens_of_another_law_are_weighted(name: str) -> None:
    """Over drafts from the logged rows the mean is that over the faulty ones, enumerated."""
    q, draft = drafted(1, 2)
    p = draft.probs
    assert p is not None
    own, ratios = other_laws(q, p)[name]
    total, wanted = torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for path in itertools.product(range(5), repeat=2):
        ids = torch.tensor([path] * 2)
        chance, faulty = (rows[:, 0, path[0]] * rows[:, 1, path[1]] for rows in (p, own))
        total += chance[:, None] * alive(name, q, replace(draft, token_ids=ids))
        wanted += faulty[:, None] * kept(ratios, ids)
    assert torch.allclose(total, wanted, atol=EXACT, rtol=0)


def test_the_targets_rows_are_cut_to_their_mass() -> None:
    q, draft = drafted(0)
    assert draft.probs is not None
    q[0, 0] = torch.tensor([0.02, 0.5, 0.02, 0.41, 0.05])
    cut = torch.tensor([0.0, 0.5, 0.0, 0.41, 0.05]) / 0.96  # 0.91 is less than 0.95, 0.96 is enough
    shown = alive("target-top-p", q, draft)[0, 1]
    token = int(draft.token_ids[0, 0])
    assert shown == pytest.approx(min(1.0, float(cut[token] / draft.probs[0, 0, token])))


@pytest.mark.parametrize("name", ["law-before-temperature", "no-draft-law", "law-before-top-k"])
def test_blocks_of_tokens_that_are_not_drawn_as_reported(name: str, monkeypatch) -> None:
    """Over all drafts ``alive`` has the mean of what the verdicts' own probabilities add up to."""
    monkeypatch.setattr("cactus_theory.traces.faults.USUAL_TOP_K", Truncated(top_k=3))
    q, draft = drafted(3, 2)
    p = draft.probs
    assert p is not None
    shown = BY_NAME[name].rows(Rows(q, p, HEAT))
    own = p if shown.sampled is None else shown.sampled
    total, wanted = torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for path in itertools.product(range(5), repeat=2):
        ids = torch.tensor([path] * 2)
        chance, faulty = (rows[:, 0, path[0]] * rows[:, 1, path[1]] for rows in (p, own))
        total += chance[:, None] * alive(name, q, replace(draft, token_ids=ids), "block")
        law = find_verifier("block").law(LOSSLESS, q, Draft(ids, [2] * 2, shown.p))
        wanted += faulty[:, None] * law.stop.flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(total, wanted, atol=EXACT, rtol=0)


def test_a_verifier_with_a_fault_decides_as_its_law_says() -> None:
    q, draft = drafted(2)
    law = alive("rows-late", q, draft)
    judge = BY_NAME["rows-late"].planted(find_verifier("chain"), HEAT)
    coins = torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64)
    verdict = judge.verify(LOSSLESS, q, draft, coins, torch.tensor([0.5, 0.5]))
    ratios = law[:, 1:] / law[:, :-1]
    wanted = (coins < ratios).long().cumprod(-1).sum(-1)
    assert verdict.num_accepted.tolist() == wanted.tolist()


def test_where_faults_can_show() -> None:
    names = {own.name for own in visible_faults(_trace(1.0, 0), find_verifier("chain"))}
    assert "no-draft-law" not in names and "rows-late" in names and "block-by-token" not in names
    names = {own.name for own in visible_faults(_trace(0.5, 7), find_verifier("block"))}
    assert names == set(BY_NAME)
    names = {own.kind for own in visible_faults(_trace(0.0, 0), find_verifier("chain"))}
    assert not names & {"greedy-drafts", "both-temperature"}


def _trace(temperature: float, rows: int):
    header = SimpleNamespace(temperature=temperature)
    return SimpleNamespace(header=header, manifest=SimpleNamespace(total=lambda name: rows))


def test_the_noise_floor(tiny) -> None:
    """Float64 rounds to 1e-16 of logits of order 10; the same passes are the same bits."""
    target, prompts = tiny[0], [[1, 2, 3], [4, 5]]
    floor = noise_floor(target, prompts, width=4, max_new_tokens=12)
    assert 0 <= floor.per_token < 1e-14 and floor.rows == 24 and floor.dtype == "float64"
    assert noise_floor(target, prompts, width=1, max_new_tokens=6).per_token == 0
    single = noise_floor(deepcopy(target).float(), prompts, width=4, max_new_tokens=12)
    assert floor.per_token < single.per_token < 1e-6 and single.dtype == "float32"
    for wrong in ({"width": 0}, {"temperature": -1}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            noise_floor(target, prompts, **wrong)
    with pytest.raises(ValueError, match="prompts_ids"):
        noise_floor(target, [[]])


@thorough
def test_faults_are_listed_from_real_decodes(tmp_path) -> None:
    """Of 100 runs of at most 2,000 rounds 95 list the fault; healthy ones are quiet."""
    from cactus_theory.base.prompts import prompts_of
    from cactus_theory.decoding import load_pair
    from tests.test_docs import ROOT
    from tests.traces.planted import Decodes, Pool

    def named_of(pool: Pool, runs: int = 100) -> tuple[Counter[str], int]:
        """Return how often each fault is named in runs of at most 2,000 rounds, and the alarms."""
        found = pool.runs(runs, healthy, rows)
        names = Counter(name for own in found for name in own.not_excluded)
        return names, sum(own.alarm for own in found)

    pair = ROOT / "simulations" / "pair"
    models = load_pair(pair / "target", pair / "draft")
    prompts = prompts_of(ROOT / "simulations" / "data" / "stories.jsonl")[:12]
    ids = [models.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    decodes = Decodes(models.target, models.draft, ids, 8, 48, 1.0, CHAIN, tmp_path)
    logged, _ = decodes.logged(None, 6, 0)
    rows = expectations(logged, "speculative", with_faults(logged, CHAIN))
    healthy = rows.pop("")
    assert named_of(Pool.of(*decodes.logged(None, 6, 10_000)), 200)[1] <= 10
    for name in ("no-draft-law", "rows-late", "coin-zero", "greedy-drafts"):
        found, _ = named_of(Pool.of(*decodes.logged(BY_NAME[name], 3, 20_000)))
        assert found[name] >= 95, (name, found)
