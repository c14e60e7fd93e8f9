"""Cut rows: what they keep exactly, what moves how little, and what is refused."""

from pathlib import Path

import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Cycle, Trace, replay, save_trace
from cactus_theory.traces.cells import ALONE, REST, cut_row, merged
from cactus_theory.traces.shard import from_bytes, pack, to_bytes
from tests.amounts import amount, some

tensor_files = pytest.importorskip("safetensors.torch")

DATA = Path(__file__).resolve().parents[2] / "simulations" / "data"
REAL = DATA / "smollm_trace"
# a policy and how far its tokens a call and its nats a token move, relative: a thousandth, but for
# rules that raise tiny probabilities
POLICIES = {
    "lenience:lenience=0.5": 1e-3,
    "mixture:alpha=0.2": 1e-3,
    "cactus:delta=0.1": 1e-3,
    "cactus:delta=0.0001": 4e-3,
    "band:price=1": 1e-3,
    "typical": 1e-3,
    "fuzzy:threshold=0.1": 1e-3,
    "speculative:tilt=0.43": 1e-3,
    "truncated:top_p=0.95": 1e-3,
}


def heavy(vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row with a long tail, and a draft's of which a third of the tokens have none."""
    noise = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(2, vocab, generator=noise, dtype=torch.float64)
    logits[1] += logits[0]
    logits[1, torch.rand(vocab, generator=noise) < 1 / 3] = -torch.inf
    q, p = logits.softmax(-1)
    return q, p


def cycle_of(q: torch.Tensor, p: torch.Tensor) -> Cycle:
    drafted = p.nonzero()[-1]
    return Cycle(0, 0, drafted, torch.stack([q, q]), p[None])


@pytest.mark.parametrize("vocab", [2, 600, 151_936])
def test_masses_and_overlap_of_the_rest_are_exact(vocab: int) -> None:
    q, p = heavy(vocab)
    ids, *masses = cut_row(q.clone(), p.clone(), [vocab - 1])
    alone = ids >= 0
    assert vocab - 1 in ids[alone] and int(alone.sum()) <= ALONE
    for row, mass in zip((q, p), masses, strict=True):
        assert torch.equal(mass[alone], row[ids[alone].long()])
        assert float(mass.sum()) == pytest.approx(1, abs=1e-12)
    rest = torch.ones(vocab, dtype=torch.bool)
    rest[ids[alone].long()] = False
    overlap = torch.minimum(q, p)[rest].sum()
    assert float(torch.minimum(*masses)[~alone].sum()) == pytest.approx(float(overlap), abs=1e-14)
    assert -int(ids[~alone].sum()) == int((torch.maximum(q, p)[rest] > 0).sum())


def test_a_row_is_cut_no_further_than_it_must_be() -> None:
    """One token with all the mass stands alone; of two the mass that is left decides."""
    one = torch.tensor([0.0, 1.0, 0.0])
    ids, q, p = cut_row(one.clone(), one.clone(), [])
    assert ids.tolist() == [1] and q.tolist() == p.tolist() == [1.0]
    for small, count in ((REST / 2, 1), (2 * REST, 2)):
        q = torch.tensor([1 - small, small])
        assert int((cut_row(q, torch.zeros(2), [])[0] >= 0).sum()) == count


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_read_are_whole_rows(dtype: torch.dtype) -> None:
    cycle = cycle_of(*heavy(5000))
    bare = Cycle(0, 3, torch.tensor([7]), cycle.target_probs, None)
    none = Cycle(0, 4, torch.zeros(0, dtype=torch.int64), cycle.target_probs[:1], None)
    shard = pack([cycle, bare, none], dtype, 5000)
    content = to_bytes(shard, [0, 2])
    found = from_bytes("file", content, 5000, 1)
    for name in ("position", "token_offsets", "draft_offsets", "draft_token_ids"):
        assert torch.equal(getattr(found, name), getattr(shard, name))
    assert found.target_log_probs.shape == (5, 5000) and found.draft_log_probs.shape == (1, 5000)
    for own in (0, 2, int(cycle.draft_token_ids)):  # ends and drafted tokens stand alone
        torch.testing.assert_close(
            found.target_log_probs[0, own], shard.target_log_probs[0, own].float(),
            atol=0.01, rtol=0,
        )  # fmt: skip
    entropy = [torch.special.entr(rows.double().exp()).sum(-1)
               for rows in (found.target_log_probs, shard.target_log_probs)]  # fmt: skip
    torch.testing.assert_close(*entropy, rtol=1e-3, atol=0)


def moved(one: Trace, other: Trace, spec: str) -> float:
    """Return by how much of itself a number of a replay differs, the largest."""
    numbers = [(own.tokens_per_call, own.accepted_per_call, own.divergence_per_token())
               for own in (replay(trace, spec) for trace in (one, other))]  # fmt: skip
    return max(abs(a.value / b.value - 1) for a, b in zip(*numbers, strict=True) if b.value)


@pytest.mark.parametrize("spec", some(POLICIES, 5))
def test_replays_of_cut_rows_move_by_less_than_a_thousandth(tmp_path: Path, spec: str) -> None:
    """On the shipped pair; of the real model, whose whole rows are not shipped, see MEASURE.md."""
    whole = Trace.open(DATA / "trace")
    texts = [[cycle for cycle in whole if cycle.text == text] for text in range(4)]
    cut, same = (
        save_trace(
            tmp_path / str(way),
            texts,
            vocab_size=2048,
            num_draft_tokens=4,
            dtype="float16",
            cut=way,
        )  # fmt: skip
        for way in (True, False)
    )
    assert moved(cut, same, spec) < POLICIES[spec]


def test_the_real_trace_is_small_and_is_read() -> None:
    trace = Trace.open(REAL)
    assert sum(path.stat().st_size for path in REAL.iterdir()) < 8_000_000
    assert len(trace) >= 150 and trace.header.vocab_size == 49_152 and trace.texts == 16
    assert trace.header.temperature == 1 and trace.ends == [2]
    tokens = replay(trace, "speculative").tokens_per_call
    assert f"{tokens.value:.3f} ± {tokens.standard_error:.3f}" == "1.584 ± 0.084"


def change(content: bytes, **tensors) -> bytes:
    held = tensor_files.load(content)
    for name, value in tensors.items():
        held[name] = value(held[name]) if callable(value) else value
    return tensor_files.save({n: own.contiguous() for n, own in held.items() if own is not None})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"entry_offsets": lambda own: own[1:]}, "entry_offsets must rise from 0"),
        ({"entry_offsets": lambda own: own.flip(0)}, "entry_offsets must rise from 0"),
        ({"entry_offsets": lambda own: own[[0, -1]]}, "must be of 2 rows"),
        ({"entry_offsets": None}, "cut rows need entry_offsets"),
        ({"target_log_probs": None}, "cut rows need target_log_probs"),
        ({"draft_log_probs": None}, "draft_log_probs must be float16 or float32"),
        ({"entry_ids": lambda own: own.long()}, "entry_ids must be int32"),
        ({"entry_ids": lambda own: own.clamp(min=600)}, "entry_ids must be int32 ids below 600"),
        ({"entry_ids": lambda own: own.clamp(min=0)}, "each in one entry"),
        ({"entry_ids": lambda own: own.clamp(max=-500)}, "600 tokens at most"),
        ({"draft_token_ids": lambda own: own * 0 + 3}, "a drafted token must have"),
        ({"draft_token_ids": lambda own: own - 601}, "entry of its own"),
        ({"draft_offsets": lambda own: own * 2}, "a draft row for every token, or none"),
        ({"token_offsets": lambda own: own * 0}, "token_offsets must rise"),
        ({"target_log_probs": lambda own: own + 0.1}, "row 0 sums to 1.1"),
        ({"target_log_probs": lambda own: own * float("nan")}, "summing to 1"),
        ({"position": lambda own: own.long()}, "position must be int32"),
    ],
)
def test_damaged_cut_rows_are_refused(damage, said: str) -> None:
    q, p = heavy(600)
    p[3] = 0
    content = to_bytes(pack([cycle_of(q, p / p.sum())], torch.float32, 600), [])
    with pytest.raises(ValueError, match=f"^file: .*{said}"):
        from_bytes("file", change(content, **damage), 600, 1)


def test_equal_tokens_of_a_row_are_merged_and_no_optimum_moves() -> None:
    rows = Trace.open(REAL).rows()
    few = [own[:: amount(180, 60)] for own in rows]
    masses = merged(*few)
    assert masses[0].shape[1] < 2_000 < few[0].shape[1]
    for kind in some(("kl", "reverse_kl", "squared_hellinger"), 2):
        one, other = (ct.pooled_acceptance(*own, divergence=kind, delta=0.02)
                      for own in (few, masses))  # fmt: skip
        assert one.mean_acceptance == pytest.approx(other.mean_acceptance, rel=1e-9)
    overlaps = [torch.minimum(*own).sum(-1) for own in (few, masses)]
    assert torch.allclose(*overlaps, rtol=1e-9)
