"""The cap holds on every answer, at every length, and is nearly reached."""

import copy
import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cactus_theory as ct
from cactus_theory.base.tensors import normalised
from cactus_theory.decoding import (
    Between,
    ByPosition,
    Ledger,
    ModelDrafter,
    Siblings,
    generate,
)
from cactus_theory.policies.policy import PathState
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from tests.amounts import amount, some
from tests.decoding.ledger_texts import EXACT, target_of, texts_of
from tests.decoding.test_ragged import padded, prompts
from tests.kits.schedules import assert_schedule_properties
from tests.markov.pair import markov_pair

KL = ct.divergence("kl")
ENDS = (7, 13, 15)
OPTIONS = {"max_new_tokens": 24, "num_draft_tokens": 5, "eos_token_ids": ENDS}
# made-up rounds are booked in another order than the ledger's own sums
ROUNDING = 1e-12
# a charge of one row by itself and of many together: the root of a float64 row is settled to 2e-14
BOOKED = 1e-10


def check_cap(result, caps, bursts):
    """Every prefix of every answer, without a tolerance; return the shares of the caps used."""
    shares = []
    rows = zip(result.token_charges, result.row_lengths, caps, bursts, strict=True)
    for costs, length, cap, burst in rows:
        allowed = cap * torch.arange(1, length + 1, dtype=torch.float64) + burst
        assert bool((costs[:length].cumsum(0) <= allowed).all())
        shares.append(float(costs.sum() / allowed[-1]))
    assert result.reading.emitted_divergence == pytest.approx(
        float(result.token_charges.sum()), abs=ROUNDING * 1e3
    )
    return shares


CASES = [("chain", False), ("block", False), ("chain", True), ("block", True)]


@pytest.mark.parametrize(("verifier", "deterministic"), some(CASES, 3))
def test_no_prefix_of_an_answer_is_over_its_cap(tiny, verifier, deterministic):
    """Rows of a batch with policies, caps and bursts of their own; most end by themselves."""
    caps = [0.02, 0.05, 0.1, 0.3, 0.05, 0.1, 0.02]
    bursts = [0.0, 0.0, 0.0, 0.0, 0.2, 0.05, 0.0]
    specs = ["band:price=0.3", "cactus:delta=1", "band:delta=0.3", "mixture:alpha=0.7"]
    kinds = [ByPosition([(0, "band:price=0.4"), (9, "cactus:delta=0.5")]), *specs, *specs[:2]]
    policies = [Ledger(k, c, burst=b) for k, c, b in zip(kinds, caps, bursts, strict=True)]
    shares, lengths, free = [], set(), 0.0
    for trial in range(amount(2, 20)):
        ids, mask = padded(prompts(seed=trial))
        given = {"attention_mask": mask, "verifier": verifier, "seed": trial, **OPTIONS}
        drafter = ModelDrafter(tiny[1], greedy=deterministic)
        result = generate(tiny[0], drafter, ids, policy=policies, **given)
        shares += check_cap(result, caps, bursts)
        lengths |= set(result.row_lengths)
        free += generate(
            tiny[0], drafter, ids, policy="cactus:delta=1", **given
        ).reading.emitted_divergence
    assert len(lengths) > 4 and free > 1
    assert max(shares) > 0.9 and sum(shares) / len(shares) > 0.4


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("policy", ["cactus:delta=0.5", "band:price=1"])
@pytest.mark.parametrize("cap", [0.0, 1.0])
def test_without_a_cap_to_spend_it_is_lossless_and_with_enough_the_policy(
    tiny, policy, verifier, cap
):
    ids, mask = padded(prompts(seed=1))
    given = {"attention_mask": mask, "verifier": verifier, "seed": 5, **OPTIONS}
    free = generate(*tiny, ids, policy=policy if cap else "speculative", **given)
    capped = generate(*tiny, ids, policy=Ledger(policy, cap, burst=100.0 * cap), **given)
    assert capped.output_token_ids.tolist() == free.output_token_ids.tolist()
    assert cap or not capped.token_charges.any()
    assert capped.reading.emitted_divergence == pytest.approx(
        free.reading.emitted_divergence, rel=1e-9
    )


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_ledger_inside_a_section_spends_nothing_outside(tiny, verifier):
    section = Between("band:price=0.3", opening=[3, (9, 4)], closing=[11, (8,)])
    ids, mask = padded(prompts(seed=4))
    cap = 0.03
    result = generate(
        *tiny, ids, attention_mask=mask, policy=Ledger(section, cap), verifier=verifier,
        num_draft_tokens=5, max_new_tokens=60, seed=2,
    )  # fmt: skip
    check_cap(result, [cap] * len(ids), [0.0] * len(ids))
    rows = zip(ids, mask, result.output_token_ids.tolist(), result.token_charges, strict=True)
    for prompt, shown, new, costs in rows:
        state = section.begin(prompt[shown.bool()].tolist())
        for token, cost in zip(new, costs.tolist(), strict=True):
            assert state.open or cost == 0.0
            state = section.advance(state, [token])
    assert result.reading.emitted_divergence > 0.1


