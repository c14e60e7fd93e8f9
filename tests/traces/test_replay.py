"""A replay is the average of verification over coins and drafts, and of real decodes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Schedule, generate
from cactus_theory.traces import Cycle, SavedRows, Trace, log_trace, replay, save_trace
from cactus_theory.traces.estimate import ratio_of_sums
from cactus_theory.traces.rows import start_of_block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import VerdictLaw, Verifier, find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from tests.amounts import amount
from tests.traces.conftest import VOCAB, rows_of

# a test of a mean is this many standard errors wide: it fails by chance once in 3.5 million
SIGMAS = 5.1
# what float32 log-probabilities leave of float64 rows, on sums of a few tokens
STORED = 1e-6
EXACT = 1e-12
POLICIES = ["speculative", "band:price=1", "cactus:delta=0.1", "mixture:alpha=0.3"]
BOTH = ["chain", "block"]
SMALL, PLACES, END = 3, 2, 2


class Tree:
    """All drafts of two tokens out of three, a row of q and p at every prefix."""

    def __init__(self, folder: Path, ends: tuple[int, ...]) -> None:
        source = torch.Generator().manual_seed(3)
        self.q = [rows_of(source, SMALL**depth, SMALL).float() for depth in range(PLACES + 1)]
        self.p = [rows_of(source, SMALL**depth, SMALL).float() for depth in range(PLACES)]
        self.paths = [(a, b) for a in range(SMALL) for b in range(SMALL)]
        made = {"vocab_size": SMALL, "num_draft_tokens": PLACES, "eos_token_ids": ends}
        self.trace = save_trace(folder, ([self.cycle(path)] for path in self.paths), **made)
        self.cycles = list(self.trace)  # rows as they are read again
        p = np.array([[float(c.draft_probs[i, t]) for i, t in enumerate(c.draft_token_ids)]
                      for c in self.cycles])  # fmt: skip
        self.mass = p.prod(-1)

    def cycle(self, path: tuple[int, int]) -> Cycle:
        at = [0, path[0], path[0] * SMALL + path[1]]
        q = torch.stack([rows[place] for rows, place in zip(self.q, at, strict=True)])
        p = torch.stack([rows[place] for rows, place in zip(self.p, at, strict=False)])
        return Cycle(0, 0, torch.tensor(path), q, p)

    def sampled(self, rule, verifier: str, runs: int, ends: tuple[int, ...]):
        """Return tokens, accepted tokens and metered KL of many drafts and coins."""
        source = torch.Generator().manual_seed(8)
        mass = torch.from_numpy(self.mass)
        which = torch.multinomial(mass, runs, replacement=True, generator=source)
        q = torch.stack([cycle.target_probs for cycle in self.cycles])[which]
        p = torch.stack([cycle.draft_probs for cycle in self.cycles])[which]
        ids = torch.tensor(self.paths)[which]
        judge = ct.verify_chain if verifier == "chain" else ct.verify_block
        verdict = judge(rule, q, p, ids, generator=source)
        laws = {path: self.spent(rule, verifier, place) for place, path in enumerate(self.paths)}
        found = []
        for output, path in zip(verdict.rows(), ids.tolist(), strict=True):
            stop = next((i + 1 for i, t in enumerate(output) if t in ends), len(output))
            accepted = min(len(output) - 1, stop)
            charged = sum(laws[tuple(path)][: min(stop, PLACES)])
            found.append((stop, accepted, charged))
        return np.array(found)

    def spent(self, rule, verifier: str, place: int) -> list[float]:
        cycle = self.cycles[place]
        h = find_verifier(verifier).emitted(
            rule, cycle.target_probs[:-1], cycle.draft_probs, start_of_block(PLACES)
        )
        return ct.divergence("kl").value(h, cycle.target_probs[:-1]).tolist()


@pytest.mark.parametrize("ends", [(), (END,)], ids=["endless", "ends"])
@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_is_the_mean_of_verification(
    tmp_path: Path, policy: str, verifier: str, ends
) -> None:
    tree, rule, runs = Tree(tmp_path / "tree", ends), ct.policy(policy), amount(2000, 20_000)
    found = replay(tree.trace, rule, verifier)
    expected = [sum(tree.mass * own) for own in (found.tokens, found.accepted, found.spent["kl"])]
    drawn = tree.sampled(rule, verifier, runs, ends)
    error = drawn.std(0) / math.sqrt(runs)
    off = np.abs(drawn.mean(0) - expected)
    assert (off <= SIGMAS * error + EXACT).all()
    if policy != "speculative":
        assert (error > 0).all() and expected[2] > 0.01  # the test has something to see


@pytest.mark.parametrize("verifier", BOTH)
def test_ragged_and_certain_cycles_are_replayed_one_by_one(tmp_path, ragged, verifier) -> None:
    trace = save_trace(tmp_path / "t", ragged, vocab_size=VOCAB, num_draft_tokens=3)
    rule, judge = ct.policy("mixture:alpha=0.3"), find_verifier(verifier)
    for most in (3, 1):
        found = replay(trace, rule, judge, num_draft_tokens=most, divergences=("kl", "reverse_kl"))
        tokens, spent = np.zeros(trace.texts), np.zeros(trace.texts)
        for cycle in trace:
            width = min(most, len(cycle.draft_token_ids))
            tokens[cycle.text] += 1
            if width:
                p = None if cycle.draft_probs is None else cycle.draft_probs[None, :width]
                draft = Draft(cycle.draft_token_ids[None, :width], [width], p)
                law = judge.law(Assignment((rule,)), cycle.target_probs[None, : width + 1], draft)
                tokens[cycle.text] += float(law.alive[0, 1:].sum())
                kl = ct.divergence("kl").value(law.emitted[0], cycle.target_probs[:width])
                spent[cycle.text] += float((law.alive[0, :-1] * kl).sum())
        np.testing.assert_allclose(found.tokens, tokens, rtol=EXACT)
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
    """Return a trace of the tiny pair."""
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


def test_replay_is_what_other_decodes_do(tiny, logged: Trace) -> None:
    """Tokens per call of decodes with other seeds, in rounds that start where texts are logged."""
    calls, tokens = np.zeros(TEXTS), np.zeros(TEXTS)
    for text, prompt in enumerate(STARTS):
        starts: list[int] = []
        result = generate(
            *tiny, torch.tensor([prompt]), policy="speculative", seed=1000 + text,
            num_draft_tokens=4, max_new_tokens=LENGTH + 10, meter=False,
            on_rows=lambda q, draft, texts, before, starts=starts: starts.append(before[0]),
        )  # fmt: skip
        ends = [*starts[1:], result.num_tokens]
        own = [e - start for start, e in zip(starts, ends, strict=True) if start < LENGTH]
        calls[text], tokens[text] = len(own), sum(own)
    found = replay(logged, "speculative").tokens_per_call
    other = ratio_of_sums(tokens, calls, found.source)
    error = math.hypot(found.standard_error, other.standard_error)
    assert abs(found.value - other.value) < SIGMAS * error
    assert error < found.value / 6  # the test has power


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [*((policy, verifier) for policy in POLICIES for verifier in BOTH), ("typical", "chain")],
)
def test_saved_rows_average_the_drafted_token_over_the_draft(
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
    tokens = replay(trace, policy, verifier).tokens.reshape(4, VOCAB)
    rows = replay(SavedRows.of(q, p), policy, verifier)
    by_token = (tokens * p.numpy()).sum(-1)
    np.testing.assert_allclose(rows.tokens, by_token, rtol=STORED)
    report = ct.audit(ct.policy(policy), q, p)
    np.testing.assert_allclose(rows.accepted, report.acceptance, rtol=EXACT)
    np.testing.assert_allclose(rows.spent["kl"], report.divergences["kl"], rtol=EXACT, atol=EXACT)


def test_saved_rows_under_any_verifier() -> None:
    class Stranger(Verifier):
        """Has the chain's law and no other relation to it."""

        name = "stranger"

        def verify(self, *arguments):
            raise NotImplementedError

        def law(self, *arguments) -> VerdictLaw:
            return Chain().law(*arguments)

    source = torch.Generator().manual_seed(2)
    rows = SavedRows.of(rows_of(source, 3, VOCAB), rows_of(source, 3, VOCAB))
    known, enumerated = (replay(rows, "typical", judge) for judge in (Chain(), Stranger()))
    np.testing.assert_allclose(enumerated.tokens, known.tokens, rtol=EXACT)


