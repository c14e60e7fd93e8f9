"""What is written is what is read; what is broken or foreign is refused in words."""

import hashlib
import json
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import cactus_theory as ct
from cactus_theory.emitted import raised_off_head
from cactus_theory.traces import Cycle, Trace, save_trace
from cactus_theory.traces.folder import MANIFEST, UNFINISHED
from cactus_theory.traces.shard import from_bytes, pack, to_bytes
from tests.amounts import amount
from tests.traces.conftest import VOCAB

tensor_files = pytest.importorskip("safetensors.torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace"
LARGEST = 3_000_000  # bytes that may be committed
# relative error of a probability: half an ulp of a log-probability of at most 8 (its exponent
# is 2²: 2⁻⁹ in float16, 2⁻²² in float32), twice for the division by the row's sum
ROUNDING = {"float16": 2 * 2.0**-9, "float32": 2 * 2.0**-22}


@pytest.fixture
def saved(tmp_path: Path, ragged) -> Trace:
    return save_trace(tmp_path / "trace", ragged, vocab_size=VOCAB, num_draft_tokens=3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_cycle_comes_back(tmp_path: Path, ragged, dtype: str) -> None:
    trace = save_trace(
        tmp_path / "trace", ragged, vocab_size=VOCAB, num_draft_tokens=3, dtype=dtype
    )
    written, read = [cycle for text in ragged for cycle in text], list(trace)
    assert len(written) == len(read) == len(trace) and trace.texts == len(ragged)
    for one, other in zip(written, read, strict=True):
        assert (one.text, one.position) == (other.text, other.position)
        assert torch.equal(one.draft_token_ids, other.draft_token_ids)
        assert (one.draft_probs is None) == (other.draft_probs is None)
        for name in ("target_probs", "draft_probs"):
            if getattr(one, name) is not None:
                _close(getattr(one, name), getattr(other, name), ROUNDING[dtype])


def _close(written: torch.Tensor, read: torch.Tensor, rounding: float) -> None:
    assert read.dtype == torch.float64
    assert torch.equal(written == 0, read == 0)  # no token is lost, none appears
    torch.testing.assert_close(read, written, rtol=rounding, atol=0)
    assert float((read.sum(-1) - 1).abs().max()) < 1e-15 * VOCAB


def test_float16_keeps_tokens_that_float16_probabilities_lose(tmp_path: Path) -> None:
    row = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64)
    assert row.half()[0, 1] == 0
    cycle = Cycle(0, 0, torch.zeros(0, dtype=torch.int64), row, None)
    made = {"vocab_size": 2, "num_draft_tokens": 1, "dtype": "float16"}
    trace = save_trace(tmp_path / "trace", [[cycle]], **made)
    assert float(next(iter(trace)).target_probs[0, 1]) == pytest.approx(1e-9, rel=2.0**-6)


@pytest.mark.parametrize("most", [3, 2, 1])
@pytest.mark.parametrize("entries", [1, 40, 10**6])
def test_batches_hold_every_cycle_once(saved: Trace, most: int, entries: int) -> None:
    read = {(cycle.text, cycle.position): cycle for cycle in saved}
    for batch in saved.batches(entries, most):
        width = batch.draft_token_ids.shape[1]
        assert batch.target_probs.numel() <= max(entries, (width + 1) * VOCAB)
        for row, key in enumerate(zip(batch.text.tolist(), batch.position.tolist(), strict=True)):
            cycle = read.pop(key)
            assert width == min(most, len(cycle.draft_token_ids))
            assert torch.equal(batch.draft_token_ids[row], cycle.draft_token_ids[:width])
            assert torch.equal(batch.target_probs[row], cycle.target_probs[: width + 1])
            assert (batch.draft_probs is None) == (cycle.draft_probs is None)
            if batch.draft_probs is not None and cycle.draft_probs is not None:
                assert torch.equal(batch.draft_probs[row], cycle.draft_probs[:width])
    assert not read


def test_the_shipped_example_is_small_and_holds_what_it_says() -> None:
    trace = Trace.open(EXAMPLE)
    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) < LARGEST
    assert trace.header.vocab_size == 2048 and trace.header.num_draft_tokens == 4
    assert all(len(cycle.draft_token_ids) == 4 for cycle in trace)


