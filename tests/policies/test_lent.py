"""Rules work on copies: one that writes into its rows is named, and nobody else's rows change."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.rules import RULES, of_each

Q, P = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]


@ct.rule(budget="kl <= 0 emitted")
def steals(q, p, n):
    q[:] = p
    return min(1, q[n] / p[n])


@ct.rule
def cleans(q, p, n):
    q[q < 0.25] = 0
    return min(1, q[n] / p[n])


@ct.rule
def divides(q, p, n):
    p /= p.sum()
    return min(1, q[n] / p[n])


@ct.rule
def through_a_hole_of_numpy(q, p, n):
    np.add.at(q, [0], 0.1)
    return min(1, q[n] / p[n])


@ct.rule
def through_the_address(q, p, n):
    class Door:
        __array_interface__ = q.__array_interface__ | {"data": (q.ctypes.data, False)}

    np.asarray(Door())[:] = p
    return min(1, q[n] / p[n])


@ct.rule(arrays="numpy", vectorised=True)
def token_ids(q, p, n):
    n[:] = 0
    return np.ones(len(n))


@ct.rule(arrays="torch")
def through_numpy(q, p, n):
    q.numpy()[:] = p.numpy()
    return 1.0


@ct.rule(vectorised=True)
def in_place(q, p, n):
    return q.copy_(p).gather(-1, n[..., None])[..., 0]


@ct.rule
def row_in_place(q, p):
    q[:] = p
    return q


class Target(ct.FixedTarget):
    def target(self, q, p):
        return q.copy_(p)


class Borrowed:
    def acceptance(self, q, p, n):
        q.numpy()[:] = p.numpy()
        return torch.ones(n.shape).double()

    def recovery(self, q, p, n):
        return q


class Mixed(Borrowed, ct.Policy):
    name = "mixed"


WRITERS = {
    "steals": steals,
    "cleans": cleans,
    "divides": divides,
    "through_a_hole_of_numpy": through_a_hole_of_numpy,
    "through_the_address": through_the_address,
    "token_ids": token_ids,
    "through_numpy": through_numpy,
    "in_place": in_place,
    "row_in_place": row_in_place,
    "Target, target": Target(),
    "mixed, acceptance": Mixed(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_rule_that_writes_is_named_and_changes_nothing(name: str) -> None:
    rule, q, p = WRITERS[name], np.array(Q), np.array(P)
    rows = torch.tensor([[Q, Q]], dtype=torch.float64), torch.tensor([[P]], dtype=torch.float64)
    before = [part.clone() for part in rows]
    coins = torch.tensor([[0.9]]).double(), torch.tensor([0.5]).double()
    ids = torch.tensor([[2]])

    def verified() -> None:
        with torch.inference_mode():
            ct.verify_chain(rule, *rows, ids, coins=coins, validate=False)

    for call in (
        lambda: ct.emitted_law(rule, q, p),
        lambda: ct.audit(rule, q, p),
        lambda: ct.emitted_law(rule, *(row[0, :1] for row in rows)),
        verified,
    ):
        with pytest.raises(ValueError, match=f"^{name}: must not write into its rows"):
            call()
    assert q.tolist() == Q and p.tolist() == P and ids.tolist() == [[2]]
    assert all(map(torch.equal, rows, before))


def test_a_rule_may_change_its_own_copy_and_use_its_memory_again() -> None:
    answer = torch.zeros(())

    @ct.rule
    def copies(q, p, n):
        q = q.copy()
        q[q < 0.25] = 0
        return min(1, q[n] / q.sum() / p[n])

    @ct.rule(arrays="torch")
    def again(q, p, n):
        return answer.copy_((q[n] / p[n]).clamp(max=1))

    q, p = (torch.tensor(row).double() for row in (Q, P))
    every = torch.arange(3)
    assert copies.acceptance(q, p, every).tolist() == pytest.approx([1, 1, 0])
    expected = ct.policy("speculative").acceptance(q, p, every)
    torch.testing.assert_close(again.acceptance(q, p, every), expected, rtol=1e-6, atol=0)


def test_rows_with_nan_are_not_taken_for_changed_ones() -> None:
    q = torch.tensor([float("nan"), 0.5, 0.5]).double()
    for kind in ("numpy", "torch"):
        rule = ct.rule(lambda q, p, n: 0.5, arrays=kind)
        assert rule.acceptance(q, q, torch.tensor([1])).tolist() == [0.5]


def batch() -> tuple[torch.Tensor, ...]:
    """Two texts with two drafted tokens each: rows, drafts, ids and coins, with zeros and ties."""
    source = torch.Generator().manual_seed(1)
    q, p = (torch.rand(2, rows, 6, generator=source).double() for rows in (3, 2))
    q[:, :, 1], p[:, :, 2] = 0, 0
    q, p = (row / row.sum(-1, keepdim=True) for row in (q, p))
    accept, draw = (torch.rand(shape, generator=source).double() for shape in ((2, 3), (2,)))
    return q, p, torch.tensor([[0, 3], [5, 4]]), accept, draw


@pytest.mark.parametrize("spec", of_each(1))
def test_policies_and_verifiers_leave_their_inputs_as_they_are(spec: str) -> None:
    rule, parts = RULES[spec], batch()
    before = [part.clone() for part in parts]
    q, p, ids, accept, draw = parts
    ct.audit(rule, q[:, :2], p)
    rule.acceptance(q[:, :2], p, ids[..., None])
    rule.recovery(q[:, :2], p, ids)
    rule.proposal(q[:, :2], p, ids[..., None])
    rule.decide(q[:, 0], p[:, 0], ids[:, 0], accept[:, 0])
    for verify, coins in ((ct.verify_chain, accept[:, :2]), (ct.verify_block, accept[:, :2])):
        for draft in (p, None):
            try:
                verify(rule, q, draft, ids, coins=(coins, draw), validate=False)
            except ValueError as error:  # a policy that this verifier cannot follow
                assert "verifi" in str(error) or "rule" in str(error)
    assert all(map(torch.equal, parts, before))
