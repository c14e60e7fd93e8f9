"""A request emits the same tokens wherever and beside whatever it is verified."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding.device.round import never_waits
from cactus_theory.kernels import (
    LogitsVerdict,
    Workspace,
    verify_logits,
)
from cactus_theory.verify.draw import pick
from tests.amounts import THOROUGH, amount
from tests.kernels.closed_forms import last_coins
from tests.kernels.hopper import RULES as EVERY

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NOTHING = -float("inf")
VOCAB = 11
LENGTHS = (2, 0, 1)
HEAT = (1.0, 0.6, 0.0)


class Batch:
    """Three requests with 2, 0 and 1 drafted tokens, the last one greedy; bfloat16 numbers."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(1)

        def normal(*shape):
            rows = 2 * torch.randn(*shape, VOCAB, generator=generator)
            return rows.bfloat16().float().to(device)

        self.device = device
        self.target, self.draft = normal(3, 3), normal(3, 2)
        self.ids = self.draft.argmax(-1)
        self.ids[2, 0] = self.target[2, 0].argmax()
        for row, length in enumerate(LENGTHS):
            self.ids[row, length:] = -1
        self.seeds = torch.tensor([7, -5, 2**62 + 1], device=device)
        self.positions = torch.tensor([0, 3, 2**33], device=device)
        self.heat = torch.tensor(HEAT, device=device)

    def numbers(self, rows=slice(None)):
        parts = {"seeds": self.seeds, "positions": self.positions, "temperature": self.heat}
        return {name: part[rows].contiguous() for name, part in parts.items()}

    def verify(self, spec, verifier):
        return verify_logits(
            ct.policy(spec), self.target, self.draft, self.ids, verifier=verifier,
            **self.numbers(),
        )  # fmt: skip


BLOCK = ("band:price=1,per_row=True", "block")
CASES = [("cactus:delta=0.5", "chain"), ("band:price=1", "chain"), BLOCK]


@pytest.mark.parametrize(("spec", "verifier"), CASES if THOROUGH else CASES[:1])
def test_batches_agree_to_the_last_token(spec, verifier, device):
    batch = Batch(device)
    rule, expected = ct.policy(spec), batch.verify(spec, verifier)
    assert expected.output_token_ids[2, 0] == batch.target[2, 0].argmax()
    assert expected.output_token_ids[2, 1] == batch.target[2, 1].argmax()
    turned = [2, 0]  # other order and padding, strided bfloat16 rows, counts instead of −1
    wide = torch.full((2, 3, VOCAB + 6), 9.0, dtype=torch.bfloat16, device=device)
    wide[..., :VOCAB] = batch.target[turned]
    other = verify_logits(
        rule, wide[..., :VOCAB], batch.draft[turned].bfloat16(),
        batch.ids[turned].clamp(min=0), lengths=torch.tensor([1, 2], device=device),
        verifier=verifier, **batch.numbers(turned),
    )  # fmt: skip
    alone = verify_logits(  # its own width
        rule, batch.target[2:, :2], batch.draft[2:, :1], batch.ids[2:, :1], verifier=verifier,
        **batch.numbers(slice(2, 3)),
    )  # fmt: skip
    for mine, verdict in ((turned, other), ([2], alone)):
        width = verdict.output_token_ids.shape[1]
        tokens = expected.output_token_ids[mine, :width]
        assert torch.equal(verdict.output_token_ids, tokens)
        assert torch.equal(verdict.num_accepted, expected.num_accepted[mine])


def test_a_workspace_keeps_nothing_of_the_step_before(device):
    """Else a row beyond a draft's end is read."""
    rule = ct.policy("band:price=1,per_row=True")
    target, draft = torch.zeros(1, 3, 4, device=device), torch.zeros(1, 2, 4, device=device)
    target[..., 0], draft[..., 1] = 1.0, 1.5
    numbers = {"seeds": torch.ones(1, dtype=torch.int64, device=device)}
    numbers["positions"], work = numbers["seeds"], Workspace(1, 2, 4, device)
    marked = []
    for last in (1, -1):
        ids = torch.tensor([[1, last]], device=device)
        verify_logits(rule, target, draft, ids, verifier="block", workspace=work, **numbers)
        marked.append([int(band.flags[0, 1]) for band in work.bands])
    assert any(marked[0]) and not any(marked[1])


@pytest.mark.parametrize(("spec", "verifier"), EVERY)
def test_no_token_of_a_row_that_holds_no_distribution(spec, verifier):
    assert_no_token_of_a_broken_row(spec, verifier, "cpu")


@pytest.mark.parametrize(("spec", "verifier"), EVERY if THOROUGH else EVERY[:1])
def test_kernels_emit_none_either(spec, verifier, device):
    assert_no_token_of_a_broken_row(spec, verifier, device)


