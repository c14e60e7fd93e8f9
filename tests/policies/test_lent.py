"""Rules work on copies: one that writes into its rows is named, and nobody else's rows change."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import FixedTarget

Q, P = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]


@ct.rule(budget="kl <= 0 emitted")
def steals(q, p, n):
    q[:] = p
    return min(1, q[n] / p[n])


@ct.rule
def through_the_address(q, p, n):
    class Door:
        __array_interface__ = q.__array_interface__ | {"data": (q.ctypes.data, False)}

    np.asarray(Door())[:] = p
    return min(1, q[n] / p[n])


@ct.rule(vectorised=True)
def token_ids(q, p, n):
    n[:] = 0
    return torch.ones(len(n))


@ct.rule(vectorised=True)
def through_numpy(q, p, n):
    q.numpy()[:] = p.numpy()
    return torch.ones(len(n))


@ct.rule(vectorised=True)
def in_place(q, p, n):
    return q.copy_(p).gather(-1, n[..., None])[..., 0]


@ct.rule
def row_in_place(q, p):
    q[:] = p
    return q


class Target(FixedTarget):
    def target(self, q, p, path=None):
        return q.copy_(p)


class Hasty(type(ct.policy("speculative:tilt=0"))):
    name = "hasty"

    def row(self, q, p, alive=1.0):
        q[:] = p


class Borrowed:
    def acceptance(self, q, p, n):
        q.numpy()[:] = p.numpy()
        return torch.ones(n.shape).double()

    def residual(self, q, p, n):
        return q


class Mixed(Borrowed, ct.Policy):
    name = "mixed"


WRITERS = {
    "steals": steals,
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


class Doubled(ct.PerProposal):
    name, delta = "doubled", 1.0

    def raised(self, q_n):
        return 2 * q_n


def test_a_class_that_writes_nothing_judges_rows_made_in_inference_mode() -> None:
    with torch.inference_mode():
        q = torch.tensor([[Q, Q]], dtype=torch.float64)
        p, coins = torch.tensor([[P]]).double(), (torch.tensor([[0.9]]).double(), torch.ones(1) / 2)
        for verify in (ct.verify_chain, ct.verify_block):
            verify(Doubled(), q, p, torch.tensor([[2]]), coins=coins, validate=False)


@pytest.mark.parametrize("verify", [ct.verify_chain, ct.verify_block])
def test_rows_solved_by_a_class_of_ones_own_are_copies_too(verify) -> None:
    q, p = torch.from_numpy(np.array([[Q, Q]])), torch.from_numpy(np.array([[P]]))
    coins = torch.tensor([[0.9]]).double(), torch.tensor([0.5]).double()
    with pytest.raises(ValueError, match="^hasty, row: must not write into its rows"):
        verify(Hasty(), q, p, torch.tensor([[2]]), coins=coins, validate=False)
    assert q.tolist() == [[Q, Q]] and p.tolist() == [[P]]


def test_a_rule_may_change_its_own_copy_and_use_its_memory_again() -> None:
    answer = torch.zeros(3)

    @ct.rule
    def copies(q, p, n):
        q = q.copy()
        q[q < 0.25] = 0
        return min(1, q[n] / q.sum() / p[n])

    @ct.rule(vectorised=True)
    def again(q, p, n):
        return answer.copy_((q / p).gather(-1, n[:, None])[:, 0].clamp(max=1))

    q, p = (torch.tensor(row).double() for row in (Q, P))
    every = torch.arange(3)
    assert copies.acceptance(q, p, every).tolist() == pytest.approx([1, 1, 0])
    expected = ct.policy("speculative").acceptance(q, p, every)
    torch.testing.assert_close(again.acceptance(q, p, every), expected, rtol=1e-6, atol=0)


def test_rows_with_nan_are_not_taken_for_changed_ones() -> None:
    q = torch.tensor([float("nan"), 0.5, 0.5]).double()
    for vectorised in (True, False):
        function = lambda q, p, n: 0.5 + 0 * n  # noqa: E731
        rule = ct.rule(function, vectorised=vectorised)
        assert rule.acceptance(q, q, torch.tensor([1])).tolist() == [0.5]