def test_it_looks_at_nothing_that_it_must_not_know():
    for ledger in (
        Ledger("band:price=0.5", 0.05),
        Ledger(Between("cactus:delta=1", opening=[7, (3, 4)], closing=(8, 9)), 0.1, burst=0.3),
    ):
        assert_schedule_properties(ledger, examples=amount(4, 50))


SPECS = (
    "band:price=0.3",
    "band:price=0.3,divergence=reverse_kl",
    "band:price=0.2,divergence=pearson_chi2",
    "band:price=0.3,per_row=True",
    "cactus:delta=0.02",
)
WAYS = [*itertools.product(SPECS, ("block",), (False, True))]
WAYS += some(itertools.product(SPECS, ("chain",), (False, True)), 2)


@pytest.mark.parametrize(("spec", "verifier", "deterministic"), WAYS)
def test_no_text_of_a_tiny_pair_is_over_its_cap(spec, verifier, deterministic):
    """Every draft, coin and end of a round; rows are charged by the verifier's own law."""
    for seed in range(amount(2, 8)):
        pair = markov_pair(2 + seed % 2, seed=seed, distance=2.0, zeros=0.2 * (seed % 2))
        cap, burst, length = (0.02, 0.05, 0.2)[seed % 3], 0.1 * (seed % 2), 4 - seed % 2
        ledger = Ledger(spec, cap, burst=burst)
        texts = texts_of(pair, ledger, length, 3, verifier, deterministic, burst)
        assert texts.law.sum() == pytest.approx(1, abs=EXACT)
        assert 0 < texts.most <= cap * length + burst and texts.rate <= cap
        h, q = texts.law.reshape(-1), target_of(pair, length).reshape(-1)
        assert np.sum(h[h > 0] * np.log(h[h > 0] / q[h > 0])) <= texts.mean + EXACT


def a_round(vocab, width, seed, deterministic):
    """Return every draft of a tree of random rows, (N, K), their chances, and their rows."""
    made = np.random.default_rng(seed)
    rows = {}

    def row_pair(prefix):
        if prefix not in rows:
            logits = 2 * made.normal(size=(2, vocab))
            rows[prefix] = torch.tensor(logits).softmax(-1)
        return rows[prefix]

    for tokens in itertools.product(range(vocab), repeat=width):
        pairs = [row_pair(tokens[:place]) for place in range(width + 1)]
        q, p = torch.stack(pairs, 1)
        greedy = all(int(p[place].argmax()) == token for place, token in enumerate(tokens))
        chance = float(p[torch.arange(width), torch.tensor(tokens)].prod())
        if not deterministic or greedy:
            yield tokens, 1.0 if deterministic else chance, q, p[:width]


@pytest.mark.parametrize(("spec", "verifier", "deterministic"), WAYS)
def test_a_token_has_the_law_that_it_is_charged_for(spec, verifier, deterministic):
    """At every node that is reached: the sum over all drafts below it is P p(u) h_u."""
    judge, width = find_verifier(verifier), 3
    for seed in range(amount(1, 20)):
        ledger, cap = Ledger(spec, 0.1), 0.1
        reached, emitted, row_of = defaultdict(float), defaultdict(float), {}
        for tokens, chance, q, p in a_round(3, width, seed, deterministic):
            draft = Draft(torch.tensor([tokens]), [width], None if deterministic else p[None])
            state = replace(ledger.begin(()), emitted=3, spent=0.1 * (seed % 3))
            choice, nodes = ledger.choose_by_nodes(state, q[None], draft, judge)
            law = judge.law(Assignment(ledger.policies, choice[None]), q[None], draft)
            if verifier == "block":
                alive = q.new_tensor([nodes[place].alive for place in range(width)])
                assert torch.allclose(alive, law.alive[0, :width], rtol=0, atol=EXACT)
            spent = state.spent
            for place in range(width):
                above, goes = tokens[:place], float(law.stop[0, place:].sum())
                h, token = law.emitted[0, place], F.one_hot(torch.tensor(tokens[place]), 3).double()
                row_of.setdefault(above, h)
                assert torch.allclose(h, row_of[above], rtol=0, atol=EXACT)
                reached[above] += chance * goes
                emitted[above] += chance * float(law.stop[0, place]) * law.last[0, place]
                emitted[above] += chance * float(law.stop[0, place + 1 :].sum()) * token
                charge = float(KL.value(h, q[place]))
                assert nodes[place].charge().spent == pytest.approx(charge, abs=EXACT)
                spent += charge
                assert spent <= cap * (4 + place)
        for above, mass in reached.items():
            assert torch.allclose(emitted[above], mass * row_of[above], rtol=0, atol=EXACT)


