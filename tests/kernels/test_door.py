"""What is checked at the door, which policies have a kernel, and what the others do."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels import (
    Workspace,
    has_kernel,
    random_numbers,
    verify_logits,
)
from tests.amounts import THOROUGH, amount
from tests.kernels import checks as laws
from tests.rules import of_each

NUMBERS = torch.arange(2)
GIVEN = {
    "target_logits": torch.zeros(2, 3, 5),
    "draft_logits": torch.zeros(2, 2, 5),
    "draft_token_ids": torch.zeros(2, 2, dtype=torch.int64),
    "seeds": NUMBERS,
    "positions": NUMBERS,
}
WRONG = [
    ({"target_logits": torch.zeros(2, 2, 5)}, ValueError, "target_logits: shape"),
    ({"target_logits": torch.zeros(2, 3, 5, dtype=torch.float64)}, TypeError, "target_logits"),
    ({"target_logits": torch.zeros(5, 3, 2).mT.mT.permute(2, 1, 0)}, ValueError, "stride"),
    ({"target_logits": torch.zeros(6, 5)}, ValueError, "target_logits: shape must be"),
    ({"draft_token_ids": NUMBERS}, ValueError, "draft_token_ids: shape must be"),
    ({"draft_logits": torch.zeros(2, 3, 5)}, ValueError, "draft_logits: shape"),
    ({"draft_token_ids": torch.zeros(2, 2)}, TypeError, "draft_token_ids: must be int64"),
    ({"seeds": NUMBERS.int()}, ValueError, "seeds: must be int64"),
    ({"positions": torch.arange(3)}, ValueError, "positions: shape"),
    ({"lengths": torch.arange(3)}, ValueError, "lengths: shape"),
    ({"temperature": -1.0}, ValueError, "temperature: must lie"),
    ({"temperature": math.inf}, ValueError, "temperature: must lie"),
    ({"temperature": torch.ones(2, dtype=torch.float64)}, ValueError, "temperature: must be"),
    ({"verifier": "forest"}, ValueError, "verifier: must be one of"),
]


@pytest.mark.parametrize(("change", "kind", "message"), WRONG)
def test_wrong_arguments_are_named(change, kind, message):
    with pytest.raises(kind, match=message):
        verify_logits(ct.policy("speculative"), **{**GIVEN, **change})


def test_a_policy_without_a_row_of_its_own_is_refused_in_blocks():
    with pytest.raises(ValueError, match="verifier: block needs"):
        verify_logits(ct.policy("typical"), **GIVEN, verifier="block")


def test_a_workspace_of_other_sizes_is_refused(monkeypatch, device):
    with pytest.raises(ValueError, match="workspace: must be of"):
        verify_logits(
            ct.policy("speculative"), **{k: v.to(device) for k, v in GIVEN.items()},
            workspace=Workspace(2, 1, 5, device),
        )  # fmt: skip


def test_a_triton_without_groups_of_parameters_is_refused(monkeypatch, device):
    monkeypatch.setattr("triton.__version__", "3.3.1")
    with pytest.raises(ImportError, match="triton: must be 3.4 or later; got 3.3.1"):
        verify_logits(ct.policy("speculative"), **{k: v.to(device) for k, v in GIVEN.items()})


def test_which_policies_have_a_kernel():
    yes = {
        "speculative", "lenience:lenience=0.5", "mixture:alpha=0.3", "cactus:delta=1",
        "cactus_exact:delta=0.3", "band:price=2", "band:price=inf", "cactus_exact:delta=0",
        "band:price=2,per_row=True", "speculative:tilt=0.5",
    }  # fmt: skip
    no = {
        "typical", "top_k:k=3", "fuzzy:threshold=0.3", "band:delta=0.1",
        "band:price=2,divergence=reverse_kl", "cactus:delta=inf", "band:price=0.05",
        "band:price=1,head=0.2",
        "cactus_exact:delta=0.3,divergence=reverse_kl", "truncated:top_k=3",
    }  # fmt: skip
    assert {spec for spec in yes | no if has_kernel(ct.policy(spec))} == yes
    block = {"speculative", "band:price=2,per_row=True", "band:price=inf", "cactus_exact:delta=0",
             "speculative:tilt=0.5"}  # fmt: skip
    assert {spec for spec in yes if has_kernel(ct.policy(spec), "block")} == block


def test_subclasses_do_not_inherit_a_kernel():
    class Other(type(ct.policy("speculative"))):
        pass

    assert not has_kernel(Other())


@pytest.mark.parametrize("spec", of_each(2) if THOROUGH else ["typical", "fuzzy:threshold=0.2"])
def test_the_torch_path_gives_what_verify_chain_gives(spec):
    """By the same coins, at a temperature, with drafts that end at −1; no kernel is involved."""
    generator = torch.Generator().manual_seed(4)
    target, draft = (torch.randn(6, k, 9, generator=generator) for k in (4, 3))
    ids = draft.argmax(-1)
    ids[0, 1:] = -1
    seeds, rule = torch.arange(6), ct.policy(spec)
    verdict = verify_logits(
        rule, target, draft, ids, seeds=seeds, positions=seeds + 1, temperature=0.5
    )
    places = torch.arange(4).expand(6, -1)
    coins = (
        random_numbers.coins(seeds, seeds + 1, places[:, :3], random_numbers.ACCEPT),
        random_numbers.coins(seeds, seeds + 1, places[:, :1], random_numbers.DRAW)[:, 0],
    )
    rows = [(part.double() / 0.5).softmax(-1) for part in (target, draft)]
    expected = ct.verify_chain(rule, *rows, ids, coins=coins)
    assert torch.equal(verdict.output_token_ids, expected.output_token_ids)
    assert torch.equal(verdict.num_accepted, expected.num_accepted)


def test_excluded_tokens_stay_excluded():
    assert not laws.excluded_tokens("cpu", amount(1500, 60_000), 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_kernels_emit_no_excluded_token(device):
    assert not laws.excluded_tokens(device, amount(3, 60) if device == "cpu" else 10**8, 3)


def test_the_torch_path_is_greedy_at_zero():
    target = torch.tensor([[[0.0, 2.0, 1.0], [5.0, 0.0, 5.0]]] * 2)
    ids, draft = torch.tensor([[1], [2]]), torch.zeros(2, 1, 3)
    arguments = {"seeds": NUMBERS, "positions": NUMBERS, "temperature": 0.0}
    verdict = verify_logits(ct.policy("speculative"), target, draft, ids, **arguments)
    assert verdict.output_token_ids.tolist() == [[1, 0], [1, -1]]
