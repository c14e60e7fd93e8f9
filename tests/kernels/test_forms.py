"""The torch forms on a device against float64 on the CPU."""

import pytest
import torch

import cactus_theory as ct

# two float64 evaluations of one formula in different summation orders, V up to 151,936
AGREEMENT = 1e-9
ROWS, WIDTH = 4, 3
CHAIN = ("speculative", "typical", "cactus:delta=0.1", "cactus_exact:delta=0.1")
CHAIN += ("band:delta=0.1", "band:price=2")
BLOCK = ("speculative", "band:price=2")
CPU = torch.device("cpu")


def families(vocab):
    """Yield named target and draft rows (ROWS, V), float64, from ordinary to extreme."""
    generator = torch.Generator().manual_seed(0)

    def noise():
        return torch.randn(ROWS, vocab, generator=generator, dtype=torch.float64)

    base = 3 * noise()
    q, p = base.softmax(-1), (base + noise()).softmax(-1)
    yield "random", q, p
    spiky = (25 * noise()).softmax(-1)
    yield "spiky, to 1e-30 and below", spiky, (25 * noise()).softmax(-1)
    place = torch.arange(vocab)
    halves = torch.where(place % 2 == 0, q, 0.0), torch.where(place % 3 > 0, p, 0.0)
    yield "zeros", *(row / row.sum(-1, keepdim=True) for row in halves)
    one_hot = torch.zeros_like(p)
    one_hot[:, 1] = 1.0
    yield "one-hot draft", q, one_hot
    yield "equal", q, q.clone()


def answers(q, p):
    """Yield what is compared: closed forms, exact laws, and whole verification steps."""
    optimum = ct.optimal_acceptance(q, p, delta=0.1)
    numbers = torch.stack([optimum.acceptance, optimum.gap], -1)
    yield "optimum", torch.cat([optimum.target, numbers], -1)
    for spec in CHAIN:
        yield f"emitted law, {spec}", ct.emitted_law(ct.policy(spec), q, p)
        yield f"verify_chain, {spec}", verified(ct.verify_chain, spec, q, p)
    for spec in BLOCK:
        yield f"verify_block, {spec}", verified(ct.verify_block, spec, q, p)


def verified(verify, spec, q, p):
    """Return the output of one step whose every choice is fixed by coins."""
    ids = p.argmax(-1, keepdim=True).expand(-1, WIDTH).contiguous()
    coins = torch.linspace(0.05, 0.95, ids.numel(), dtype=torch.float64, device=q.device)
    draw = torch.linspace(0.9, 0.1, len(q), dtype=torch.float64, device=q.device)
    rows = [row[:, None].expand(-1, width, -1) for row, width in ((q, WIDTH + 1), (p, WIDTH))]
    given = {"coins": (coins.view(ids.shape), draw), "validate": False}
    return verify(ct.policy(spec), *rows, ids, **given).output_token_ids


def against_cpu(vocab, device):
    """Return what differs by more than rounding: its name and the family of rows."""
    wrong = []
    for family, q, p in families(vocab):
        for (name, found), (_, exact) in zip(
            answers(q.to(device), p.to(device)), answers(q, p), strict=True
        ):
            if not float((found.cpu().double() - exact.double()).abs().max()) <= AGREEMENT:
                wrong.append((name, family))
    return wrong


def test_every_form_and_family_is_compared(monkeypatch):
    assert against_cpu(7, CPU) == []
    monkeypatch.setattr("tests.kernels.test_forms.AGREEMENT", -1.0)
    assert len(against_cpu(7, CPU)) == 5 * 15


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [7, 1000, 32_000, 151_936])
def test_the_device_agrees_with_the_cpu(vocab):
    assert against_cpu(vocab, torch.device("cuda")) == []
