"""The step on the host and the step on a device decide alike; mixed rules decide as alone."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.verify import _step

SPECS = ["speculative", "cactus:delta=0.2", "band:delta=0.1", "typical"]


def rows(batch, width, vocab=12, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, width + 1, vocab, generator=source, dtype=torch.float64)
    noise = torch.randn(batch, width, vocab, generator=source, dtype=torch.float64)
    q, p = logits.softmax(-1), (logits[:, :width] + noise).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).reshape(batch, width)
    lengths = torch.randint(0, width + 1, (batch,), generator=source)
    coins = torch.rand(batch, width + 1, generator=source, dtype=torch.float64)
    return q, p, ids, lengths, coins[:, :width], coins[:, width]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("certain", [False, True])
def test_host_and_device_paths_agree(spec, certain):
    q, p, ids, lengths, accept, draw = rows(40, 5)
    p = None if certain else p
    rule = ct.policy(spec)
    phi, recover = rule.decide(q[:, :5], p, ids)
    kept = (accept < phi) & (torch.arange(5) < lengths[:, None])
    counts, last = _step.on_host(recover, kept, q, lengths.tolist(), draw)
    output, accepted = _step._on_device(recover, kept, q, ids, lengths, draw)
    assert counts == accepted.tolist()
    assert torch.equal(last, output.gather(1, accepted[:, None])[:, 0])
    assert ((output >= 0).sum(-1) == accepted + 1).all()
    assert 0 < int((accepted < lengths).sum()) < 40
    host, again = _step.settle((phi, recover), q, ids, lengths, accept, draw)
    assert torch.equal(host, output) and torch.equal(again, accepted)
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        own = rule.decide(q[one, :5], None if p is None else p[one], ids[one])
        drafted = lengths[one].tolist()
        assert _step.on_host(own[1], kept[one], q[one], drafted, draw[one]) == ([count], last[row])


def test_mixed_rules_decide_as_each_alone():
    q, p, ids, _, accept, draw = rows(30, 4, seed=2)
    rules = tuple(ct.policy(spec) for spec in SPECS)
    choice = torch.randint(0, 4, (30, 4), generator=torch.Generator().manual_seed(3))
    phi, recover = _step.decide_mixed(rules, choice, q[:, :4], p, ids)
    at = torch.arange(30), torch.arange(30) % 4
    mixed = recover(at)
    for number, rule in enumerate(rules):
        own_phi, own = rule.decide(q[:, :4], p, ids)
        assert torch.equal(phi[choice == number], own_phi[choice == number])
        mine = choice[at] == number
        assert torch.equal(mixed[mine], own(at)[mine])
        assert mine.any()
    output, counts = _step.settle((phi, recover), q, ids, None, accept, draw)
    assert ((output >= 0).sum(-1) == counts + 1).all()


def test_recovery_on_demand_is_the_recovery_law():
    q, p, ids, *_ = rows(30, 1, seed=4)
    for spec in SPECS:
        rule = ct.policy(spec)
        for own_p in (p, None):
            phi, recover = rule.decide(q[:, :1], own_p, ids)
            refusable = phi[:, 0] < 1
            lazy = recover((torch.arange(30), torch.zeros(30, dtype=torch.int64)))
            lazy = lazy / lazy.sum(-1, keepdim=True)
            law = rule.recovery(q[:, 0], None if own_p is None else p[:, 0], ids[:, 0])
            assert (lazy - law)[refusable].abs().max() < 1e-12
            assert refusable.any()


class Counted(type(ct.policy("band:delta=0.1"))):
    """A band that counts the rows it is asked about."""

    asked = 0

    def decide(self, q, p, n):
        type(self).asked += n.numel()
        return super().decide(q, p, n)


@pytest.mark.parametrize("certain", [False, True])
def test_a_rule_is_asked_only_where_lossless_sampling_would_refuse(certain):
    q, p, ids, lengths, accept, draw = rows(60, 5, seed=6)
    p = None if certain else p
    Counted.asked = 0
    rule = Counted(delta=0.1)
    lazy = _step.decide(rule, q[:, :5], p, ids, accept, lengths.tolist())
    asked = Counted.asked
    eager = ct.policy("band:delta=0.1").decide(q[:, :5], p, ids)
    assert torch.equal(
        _step.settle(lazy, q, ids, lengths, accept, draw)[0],
        _step.settle(eager, q, ids, lengths, accept, draw)[0],
    )
    assert 0 < asked < int(lengths.sum()) / 2