def _shard(**changes):
    def change(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        content["shards"][0] |= changes
        (folder / MANIFEST).write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (shutil.rmtree, OSError, "must be the folder of a trace; no such folder"),
        (lambda f: (f / MANIFEST).unlink(), ValueError, "has no manifest.json"),
        (lambda f: (f / MANIFEST).rename(f / UNFINISHED), ValueError, "was interrupted, log it"),
        (lambda f: (f / "text-00002.safetensors").unlink(), OSError, "no such file"),
    ],
)
def test_a_broken_folder_is_refused(saved: Trace, damage, kind, said: str) -> None:
    damage(saved.folder)
    with pytest.raises(kind, match=said):
        Trace.open(saved.folder)


def test_a_file_that_has_changed_is_refused_when_it_is_read(saved: Trace) -> None:
    path = saved.folder / "text-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="must be the file that was logged; its sha256 differs"):
        list(Trace.open(saved.folder))


def _other(**changes):
    """Return a change of a shard's tensors; None takes one away."""

    def change(content: bytes) -> bytes:
        held = tensor_files.load(content)
        for name, value in changes.items():
            new = value(held[name]) if callable(value) else value
            held = {own: part for own, part in held.items() if own != name}
            held |= {} if new is None else {name: new.contiguous()}
        return tensor_files.save(held)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-8], "must be a safetensors file"),
        (lambda content: pickle.dumps(content), "must be a safetensors file"),
        (lambda content: content.replace(b"[8,5]", b"[9,9]"), "must be a safetensors file"),
        (_other(position=None), "must hold position, token_offsets"),
        (_other(more=torch.zeros(1)), "must hold position, token_offsets"),
        (_other(position=lambda own: own.float()), "position must be int32"),
        (_other(position=lambda own: own[:, None]), "position must be int32"),
        (_other(token_offsets=lambda own: own.double()), "token_offsets must be int64"),
        (_other(token_offsets=lambda own: own.flip(0)), "token_offsets must rise from 0 to 5"),
        (_other(draft_offsets=lambda own: own + 1), "draft_offsets must rise from 0"),
        (_other(draft_offsets=torch.tensor([1, 3, 3, 3])), "draft_offsets must rise from 0 to 3"),
        (_other(draft_offsets=torch.tensor([0, 4, 3, 3])), "draft_offsets must rise from 0 to 3"),
        (_other(draft_offsets=torch.tensor([0, 2, 3, 3])), "a draft row for every token, or none"),
        (_other(draft_token_ids=lambda own: own.float()), "draft_token_ids must be int32"),
        (
            _other(draft_token_ids=lambda own: 0 * own + VOCAB),
            r"draft_token_ids must lie in \[0, 5\)",
        ),
        (_other(draft_log_probs=torch.tensor(0.0)), "draft_log_probs: must be float16 or float32"),
        (_other(target_log_probs=lambda own: own.double()), "must be float16 or float32 rows of 5"),
        (_other(target_log_probs=lambda own: own[1:]), "must have a row for every drafted token"),
        (_other(target_log_probs=lambda own: own * float("nan")), "rows must be log-probabilities"),
        (_other(target_log_probs=lambda own: own + 0.03), "row 0 sums to 1.03"),
        (_other(target_log_probs=lambda own: own.float() + 3e-4), "to 1 within 0.0001; row 0 sums"),
    ],
)
def test_a_shard_that_its_manifest_vouches_for_is_checked_too(saved, change, said: str) -> None:
    path = saved.folder / "text-00000.safetensors"
    content = change(path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)
    _shard(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())(saved.folder)
    with pytest.raises(ValueError, match=f"^{path}: .*{said}"):
        list(Trace.open(saved.folder))