def assert_no_token_of_a_broken_row(spec, verifier, device):
    """NaN, nothing finite, +inf, NaN at T = 0, NaN after the draft; then rows that are sound:
    beside a draft with a NaN, a token outside the vocabulary, an excluded token, a greedy one.
    """
    target = torch.zeros(9, 2, VOCAB, device=device)
    draft = torch.zeros(9, 1, VOCAB, device=device)
    heat = torch.ones(9, device=device)
    target[[0, 3], 0, 3] = torch.nan
    target[1, 0] = NOTHING
    target[2, 0, 4] = torch.inf
    target[4, 0, 0], target[4, 1, 3] = 20.0, torch.nan
    draft[5, 0, 3] = torch.nan
    target[7, 0, :-1] = NOTHING
    target[8, 0, 2] = 1.0
    heat[[3, 8]] = 0.0
    ids = torch.ones(9, 1, dtype=torch.int64, device=device)
    ids[4], ids[6] = 0, VOCAB + 3
    numbers = torch.arange(9, device=device)
    verdict = verify_logits(
        ct.policy(spec), target, draft, ids,
        seeds=numbers, positions=numbers, temperature=heat, verifier=verifier,
    )  # fmt: skip
    assert verdict.num_accepted.tolist() == [0] * 4 + [1] + [0] * 4
    first = verdict.output_token_ids[:, 0].tolist()
    assert first[:5] == [-1] * 4 + [0] and first[7:] == [VOCAB - 1, 2]
    assert all(0 <= token < VOCAB for token in first[5:7])
    assert verdict.output_token_ids[:, 1].tolist() == [-1] * 9


@pytest.mark.parametrize(("spec", "verifier"), EVERY if THOROUGH else [BLOCK])
def test_inputs_are_left_as_they_were(spec, verifier, device):
    batch = Batch(device)
    inputs = (batch.target, batch.draft, batch.ids, *batch.numbers().values())
    copies = [tensor.clone() for tensor in inputs]
    batch.verify(spec, verifier)
    assert all(torch.equal(one, other) for one, other in zip(inputs, copies, strict=True))


def test_without_drafted_tokens_a_token_is_drawn_by_its_coin(device):
    batch, target = Batch(device), None
    target = batch.target[:, :1].half()
    out = LogitsVerdict(torch.empty(3, 1, dtype=torch.int64, device=device), batch.seeds.clone())
    work = Workspace(3, 0, VOCAB, device)
    ids = batch.ids[:, :0]
    verdict = verify_logits(
        ct.policy("speculative"), target, None, ids, workspace=work, out=out, **batch.numbers()
    )
    rows, heat = target[:, 0].double(), batch.heat.double()[:, None]
    drawn = pick((rows / heat.clamp(min=0.1)).softmax(-1), last_coins(batch.seeds, batch.positions))
    assert verdict is out and verdict.num_accepted.tolist() == [0] * 3
    expected = torch.where(batch.heat > 0, drawn, rows.argmax(-1))
    assert torch.equal(verdict.output_token_ids[:, 0], expected)


def test_rows_of_two_parts_are_drawn_from_by_coins_of_their_own(device, monkeypatch):
    """Each part in units of its own: in those of a peak 300 nats lower weights would be infinite.

    The coin of a bonus token is that of its own stream.
    """
    count = amount(4, 20)
    monkeypatch.setattr("cactus_theory.kernels.buffers.part_for", lambda vocab: 512)
    logits = torch.randn(count, 700, generator=torch.Generator().manual_seed(2)).to(device)
    logits[1::2, :512] -= 300
    seeds = torch.arange(count, device=device)
    heat = torch.full((count,), 0.8, device=device)
    keys = {"seeds": seeds, "positions": seeds + 4, "temperature": heat}
    rows = (logits.double() / heat.double()[:, None]).softmax(-1)
    ids = torch.empty(count, 0, dtype=torch.int64, device=device)
    verdict = verify_logits(ct.policy("speculative"), logits[:, None], None, ids, **keys)
    bonus = pick(rows, last_coins(seeds, seeds + 4))
    assert torch.equal(verdict.output_token_ids[:, 0], bonus)


def test_greedy_tokens_are_the_first_of_the_largest(device, monkeypatch):
    """Of equal logits within a part and in the next one, verified and drawn."""
    monkeypatch.setattr("cactus_theory.kernels.buffers.part_for", lambda vocab: 512)
    row = torch.zeros(700, device=device)
    row[[3, 7, 600]] = 2.0
    zero = torch.zeros(2, dtype=torch.int64, device=device)
    keys, rows = {"seeds": zero, "positions": zero, "temperature": 0.0}, row.expand(2, -1)
    ids = torch.tensor([[3], [7]], device=device)
    target, draft = rows[:, None].expand(-1, 2, -1), rows[:, None]
    verdict = verify_logits(ct.policy("speculative"), target, draft, ids, **keys)
    assert verdict.output_token_ids.tolist() == [[3, 3], [3, -1]]


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "verifier"), CASES)
def test_a_step_is_captured_and_reads_nothing_on_the_host(spec, verifier, device):
    batch = Batch(device)
    expected = batch.verify(spec, verifier)
    work, out = Workspace(3, 2, VOCAB, device), batch.verify(spec, verifier)
    arguments = {"verifier": verifier, "workspace": work, "out": out, **batch.numbers()}
    step = (ct.policy(spec), batch.target, batch.draft, batch.ids)
    assert never_waits(lambda: verify_logits(*step, **arguments), batch.target.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_logits(*step, **arguments)
    out.output_token_ids.fill_(-7)
    graph.replay()
    assert torch.equal(out.output_token_ids, expected.output_token_ids)
