"""What is timed, on clocks of our own."""

import pytest
import torch

from cactus_theory.tuning import measure


def test_verification_is_timed_against_another_policys(trace, monkeypatch) -> None:
    """By a clock that the policies move: one's verification takes three ticks, the other's one."""
    now, moves = [0.0], {"speculative": 1.0, "band": 3.0}

    class Counted:
        def verify(self, assigned, q, draft, accept, draw):
            assert q.dtype == torch.float32 and draft.token_ids.shape[1] <= 3
            now[0] += moves[assigned.policies[0].name]

    monkeypatch.setattr(measure, "find_verifier", lambda name: Counted())
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    times = measure.verification_times(trace, ("band:price=1", "speculative"), "block", 3)
    assert times == pytest.approx(3.0)
