"""Memory used again: the same for one slot, another for each slot, dtype and thread."""

import threading

import torch

from cactus_theory import _scratch
from cactus_theory._scratch import MOST_KEPT, forget, scratch


def test_a_slot_is_the_same_memory_again_in_any_smaller_shape():
    one = scratch("test.a", (4, 6))
    assert one.shape == (4, 6) and one.dtype == torch.float64 and one.is_contiguous()
    assert scratch("test.a", (3, 2)).data_ptr() == one.data_ptr()
    assert scratch("test.a", (24,)).data_ptr() == one.data_ptr()
    larger = scratch("test.a", (5, 6))
    assert larger.shape == (5, 6) and scratch("test.a", (4, 6)).data_ptr() == larger.data_ptr()


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
    monkeypatch.setattr(_scratch, "MOST_KEPT", 64)
    one = scratch("test.large", (9,))
    assert scratch("test.large", (9,)).data_ptr() != one.data_ptr()
    assert MOST_KEPT >= 8 * 151_936


def test_forgetting_gives_new_memory():
    one = scratch("test.a", (8,))
    forget()
    assert scratch("test.a", (8,)).data_ptr() != one.data_ptr()


def test_memory_made_in_inference_mode_may_be_written_later():
    forget()
    with torch.inference_mode():
        scratch("test.a", (8,)).fill_(1.0)
    assert scratch("test.a", (8,)).fill_(2.0).sum() == 16
