"""Memory used again: one slot's for one user at a time, another for each slot and thread."""

import sys
import threading

import pytest
import torch

import cactus_theory as ct
from cactus_theory.base import reused_memory as memory
from cactus_theory.base.reused_memory import MOST_BUFFERS, MOST_KEPT, forget, scratch
from tests.amounts import amount


def test_a_slot_is_the_same_memory_again_in_any_smaller_shape():
    one = scratch("test.a", (4, 6))
    assert one.shape == (4, 6) and one.dtype == torch.float64 and one.is_contiguous()
    place = one.data_ptr()
    del one
    assert scratch("test.a", (3, 2)).data_ptr() == place
    assert scratch("test.a", (48,), torch.float32).data_ptr() == place
    larger = scratch("test.a", (5, 6)).data_ptr()
    assert scratch("test.a", (4, 6)).data_ptr() == larger


def test_memory_that_is_held_by_any_view_is_not_given_to_another():
    forget()
    held = [scratch("test.a", (2, 4)).fill_(0.0).unbind(0)[1].numpy()]
    for number in range(1, MOST_BUFFERS + 2):
        held.append(scratch("test.a", (4,)).fill_(number).numpy())
    assert [own.tolist() for own in held] == [[number] * 4 for number in range(len(held))]
    place = held[0].ctypes.data
    del held[0]
    assert scratch("test.a", (2, 4)).data_ptr() == place - 4 * 8


ROWS = torch.rand(4, 3, 5, 600, generator=torch.Generator().manual_seed(0)).pow(6)
ROWS = ROWS.double() / ROWS.double().sum(-1, keepdim=True)
IDS = torch.arange(12).view(3, 4)
COINS = torch.full((3, 4), 0.9), torch.full((3,), 0.5)


def solved(q, p):
    return ct.optimal_acceptance(q[:, :4], p[:, :4], delta=0.1).target


def chain(q, p):
    return ct.verify_chain(ct.policy("band:price=2"), q, p[:, :4], IDS, coins=COINS)


def block(q, p):
    return ct.verify_block(ct.policy("band:price=1"), q, p[:, :4], IDS, coins=COINS)


def typical(q, p):
    return ct.verify_chain(ct.policy("typical"), q, p[:, :4], IDS, coins=COINS)


@pytest.mark.parametrize("job", [solved, chain, block, typical])
def test_a_solve_in_the_middle_of_another_changes_nothing(job):
    """As a signal handler's: at many lines of the outer solve, the same on other rows."""
    q, p, *other = ROWS
    wanted, lines, nested = job(q, p), 0, 0
    every = amount(500, 7)

    def trace(frame, event, _):
        nonlocal lines, nested
        if "cactus_theory" not in frame.f_code.co_filename:
            return None
        lines += 1
        if lines % every == 0:
            nested += 1
            sys.settrace(None)
            job(*other)
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = job(q, p)
    finally:
        sys.settrace(before)
    found, wanted = (getattr(own, "output_token_ids", own) for own in (found, wanted))
    assert nested and torch.equal(found, wanted)


def test_slots_dtypes_and_threads_do_not_share():
    one = scratch("test.a", (8,)).fill_(1.0)
    scratch("test.b", (8,)).fill_(2.0)
    scratch("test.a", (8,), torch.float32).fill_(3.0)
    worker = threading.Thread(target=lambda: scratch("test.a", (8,)).fill_(4.0))
    worker.start()
    worker.join()
    assert one.tolist() == [1.0] * 8


def test_large_buffers_are_not_kept(monkeypatch):
    forget()
    monkeypatch.setattr(memory, "MOST_KEPT", 64)
    one = scratch("test.large", (9,))
    place = one.data_ptr()
    assert scratch("test.large", (9,)).data_ptr() != place
    assert not memory._kept.buffers
    assert MOST_KEPT >= 8 * 151_936


def test_memory_made_in_inference_mode_may_be_written_later():
    forget()
    with torch.inference_mode():
        scratch("test.a", (8,)).fill_(1.0)
    assert scratch("test.a", (8,)).fill_(2.0).sum() == 16