@pytest.mark.parametrize("spec", ["band:price=2", "band:price=2,divergence=reverse_kl"])
def test_below_a_deterministic_token_it_charges_what_the_walk_emits(spec):
    """Token 0 with P < 1, a deterministic 1 after it, and a sampled 0 below: P is 1 there."""
    first, after = ([0.3, 0.4, 0.3], [0.8, 0.1, 0.1]), ([0.2, 0.7, 0.1], [0.1, 0.1, 0.8])
    q, p = zip(first, after, first, first, first, strict=True)
    q, p = (torch.tensor(rows, dtype=torch.float64)[None] for rows in (q, p))
    ids, parents = torch.tensor([[0, 1, 2, 0]]), torch.tensor([[-1, 0, 0, 1]])
    parts = ids, p[:, :4], parents, ids != 1, ids == 1
    ledger, judge = Ledger(spec, 0.3, burst=0.2), find_verifier("tree")
    state = ledger.begin(())
    choice, nodes = ledger.choose_by_nodes(state, q, Draft(ids, [4], *parts[1:]), judge)
    assert nodes[1].alive < 1 and nodes[2].alive == 1
    tokens, *rest = (part.expand(64, *part.shape[1:]) for part in parts)
    coins = torch.from_numpy(np.random.default_rng(0).random((64, 8))).split(4, 1)
    given = q.expand(64, -1, -1), Draft(tokens, [4] * 64, *rest)
    assigned = Assignment(ledger.policies, choice.expand(64, -1))  # charged by the walk's own P
    verdict, lengths = judge.decide(assigned, *given, *coins), set()
    for row in range(64):
        walked = [0, *(int(place) + 1 for place in verdict.path[row] if place >= 0)]
        for number, node in zip(walked, verdict.nodes(row), strict=True):
            law = judge.emitted(node.policy, *(
                normalised(torch.from_numpy(own))[None] for own in (node.q, node.offers)
            ), PathState(q.new_tensor([node.alive])))  # fmt: skip
            charge = float(KL.value(law, q[:1, number])) if node.drafted else 0.0
            assert nodes[number].charge().spent == pytest.approx(charge, abs=EXACT)
        lengths.add(len(walked))
    assert max(lengths) >= 3


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, 0, 1]])])
def test_a_deterministic_tree_as_wide_as_its_batch_is_judged_by_a_ledger(parents):
    """The last node has nothing drafted after it, and no policy chosen for it."""
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).expand(1, 4, 4)
    draft = Draft(torch.tensor([[0, 1, 2]]), [3], None, parents, torch.zeros(1, 3).bool())
    ledger, judge = Ledger("band:price=0.3", 0.3), find_verifier("tree")
    state = ledger.begin(())
    choice, nodes = ledger.choose_by_nodes(state, q, draft, judge)
    coins = torch.zeros(1, 3).double(), torch.zeros(1, 4).double()
    judge.verify(Assignment(ledger.policies, choice[None]), q, draft, *coins)
    odds = 0.4 / 0.6 * math.exp(1 / ledger.policies[int(choice[0])].price)
    h_n = odds / (1 + odds)  # token 0 rises, the others fall as q does
    charge = h_n * math.log(h_n / 0.4) + (1 - h_n) * math.log((1 - h_n) / 0.6)
    assert nodes[0].charge().spent == pytest.approx(charge, abs=EXACT) and charge > 0.01


class Books(Ledger):
    """Remembers what every text has spent, round by round."""

    def observe(self, state, nodes):
        state = super().observe(state, nodes)
        self.spent.append(state.spent)
        return state


WAYS_OF_ONE = [
    *itertools.product(("chain", "block", "tree"), ("sampled", "deterministic")),
    ("tree", "beside"),
]


@pytest.mark.parametrize(("verifier", "draft"), WAYS_OF_ONE)
def test_the_meter_reads_what_is_in_the_books(tiny, verifier, draft):
    """Of float32 rows, too, where the alive ratio of a verifier differs by their rounding."""
    target, model = (copy.deepcopy(own).float() for own in tiny)
    drafter = ModelDrafter(model, greedy=draft == "deterministic")
    if draft == "beside":
        drafter = Siblings(drafter, 2)
    ledger = Books("band:price=0.3", 0.1)
    for seed in range(amount(2, 10)):
        ledger.spent = []
        result = generate(
            target, drafter, torch.tensor([[1, 5, 9]]), policy=ledger, verifier=verifier,
            num_draft_tokens=5, max_new_tokens=24, seed=seed,
        )  # fmt: skip
        read = float(result.token_charges.sum())
        check_cap(result, [0.1], [0.0])
        assert ledger.spent[-1] == pytest.approx(read, rel=BOOKED)
        assert read > 0.5