@pytest.mark.parametrize("row", [[0.5] * VOCAB, [float("nan")] * VOCAB])
def test_rows_that_are_no_distributions_are_refused(tmp_path: Path, row: list[float]) -> None:
    cycle = Cycle(0, 0, torch.zeros(0, dtype=torch.int64), torch.tensor([row]), None)
    with pytest.raises(ValueError, match="must be log-probabilities, summing to 1"):
        save_trace(tmp_path / "trace", [[cycle]], vocab_size=VOCAB, num_draft_tokens=1)


def test_a_folder_with_a_trace_is_not_written_over(saved: Trace, ragged) -> None:
    with pytest.raises(ValueError, match="must be empty"):
        save_trace(saved.folder, ragged, vocab_size=VOCAB, num_draft_tokens=3)


@pytest.mark.parametrize(
    "spec",
    ["speculative", "band:price=1", "band:price=1,head=0.2", "cactus:delta=0.01",
     "lenience:lenience=0.5", "mixture:alpha=0.2"],
)  # fmt: skip
def test_half_precision_moves_numbers_by_less_than_the_page_says(spec: str) -> None:
    """MEASURE.md: acceptance 0.0005, KL 0.5 % of itself, what is raised off the head 0.0001."""
    noise = torch.Generator().manual_seed(amount(2, 7))
    target, apart = (
        scale * torch.randn(amount(1, 8), 151_936, generator=noise, dtype=torch.float64)
        for scale in (3.0, 1.0)
    )
    rows = [logits.softmax(-1) for logits in (target, target + apart)]
    stored = [row.log().half().double().softmax(-1) for row in rows]
    for row in rows:  # as MEASURE.md says, of a probability above e^-16
        moved = row.log().half().double() - row.log()
        assert float(moved[row > math.exp(-16)].abs().amax()) < 0.004
    rule, numbers = ct.policy(spec), []
    for q, p in (rows, stored):
        law = ct.emitted_law(rule, q, p)
        accepted = torch.minimum(law, p).sum(-1)
        numbers.append((accepted, ct.divergence("kl").value(law, q), raised_off_head(law, q)))
    moved = [(ours - theirs).abs().max() for ours, theirs in zip(*numbers, strict=True)]
    assert moved[0] < 5e-4 and moved[2] < 1e-4
    assert ((numbers[0][1] - numbers[1][1]).abs() <= 5e-3 * numbers[0][1] + 1e-12).all()


def test_columns_that_no_draft_row_has_are_not_stored() -> None:
    """A draft of 3 of 64 tokens takes their columns; what is read back is whole."""
    source = torch.Generator().manual_seed(0)
    q = torch.rand(3, 64, generator=source, dtype=torch.float64)
    p = torch.zeros(2, 64, dtype=torch.float64)
    p[:, [2, 40, 63]] = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    cycle = Cycle(0, 0, torch.tensor([40, 2]), q / q.sum(-1, keepdim=True), p)
    shard = pack([cycle], torch.float16, 64)
    content = to_bytes(shard)
    held = tensor_files.load(content)
    assert held["draft_log_probs"].shape == (2, 3)
    assert held["draft_columns"].tolist() == [2, 40, 63]
    found = from_bytes("file", content, 64, 2)
    for name, own in vars(shard).items():
        assert own is None or torch.equal(getattr(found, name), own)
    for columns in ([2, 40, 64], [2, 40], [40, 2, 63], [-1, 40, 63]):
        change = _other(draft_columns=torch.tensor(columns, dtype=torch.int32))
        with pytest.raises(ValueError, match="file: draft_columns must be ascending ids below 64"):
            from_bytes("file", change(content), 64, 2)
