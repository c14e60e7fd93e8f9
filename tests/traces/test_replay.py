"""A replay is the average of verification over coins and drafts, and of real decodes.

Means over rows are those of the audits of each; both have errors that count texts.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Cycle, SavedRows, Trace, log_trace, replay, save_trace
from cactus_theory.traces import rows as rows_of_policies
from cactus_theory.traces.rows import row_means, row_pairs
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from tests.amounts import amount
from tests.rows import pair
from tests.traces.conftest import VOCAB, rows_of

# a test of a mean is this many standard errors wide: it fails by chance once in 3.5 million
SIGMAS = 5.1
# what float32 log-probabilities leave of float64 rows, on sums of a few tokens
STORED = 1e-6
EXACT = 1e-12
POLICIES = ["speculative", "band:price=1", "cactus:delta=0.1", "mixture:alpha=0.3"]
BOTH = ["chain", "block"]
AUDITED = (*POLICIES, "typical")
EXAMPLE = Path(__file__).parents[2] / "simulations" / "data" / "trace"
END = 2


@pytest.mark.parametrize("ends", [(), (END,), (3,)], ids=["endless", "ends", "ends at once"])
@pytest.mark.parametrize("verifier", BOTH)
def test_a_replay_adds_up_the_laws_of_its_cycles(tmp_path, ragged, verifier, ends) -> None:
    """Cycles of any length, some deterministic; nothing counts that is drafted after an end."""
    made = {"vocab_size": VOCAB, "num_draft_tokens": 3, "eos_token_ids": ends}
    trace = save_trace(tmp_path / "t", ragged, **made)
    judge, ahead = find_verifier(verifier), ct.policy("band:price=1")  # along deterministic drafts
    for most, rule in ((3, ct.policy("mixture:alpha=0.3")), (1, ahead), (3, ahead)):
        found = replay(trace, rule, judge, num_draft_tokens=most, divergences=("kl", "reverse_kl"))
        tokens, accepted, spent = np.zeros((3, trace.texts))
        reached, accepted_at = np.zeros((2, most, trace.texts))
        for cycle in trace:
            ids = cycle.draft_token_ids[:most]
            tokens[cycle.text] += 1
            p = None if cycle.draft_probs is None else cycle.draft_probs[None, :most]
            draft, q = Draft(ids[None], [len(ids)], p), cycle.target_probs[: len(ids) + 1]
            law = judge.law(Assignment((rule,)), q[None], draft) if len(ids) else None
            for place, token in enumerate(ids.tolist()):
                kl = ct.divergence("kl").value(law.emitted[0, place], q[place])
                spent[cycle.text] += float(law.alive[0, place] * kl)
                accepted[cycle.text] += float(law.alive[0, place + 1])
                reached[place, cycle.text] += float(law.alive[0, place])
                accepted_at[place, cycle.text] += float(law.alive[0, place + 1])
                if token in ends:
                    break
                tokens[cycle.text] += float(law.alive[0, place + 1])
        np.testing.assert_allclose(found.tokens, tokens, rtol=EXACT)
        np.testing.assert_allclose(found.accepted_at.sum(0), accepted, rtol=EXACT)
        seen = reached.sum(1) > 0
        by_position = np.array([own.value for own in found.acceptance_by_position])[seen]
        np.testing.assert_allclose(
            by_position, accepted_at.sum(1)[seen] / reached.sum(1)[seen], EXACT
        )
        np.testing.assert_allclose(found.spent["kl"], spent, rtol=EXACT, atol=EXACT)
        assert set(found.spent) == {"kl", "reverse_kl"} and found.num_draft_tokens == most


def test_chunks_do_not_matter(tmp_path: Path, ragged, monkeypatch) -> None:
    from cactus_theory.traces import replays

    trace = save_trace(tmp_path / "t", ragged, vocab_size=VOCAB, num_draft_tokens=3)
    whole = replay(trace, "band:price=1", "block")
    monkeypatch.setattr(replays, "ENTRIES", 1)
    seen: list[int] = []
    single = replay(trace, "band:price=1", "block", on_cycles=seen.append)
    assert seen == list(range(1, len(trace) + 1))
    np.testing.assert_allclose(single.tokens, whole.tokens, rtol=EXACT)
    np.testing.assert_allclose(single.spent["kl"], whole.spent["kl"], rtol=EXACT)


TEXTS, LENGTH = amount(16, 100), 30
STARTS = [[1 + text % 20, 3] for text in range(TEXTS)]


@pytest.fixture(scope="module")
def logged(tiny, tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("tiny") / "t"
    options = {"num_draft_tokens": 4, "max_new_tokens": LENGTH, "dtype": "float32"}
    return log_trace(*tiny, STARTS, folder, **options)


def test_replay_is_what_the_logged_decode_did_on_average(logged: Trace, tmp_path: Path) -> None:
    """A cycle's tokens minus their expectation given its rows are a martingale."""
    cycles: list[list[Cycle]] = [[] for _ in range(logged.texts)]
    for cycle in logged:
        cycles[cycle.text].append(cycle)
    known = [own[:-1] for own in cycles]  # how many tokens the last one gave is not logged
    trace = save_trace(tmp_path / "t", known, vocab_size=24, num_draft_tokens=4)
    given = np.array([own[-1].position for own in cycles])
    expected = replay(trace, "speculative")
    off = given - expected.tokens
    bound = SIGMAS * math.sqrt((off**2).sum())
    assert abs(off.sum()) < bound
    assert abs((off + expected.cycles).sum()) > bound  # a token a call more or less is seen


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [*((policy, verifier) for policy in POLICIES for verifier in BOTH), ("typical", "chain")],
)
def test_one_drafted_token_averaged_over_its_row_is_what_an_audit_says(
    tmp_path: Path, policy: str, verifier: str
) -> None:
    source = torch.Generator().manual_seed(1)
    q, p = rows_of(source, 4, VOCAB), rows_of(source, 4, VOCAB)
    every = [
        [Cycle(0, 0, torch.tensor([n]), q[[row, row]], p[row : row + 1])]
        for row in range(4)
        for n in range(VOCAB)
    ]
    trace = save_trace(tmp_path / "t", every, vocab_size=VOCAB, num_draft_tokens=1)
    found = replay(trace, policy, verifier)
    tokens = found.tokens.reshape(4, VOCAB)
    report = ct.audit(ct.policy(policy), q, p)
    by_token = (tokens * p.numpy()).sum(-1)
    np.testing.assert_allclose(by_token, 1 + report.acceptance, rtol=STORED)
    spent = found.spent["kl"].reshape(4, VOCAB)
    np.testing.assert_allclose(spent, report.divergences["kl"][:, None].expand(4, VOCAB), STORED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "bandd"}, "bandd"),
        ({"verifier": "forest"}, "verifier: must be one of"),
        ({"verifier": "block", "policy": "typical"}, "needs a policy with a row of its own"),
        ({"num_draft_tokens": 4}, "num_draft_tokens: must be at most the 3 logged; got 4"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: must be an integer of at least 1"),
        ({"divergences": ("kll",)}, "kll"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, ragged, changes, said: str) -> None:
    trace = save_trace(tmp_path / "t", ragged, vocab_size=VOCAB, num_draft_tokens=3)
    with pytest.raises(ValueError, match=said):
        replay(**{"trace": trace, "policy": "speculative"} | changes)
    with pytest.raises(ValueError, match="divergence: must be one of kl; got 'reverse_kl'"):
        replay(trace, "speculative").divergence_per_token("reverse_kl")


@pytest.mark.parametrize("spec", AUDITED)
def test_means_over_rows_are_those_of_audits(spec, monkeypatch):
    """In parts of three rows; the errors are those of rows, or of a trace's texts."""
    q, p = pair(30, 8, seed=5)
    monkeypatch.setattr(rows_of_policies, "ENTRIES", 3 * 8)
    kind = ct.divergence("reverse_kl")
    found = row_means(ct.policy(spec), SavedRows.of(q, p), kind, best=True)
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
    trace, kl = Trace.open(EXAMPLE), ct.divergence("kl")
    one, other = (row_means(ct.policy(spec), own, kl)
                  for own in (trace, SavedRows.of(*trace.rows())))  # fmt: skip
    assert one.acceptance.value == pytest.approx(other.acceptance.value, abs=EXACT)
    assert one.divergence.value == pytest.approx(other.divergence.value, abs=EXACT)
    assert len(one.acceptance.left_out) == trace.texts < len(other.acceptance.left_out)


def test_rows_of_a_trace_keep_their_texts(tmp_path, ragged):
    trace = save_trace(tmp_path / "t", ragged, vocab_size=VOCAB, num_draft_tokens=3)
    found: dict[int, list[list[float]]] = {}
    for text, q, _ in row_pairs(trace, entries=1):
        for number, row in zip(text.tolist(), q.tolist(), strict=True):
            found.setdefault(number, []).append(row)
    for number, cycles in enumerate(ragged):
        drawn = [own.target_probs[:-1] for own in cycles if own.draft_probs is not None]
        own = np.array(sorted(torch.cat(drawn).tolist()))
        np.testing.assert_allclose(np.array(sorted(found[number])), own, rtol=0, atol=STORED)


def test_a_trace_of_deterministic_drafts_has_no_rows(tmp_path):
    rows = torch.full((2, VOCAB), 1 / VOCAB, dtype=torch.float64)
    cycle = Cycle(0, 0, torch.tensor([1]), rows, None)
    trace = save_trace(tmp_path / "t", [[cycle]], vocab_size=VOCAB, num_draft_tokens=1)
    with pytest.raises(ValueError, match="must hold draft rows; every draft in it was determ"):
        trace.rows()