def test_saved_rows_are_read_from_files(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(2)
    q, p = rows_of(source, 3, VOCAB).numpy(), rows_of(source, 3, VOCAB).numpy()
    np.save(tmp_path / "q.npy", q)
    np.savez(tmp_path / "p.npz", p=np.log(p))
    np.savez(tmp_path / "ql.npz", q=np.log(q))
    np.save(tmp_path / "p.npy", p)
    plain = SavedRows.load(tmp_path / "q.npy", tmp_path / "p.npy")
    logits = SavedRows.load(tmp_path / "ql.npz", tmp_path / "p.npz", logits=True)
    assert plain.texts == 3 and plain.fingerprint == SavedRows.of(q, p).fingerprint
    torch.testing.assert_close(plain.draft_probs, logits.draft_probs, rtol=EXACT, atol=0)


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
        replay(**{"source": trace, "policy": "speculative"} | changes)
    with pytest.raises(ValueError, match="divergence: must be one of kl; got 'reverse_kl'"):
        replay(trace, "speculative").divergence_per_token("reverse_kl")


class Told(Schedule):
    """Takes two policies in turns, and checks what it is told of them."""

    def __init__(self, verifier: str) -> None:
        soft = ct.policy("soft_band:price=0.7")
        others = ct.policy("band:price=0.5"), ct.policy("cactus:delta=0.3")
        self.rules = (soft, others[0]) if verifier == "block" else others
        self.verifier, self.paid = find_verifier(verifier), 0

    def begin(self, prompt):
        return 0

    def advance(self, state, new_ids):
        assert not self.planned or self.kept == [*new_ids[:-1]]
        return state + 1

    def choose(self, state, drafted):
        self.planned = len(drafted)
        return (state + torch.arange(len(drafted))) % 2

    def observe(self, state, rows):
        q, p, ids = rows.target_probs, rows.draft_probs, rows.draft_token_ids
        self.kept = ids[rows.accepted].tolist()
        choice = self.choose(state, torch.zeros(self.planned))[: len(ids)]
        assert rows.policies == tuple(self.rules[number] for number in choice.tolist())
        certain = bool((p.amax(-1) == 1).all())
        draft = Draft(ids[None], [len(ids)], None if certain else p[None], limits=[self.planned])
        beyond = torch.cat([q, q[-1:]])[None]
        law = self.verifier.law(Assignment(self.rules, choice[None]), beyond, draft)
        expected = ct.divergence("kl").value(law.emitted[0], q.double())
        looks = self.rules[0].needs_path and certain  # then h at a row knows all of the draft
        if not looks or len(ids) == self.planned:
            assert torch.allclose(rows.charges, expected, atol=STORED)
            self.paid += bool((expected > STORED).any())
        return state


@pytest.mark.parametrize("verifier", BOTH)
def test_a_schedule_is_told_what_its_policies_charge(tmp_path, ragged, verifier):
    made = {"vocab_size": VOCAB, "num_draft_tokens": 3, "eos_token_ids": (END,)}
    schedule = Told(verifier)
    replay(save_trace(tmp_path / "t", ragged, **made), schedule, verifier)
    assert schedule.paid > 2
