"""The contract: data in, data out; claims steer nothing; host and device decide alike."""

import dataclasses

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import Declaration
from cactus_theory.verify import Assignment, Chain, Draft, find_verifier, verifiers
from cactus_theory.verify.chain import chain_on_device
from cactus_theory.verify.node import nodes_of_rows
from cactus_theory.verify.on_device import block_on_device
from tests.rules import RULES
from tests.rules import SPECS as EVERY

SPECS = [
    "speculative",
    "cactus:delta=0.2",
    "band:delta=0.1",
    "band:price=2",
    "typical",
    "fuzzy:threshold=0.1",
]


def rows(batch, width, vocab=12, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, width + 1, vocab, generator=source, dtype=torch.float64)
    noise = torch.randn(batch, width, vocab, generator=source, dtype=torch.float64)
    q, p = logits.softmax(-1), (logits[:, :width] + noise).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).reshape(batch, width)
    lengths = torch.randint(0, width + 1, (batch,), generator=source)
    coins = torch.rand(batch, width + 1, generator=source, dtype=torch.float64)
    return q, p, ids, lengths, coins[:, :width], coins[:, width]


def on_host(*given):
    verdict = Chain().verify(*given)
    return verdict.num_accepted, verdict.last


def check_alike(spec, q, draft, accept, draw):
    """Return how many tokens host and device accept, both."""
    given = Assignment((ct.policy(spec),)), q, draft, accept, draw
    host = on_host(*given)
    assert all(map(torch.equal, host, chain_on_device(*given)))
    return host[0]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_host_and_device_decide_alike(spec, deterministic):
    q, p, ids, lengths, accept, draw = rows(400, 5)
    draft = Draft(ids, lengths, None if deterministic else p)
    assert 0 < int((check_alike(spec, q, draft, accept, draw) < lengths).sum()) < 400


def test_rows_in_half_precision_are_replaced_by_what_the_draft_lacks():
    q, p, ids, lengths, *coins = rows(100, 3)
    for spec in ("speculative", "cactus:delta=0.1"):
        check_alike(spec, q.bfloat16(), Draft(ids, lengths, p.bfloat16()), *coins)


@pytest.mark.parametrize("at", ["drafted", "whole"])
def test_a_token_without_a_law_ends_its_text_on_host_and_device(at):
    q, p, ids, lengths, accept, draw = rows(100, 4, seed=3)
    p[:, 2] = torch.nan if at == "whole" else p[:, 2].scatter(-1, ids[:, 2:3], torch.nan)
    for spec in SPECS:
        check_alike(spec, q, Draft(ids, lengths, p), accept, draw)


@pytest.mark.parametrize("deterministic", [False, True])
def test_policies_of_one_batch_judge_their_texts_as_if_alone(deterministic):
    """Chains and blocks, on host and device; of these policies one alone looks ahead."""
    q, p, ids, lengths, accept, draw = rows(90, 4, seed=9)
    draft = Draft(ids, lengths, None if deterministic else p)
    policies = tuple(map(ct.policy, ("cactus:delta=0.2", "band:price=2", "fuzzy:threshold=0.1")))
    turn = torch.arange(90) % 3

    def decided(assigned):
        given = assigned, q, draft, accept, draw
        blocks = find_verifier("block").verify(*given), block_on_device(*given)
        ends = [part for block in blocks for part in (block.num_accepted, block.last)]
        return [*on_host(*given), *chain_on_device(*given), *ends], [blocks[1].raised]

    together, raised = decided(Assignment(policies, turn[:, None].expand(ids.shape)))
    for number, policy in enumerate(policies):
        alone, own_raised = decided(Assignment((policy,)))
        own = turn == number
        assert all(part[own].equal(other[own]) for part, other in zip(together, alone, strict=True))
        for part, other in zip(raised, own_raised, strict=True):
            assert (part is None) == (not deterministic)
            if deterministic:
                assert part[own].isnan().all() if other is None else part[own].equal(other[own])


UNIFORM = np.full(4, 0.25)
BY_ROWS = [spec for spec in EVERY if RULES[spec].row(UNIFORM, UNIFORM) is not None]


def test_a_long_row_is_drawn_from_by_its_own_coin():
    q, p, _, _, _, draw = rows(5, 1, vocab=8192, seed=16)
    coins = torch.full((5, 1), 1 - 2**-53, dtype=torch.float64)
    ids = (p / q[:, :1]).argmax(-1)
    draft = Draft(ids, [1] * 5, p)
    accepted = [check_alike(spec, q, draft, coins, draw) for spec in BY_ROWS]
    assert int((torch.stack(accepted) == 0).sum()) >= 5


@dataclasses.dataclass(frozen=True)
class Boast(type(ct.policy("typical"))):
    """Typical acceptance that claims to be lossless, between p and q, and never slower."""

    @property
    def declares(self):
        return Declaration(
            budget=ct.policy("speculative").declares.budget,
            between=True,
            at_least_speculative=True,
            optimal=True,
        )


def test_a_false_claim_changes_nothing_that_is_emitted():
    honest, boast = ct.policy("typical"), Boast()
    q, p, ids, lengths, accept, draw = rows(200, 5, seed=7)
    draft = Draft(ids, lengths, p)
    found = [
        Chain().verify(Assignment((rule,)), q, draft, accept, draw) for rule in (honest, boast)
    ]
    assert torch.equal(found[0].output_token_ids, found[1].output_token_ids)
    assert torch.equal(ct.emitted_law(honest, q[:, :5], p), ct.emitted_law(boast, q[:, :5], p))


def test_the_meter_looks_instead_of_believing():
    from cactus_theory.decoding.meter import Meter

    q, p, *_ = rows(6, 1)
    meter = Meter()
    meter.add(nodes_of_rows(Chain(), Boast(), q[:, 0], p[:, 0]))
    law = ct.emitted_law(ct.policy("typical"), q[:, 0], p[:, 0])
    expected = float(ct.divergence("kl").value(law, q[:, 0]).sum())
    assert meter.sums()[1] == pytest.approx(expected, rel=1e-12) and expected > 0.1


class Counted(type(ct.policy("band:delta=0.1"))):
    """A band that counts the rows it is asked about."""

    asked = 0

    def row(self, *node):
        type(self).asked += 1
        return super().row(*node)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_policy_is_asked_only_where_lossless_sampling_would_refuse(deterministic):
    q, p, ids, lengths, accept, draw = rows(60, 5, seed=6)
    draft = Draft(ids, lengths, None if deterministic else p)
    Counted.asked = 0
    on_host(Assignment((Counted(delta=0.1),)), q, draft, accept, draw)
    assert 0 < Counted.asked < int(lengths.sum()) / 2


def test_verifiers_are_found_by_name():
    assert "chain" in verifiers() and isinstance(find_verifier("chain"), Chain)
    with pytest.raises(ValueError, match="verifier: must be one of .*chain.*; got 'knot'"):
        find_verifier("knot")
    for spec, said in (
        ("block:k=1,k=2", "k must be given once; got 'block:k=1,k=2'"),
        ("block:coin=1", "block takes no options; got 'coin'"),
    ):
        with pytest.raises(ValueError, match=said):
            find_verifier(spec)
