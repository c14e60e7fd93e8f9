"""What a row is charged is the same by compiled loops and by its law, written out."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.verify import find_verifier
from cactus_theory.verify.node import _charges_in_torch, charge_nodes, nodes_of_rows
from tests.amounts import some
from tests.rows import pair

# of sums of a few numbers, and of float32 rows as they are and over their sums
ROUNDING, SINGLE = 1e-12, 1e-6
SPECS = (
    "speculative", "band:price=0.5", "band:price=0.5,per_row=True", "band:delta=0.1",
    "band:price=0.4,head=0.5,hold=1", "band:price=0.4,divergence=reverse_kl,floor=0+3",
    "cactus:delta=0.2", "lenience:lenience=0.6", "mixture:alpha=0.3,support=free",
    "fuzzy:threshold=0.1", "fuzzy:threshold=0.9",
)  # fmt: skip
KINDS = ("kl", "jensen_shannon", "reverse_kl", "pearson_chi2", "renyi:a=0.5", "max_divergence")


@pytest.mark.parametrize("vocab", [7, 2050])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spec", SPECS)
def test_charges_are_those_of_the_law(spec, dtype, vocab):
    spec = spec.replace("hold=1", f"hold={vocab - 1}")  # of the last part of a row
    q, p = (rows.to(dtype) for rows in pair(12, vocab, seed=5, kinds=("zeros", "smooth")))
    alive, ids = torch.linspace(0.1, 1.0, 12, dtype=torch.float64), p.argmax(-1)
    for name in ("chain", "block") if "free" not in spec else ("chain",):
        verifier = find_verifier(name)
        reached = alive.tolist() if verifier.by_path else None
        nodes = nodes_of_rows(verifier, ct.policy(spec), q, p, reached)
        for kind in map(ct.divergence, some(KINDS, 3)):
            charge_nodes(nodes, kind)
            for node, written in zip(nodes, _charges_in_torch(nodes, kind), strict=True):
                near = ROUNDING if dtype == torch.float64 else SINGLE
                for found, expected in zip(node.charge(kind), written, strict=True):
                    assert found == pytest.approx(expected, rel=near, abs=near)
        for node, token in zip(nodes, ids.tolist(), strict=True):
            assert node.h(token) == pytest.approx(float(node.law[token]), abs=SINGLE)


@pytest.mark.parametrize("spec", ["speculative", "band:delta=0", "band:price=inf", "band:price=1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_target_and_draft_are_one_nothing_is_refused_whatever_their_sum_is(spec, dtype):
    """Rows of half precision that nobody checked: both sum to 1.0017 here, and h to 1."""
    q = torch.tensor([[[0.040771484375, 0.9609375], [1.0, 0.0]]], dtype=dtype)
    coins = torch.tensor([[0.9997]]).double(), torch.tensor([0.5]).double()
    ids, options = torch.tensor([[1]]), {"coins": coins, "validate": False}
    for verify in (ct.verify_chain, ct.verify_block):
        assert verify(ct.policy(spec), q, q[:, :1], ids, **options).num_accepted.tolist() == [1]
