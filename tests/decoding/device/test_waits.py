"""What a graph captures never asks the host for a value, and makes nothing of host values."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.decoding.device.round import Inputs, Round, StaticForward, never_waits
from cactus_theory.decoding.device.verify import Logits, torch_step
from cactus_theory.decoding.models import CachedModel
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment
from tests.decoding.device.pretended import Waited, no_uploads, pretended

BATCH, WIDTH, VOCAB = 2, 3, 9000  # beyond the vocabulary from which rows are searched by blocks
CAPTURED = [
    ("chain", "speculative"),
    ("chain", "cactus:delta=0.1"),
    ("chain", "typical"),
    ("chain", "mixture:alpha=0.5"),
    ("chain", "lenience:lenience=0.5"),
    ("chain", "top_k:k=5"),
    ("chain", "tempered:temperature=0.9"),
    ("chain", "truncated:top_p=0.9"),
    ("block", "speculative"),
    ("block", "mixture:alpha=0.5"),
]
# their roots are found until they are good enough, which the host must ask
WAITING = [
    ("chain", "band:price=1"),
    ("chain", "cactus_exact:delta=0.1"),
    ("block", "cactus:delta=0.1"),
    ("block", "band:price=1"),
]


def step_of(verifier, policy):
    return torch_step(find_verifier(verifier), Assignment((ct.policy(policy),)), 1.0)


def logits_and_coins():
    source = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(BATCH, WIDTH + 1, VOCAB, generator=source)
    p = q[:, :WIDTH] + torch.randn(BATCH, WIDTH, VOCAB, generator=source)
    coins = torch.rand(BATCH, WIDTH + 1, generator=source, dtype=torch.float64)
    drafted = torch.tensor([3, 2])
    given = q, p, p.argmax(-1), drafted, coins[:, :-1], coins[:, -1], drafted + 9
    return Logits(*map(pretended, given))


@pytest.mark.parametrize(("verifier", "policy"), CAPTURED)
def test_these_are_verified_inside_the_graph(monkeypatch, verifier, policy):
    step, given = step_of(verifier, policy), logits_and_coins()
    with no_uploads(monkeypatch):
        verdict = step(given)
    assert verdict.last.is_cuda  # the device's branches ran


@pytest.mark.parametrize(("verifier", "policy"), WAITING)
def test_these_wait_and_so_run_after_it(monkeypatch, verifier, policy):
    step, given = step_of(verifier, policy), logits_and_coins()
    with no_uploads(monkeypatch), pytest.raises(Waited, match="waits"):
        step(given)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_round_does_not_wait(monkeypatch, tiny, temperature):
    models = [CachedModel(model, 64, BATCH, fast_forward=True) for model in tiny]
    inputs = Inputs(BATCH, WIDTH, WIDTH, torch.device("cpu"))
    for name in ("counts", "coins", "tokens", "lengths", "draft_lengths"):
        setattr(inputs, name, pretended(getattr(inputs, name)))
    inputs.table[:] = 0.5
    inputs.upload([[3, 4, 2, 3], [5, 5, 1, 2]])
    step = torch_step(
        find_verifier("chain"), Assignment((ct.policy("cactus:delta=0.1"),)), temperature
    )
    round_ = Round(inputs, *map(StaticForward, models), temperature, step)
    with torch.inference_mode(), no_uploads(monkeypatch):
        done = round_(32)
    assert done.report.is_cuda and done.report.shape == (BATCH, WIDTH + 2)
    report = done.report.as_subclass(torch.Tensor)
    assert bool(((report >= 0) & (report < 24)).all())


def test_the_pretence_is_seen_through():
    tensor = pretended(torch.ones(3))
    for look in (bool, float, int, torch.Tensor.tolist, lambda x: (x + 1).sum().item()):
        with pytest.raises(Waited):
            look(tensor[:1])
    with pytest.raises(Waited):
        tensor[tensor > 0]


def test_one_upload_and_one_read_a_round(monkeypatch, shipped):
    """The host reads one tensor a round; all else that it knows is what it uploaded."""
    reads = []
    reader = torch.Tensor.tolist

    def counted(tensor):
        reads.append(tuple(tensor.shape))
        return reader(tensor)

    ids = torch.randint(1, 2048, (2, 7), generator=torch.Generator().manual_seed(0))
    options = {"policy": "cactus:delta=0.1", "max_new_tokens": 12, "meter": False}
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    result = generate(
        shipped.target, shipped.draft, ids, num_draft_tokens=3, **options, device_loop=True
    )
    reports = reads[reads.index((2, 5)) :]  # before them, the prompt and what tells the models
    assert reports == [(2, 5)] * result.target_calls


@pytest.mark.gpu
def test_what_waits_is_noticed():
    device = torch.device("cuda")
    value = torch.ones(3, device=device)
    assert never_waits(lambda: value + 1, device)
    assert not never_waits(lambda: float(value.sum()), device)
