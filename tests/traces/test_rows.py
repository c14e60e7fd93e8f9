"""A pooled audit is the mean of the audits of its rows, with errors that count texts."""

from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Cycle, SavedRows, Trace, save_trace
from cactus_theory.traces import rows as pooled_audits
from cactus_theory.traces.rows import pooled_audit, row_pairs
from tests.amounts import amount
from tests.rows import pair
from tests.traces.conftest import VOCAB

# what float32 log-probabilities leave of float64 rows
STORED = 1e-6
EXACT = 1e-12
EXAMPLE = Path(__file__).parents[2] / "simulations" / "data" / "trace"
POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "mixture:alpha=0.3", "typical")


@pytest.mark.parametrize("spec", POLICIES)
def test_the_means_are_those_of_the_audit(spec):
    q, p = pair(30, 8, seed=5)
    found = pooled_audit(spec, SavedRows.of(q, p), divergence="reverse_kl")
    seen = ct.audit(ct.policy(spec), q, p, divergence="reverse_kl")
    spent = seen.divergences["reverse_kl"]
    for own, rows in ((found.acceptance, seen.acceptance), (found.divergence, spent)):
        if not torch.isfinite(rows).all():
            assert own.value == np.inf
            continue
        assert own.value == pytest.approx(float(rows.mean()), abs=EXACT)
        error = float(rows.std() / np.sqrt(30))
        assert own.standard_error == pytest.approx(error, rel=1e-9, abs=EXACT)
    assert found.share.value == pytest.approx(
        float(seen.acceptance.sum() / seen.optimum_acceptance.sum()), abs=EXACT
    )
    budget = ct.policy(spec).declares.budget
    assert found.held == (None if budget is None else int(seen.within.sum()))
    assert (found.rows, found.reference) == (30, "reverse_kl")


def test_parts_of_the_rows_change_nothing(monkeypatch):
    rows = SavedRows.of(*pair(30, 8, seed=5))
    whole = pooled_audit("cactus:delta=0.1", rows)
    monkeypatch.setattr(pooled_audits, "ENTRIES", 3 * 8)
    done: list[int] = []
    parts = pooled_audit("cactus:delta=0.1", rows, on_rows=done.append)
    assert done == list(range(3, 31, 3))
    assert parts.acceptance.value == pytest.approx(whole.acceptance.value, abs=EXACT)
    assert parts.held == whole.held


def test_a_trace_and_its_saved_rows_have_the_same_means_and_other_errors():
    trace = Trace.open(EXAMPLE)
    saved = SavedRows.of(*trace.rows())
    for spec in POLICIES[: amount(1, 3)]:
        one, other = pooled_audit(spec, trace), pooled_audit(spec, saved)
        assert one.rows == other.rows == len(saved)
        assert one.acceptance.value == pytest.approx(other.acceptance.value, abs=EXACT)
        assert one.divergence.value == pytest.approx(other.divergence.value, abs=EXACT)
        assert len(one.acceptance.left_out) == trace.texts < len(other.acceptance.left_out)
    assert pooled_audit("speculative", EXAMPLE).rows == len(saved)


def test_rows_of_a_trace_keep_their_texts(tmp_path, ragged):
    trace = save_trace(
        tmp_path / "t", ragged, vocab_size=VOCAB, num_draft_tokens=3, dtype="float32"
    )
    found: dict[int, list[torch.Tensor]] = {}
    for text, q, _ in row_pairs(trace, entries=1):
        for number, row in zip(text.tolist(), q, strict=True):
            found.setdefault(number, []).append(row)
    for number, cycles in enumerate(ragged):
        own = [row for cycle in cycles if cycle.draft_probs is not None
               for row in cycle.target_probs[:-1]]  # fmt: skip
        assert len(own) == len(found[number])
        ordered = torch.stack(sorted(own, key=lambda row: row.tolist()))
        logged = torch.stack(sorted(found[number], key=lambda row: row.tolist()))
        torch.testing.assert_close(logged, ordered, rtol=0, atol=STORED)


def test_a_trace_of_deterministic_drafts_is_refused(tmp_path):
    rows = torch.full((2, VOCAB), 1 / VOCAB, dtype=torch.float64)
    cycle = Cycle(0, 0, torch.tensor([1]), rows, None)
    trace = save_trace(tmp_path / "t", [[cycle]], vocab_size=VOCAB, num_draft_tokens=1)
    with pytest.raises(ValueError, match="source: must hold draft rows"):
        pooled_audit("speculative", trace)
