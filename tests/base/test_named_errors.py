"""Numbers, rows, ids, files and rules that are not what they must be are refused by name."""

import json

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.traces import Cycle, Trace, save_trace

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
ROWS = torch.tensor(np.stack([[Q] * 3])), torch.tensor(np.stack([[P] * 2]))
IDS, PARENTS = torch.tensor([[2, 2]]), torch.tensor([[-1, 0]])
BAND = ct.policy("band:price=1")
VERIFY = [
    lambda policy, ids, **options: ct.verify_chain(policy, *ROWS, ids, **options),
    lambda policy, ids, **options: ct.verify_block(policy, *ROWS, ids, **options),
    lambda policy, ids, **options: ct.verify_tree(policy, *ROWS, ids, PARENTS, **options),
]
OF_ROWS = [
    lambda q, p: ct.emitted_law(BAND, q, p),
    lambda q, p: ct.audit(BAND, q, p).acceptance,
    lambda q, p: ct.optimal_acceptance(q, p, delta=0.1).target,
    lambda q, p: ct.frontier(q, p).acceptance,
    lambda q, p: ct.pooled_acceptance(q[None], p[None], delta=0.1).target,
    lambda q, p: ct.selection_law(q, p),
]


@pytest.mark.parametrize("verify", VERIFY)
def test_a_verifier_names_what_is_no_policy_and_no_token(verify):
    for policy in (None, 3, "band:price=1"):
        with pytest.raises(TypeError, match=r"policy: must be a Policy or a list of them; got"):
            verify(policy, IDS)
    for validate in (True, False):
        for ids in ([[2, 2]], np.array([[2, 2]]), IDS.int()):
            with pytest.raises(TypeError, match="draft_token_ids: must be an int64 tensor; got"):
                verify(BAND, ids, validate=validate)
        for wrong in (3, -2):
            ids = torch.tensor([[2, wrong]])
            with pytest.raises(ValueError, match=rf"draft_token_ids: .*\[0, 3\).*got {wrong}"):
                verify(BAND, ids, validate=validate)


@pytest.mark.parametrize("call", OF_ROWS)
def test_rows_of_another_byte_order_are_read_and_masked_ones_refused(call):
    for kind in ("f8", "f4"):
        q, p = (row.astype(kind) / row.astype(kind).sum() for row in (Q, P))
        native = call(q, p)
        assert np.array_equal(call(q.astype(">" + kind), p.astype(">" + kind)), native)
    with pytest.raises(TypeError, match="target_probs: must be rows without a mask"):
        call(np.ma.array(Q, mask=[0, 0, 1]), P)
    with pytest.raises(TypeError, match="target_probs: must hold floats; got dtype object"):
        call(np.array([Q, P, None], dtype=object)[:2], P)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.tensor(Q)], layout=torch.jagged)
    with pytest.raises(TypeError, match="target_probs: must be dense rows; got a nested tensor"):
        ct.emitted_law(BAND, nested, torch.tensor(P))


def test_a_selection_law_is_exact_for_any_number_of_drafts():
    source = np.random.default_rng(0)
    for vocab in (3, 400):
        q, p = source.dirichlet(np.full(vocab, 0.3), size=2)
        for k in (1, 7, 10**6, 10**9, 10**15):
            law = ct.selection_law(q, p, k=k)
            assert abs(law.sum() - 1) < 1e-13 and (law >= 0).all()


def cycle(ids=(0, 1), position=0):
    q = ROWS[0][0]
    p = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    return Cycle(0, position, torch.tensor(ids), q, p)


def test_traces_that_no_decode_has_written_are_refused(tmp_path, capsys):
    sizes = {"vocab_size": 3, "num_draft_tokens": 2}
    with pytest.raises(ValueError, match="got 0 for token 2 in draft row 1"):
        save_trace(tmp_path / "excluded", [[cycle((0, 2))]], **sizes)
    for position in (-4, 2**40):
        with pytest.raises(
            ValueError, match=rf"position: must lie in \[0, 2\^31\); got {position}"
        ):
            save_trace(tmp_path / f"at{position}", [[cycle(position=position)]], **sizes)
    save_trace(tmp_path / "twice", [[cycle()], [cycle()]], **sizes)
    manifest = tmp_path / "twice" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"] = content["shards"][:1] * 2
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="each shard must be listed once; got .* 2 times"):
        Trace.open(tmp_path / "twice")
    save_trace(tmp_path / "empty", [[]], **sizes)
    asked = ["--rate", "0.9", "--cap", "0.1", "--tokens", "10", "--trace", str(tmp_path / "empty")]
    assert main(["promise", *asked]) == 2
    assert "--trace: must hold rounds" in capsys.readouterr().err


def test_rules_that_mix_numpy_with_torch_are_named():
    @ct.rule(residual=lambda q, p: np.maximum(q - torch.tensor(p), 0))
    def mixed(q, p, n):
        return min(1, q[n] / p[n])

    @ct.rule(arrays="torch", vectorised=True)
    def takes(q, p, n):
        return np.take_along_axis(q, n[:, None], -1)[:, 0]

    for rule in (mixed, takes):
        with pytest.raises(TypeError, match=f"{rule.name}.*must not mix numpy with torch"):
            ct.emitted_law(rule, Q, P)
