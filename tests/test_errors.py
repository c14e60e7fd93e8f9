"""What public functions are given and must not be is refused by name, rule and value."""

import json
import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory import losses
from cactus_theory.cli import main
from cactus_theory.divergences import Divergence
from cactus_theory.traces import Cycle, Trace, save_trace
from tests.rows import pair

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
ROWS = pair(6, 7, seed=4)[0]
HOT = torch.nn.functional.one_hot(torch.tensor([0, 6, 2, 3, 3, 1]), 7).double()
HALF, STRICT = [0.5, 0.5], ct.policy("speculative")
TARGET = torch.zeros(3, 5)
NESTED = torch.nested.nested_tensor([torch.tensor(Q)], layout=torch.jagged)


# fmt: off
VALUES = [
    # promises
    (lambda: ct.EventBounds(), "cap, per_token: must be one, .* got neither"),
    (lambda: ct.EventBounds(cap=1, per_token=1), "cap, per_token: .* got both"),
    (lambda: ct.EventBounds(per_token=0.1),
     "tokens: must be given with per_token, .* got per_token 0.1 alone"),
    (lambda: ct.EventBounds(cap=-1), "cap: must lie in"),
    (lambda: ct.EventBounds(cap=math.nan), "cap: must lie in"),
    (lambda: ct.EventBounds(cap=1, rate=1.5), "rate: must lie in"),
    (lambda: ct.EventBounds(cap=1, burst=1), "burst: must lie in"),
    (lambda: ct.EventBounds(per_token=1, tokens=0), "tokens: must be an integer of at least 1"),
    (lambda: ct.EventBounds(per_token=1, tokens=10**400),
     r"tokens: must be below 2\^63; got one of 1329 bits"),
    (lambda: ct.EventBounds(cap=1, lossless=-1), "lossless: must be an integer of at least 0"),
    (lambda: ct.confidence_bound([], 0.5), "readings: must be at least one"),
    (lambda: ct.confidence_bound([-0.1], 0.5), "readings: must lie in"),
    (lambda: ct.confidence_bound([0.6], 0.5), "readings: must lie in .*0.5]; got 0.6"),
    (lambda: ct.confidence_bound([math.nan], 0.5), "readings: must lie in"),
    (lambda: ct.confidence_bound([0.1], cap=math.inf), "cap: must lie in"),
    (lambda: ct.confidence_bound([0.1], 0.5, alpha=0), "alpha: must lie in"),
    # losses
    (lambda: losses.overlap(TARGET, TARGET[:, :4]), "draft_logits: shape must equal that of"),
    # divergences and specs
    (lambda: ct.divergence("nothing"), "divergence: must be one of kl, .*; got 'nothing'"),
    (lambda: ct.divergence("kl:a=2"), "divergence: kl takes no knobs; got 'kl:a=2'"),
    (lambda: ct.divergence("alpha"), "divergence: alpha needs exactly the knob a; got 'alpha'"),
    (lambda: ct.divergence("alpha:a"), "spec: knobs must read knob=value; got 'a' in 'alpha:a'"),
    (lambda: ct.divergence("alpha:a=1"), "a: must not be 0 or 1 .*; got '1'"),
    (lambda: ct.divergence("alpha:a=0"), "a: must not be 0 or 1 .*; got '0'"),
    (lambda: ct.divergence("alpha:a=17"), r"a: must lie in \[-16, 16\]; got '17'"),
    (lambda: ct.divergence("alpha:a=nan"), "a: must lie in .*; got 'nan'"),
    (lambda: ct.divergence("renyi:a=1"), "a: must not be 1 .*; got '1'"),
    (lambda: ct.divergence("renyi:a=0"), r"a: must lie in \(0, 16\]; got '0'"),
    (lambda: ct.divergence("renyi:a=x"), "a: must be a number; got 'x'"),
    (lambda: ct.divergence("total_variation").slope_inverse(torch.tensor([0.1])),
     "no inverse slope"),
    (lambda: ct.policy("top_k", k=10**400), r"k: must be below 2\^63; got one of 1329 bits"),
    (lambda: ct.policy("top_k:k=99999999999999999999"), "k: must be a whole number; got"),
    (lambda: ct.policy("band"), "delta, price: exactly one must be given; got none of them"),
    (lambda: ct.policy("band:price=1,divergence=max_divergence"),
     "price: max_divergence has no one-to-one price; name delta= instead; got"),
    (lambda: ct.selection_law(Q, P, k=10**400), r"k: must be below 2\^63"),
    (lambda: ct.pooled_frontier(Q, P, points=10**30), r"points: must be below 2\^63"),
]
TYPES = [
    (lambda: ct.emitted_law(STRICT, NESTED, torch.tensor(P)),
     "target_probs: must be dense rows; got a nested tensor"),
    (lambda: losses.overlap(TARGET, TARGET.long()), "draft_logits: must be a tensor of"),
    (lambda: ct.divergence(3), "divergence: must be a spec string or a Divergence; got 3"),
]
# of emitted_law and of audit
OF_ROWS = [
    (ValueError, STRICT, (HALF, [0.5, 0.6]), None, "draft_probs: every row must sum to 1"),
    (TypeError, 3, (HALF, HALF), None, "policy: must be a spec string or a Policy; got 3"),
    (ValueError, "cactus", (HALF, HALF), None, "cactus needs the knob delta; got 'cactus'"),
    (ValueError, STRICT, (ROWS, None), None, "exactly one must be given; got neither of them"),
    (ValueError, STRICT, (ROWS, HOT), [0] * 6, "exactly one must be given; got both of them"),
    (ValueError, STRICT, (ROWS, None), [7] * 6, r"draft_token_ids: must lie in \[0, 7\); got 7"),
    (ValueError, STRICT, (ROWS, None), -1, r"draft_token_ids: must lie in \[0, 7\); got -1"),
    (TypeError, STRICT, (ROWS, None), [0.5] * 6,
     "draft_token_ids: must hold whole numbers; got dtype"),
    (ValueError, STRICT, (ROWS, None), [1, 2], r"must broadcast with the rows' \(6,\); got \(2,\)"),
]
# fmt: on
CASES = [(*own, ValueError) for own in VALUES] + [(*own, TypeError) for own in TYPES]


@pytest.mark.parametrize(("call", "said", "kind"), CASES, ids=[own[1] for own in CASES])
def test_what_is_wrong_is_refused_by_name(call, said, kind):
    with pytest.raises(kind, match=said):
        call()


@pytest.mark.parametrize(("kind", "rule", "rows", "ids", "said"), OF_ROWS)
@pytest.mark.parametrize("call", [ct.emitted_law, ct.audit])
def test_rules_and_rows_that_are_none_are_refused(call, kind, rule, rows, ids, said):
    given = {} if ids is None else {"draft_token_ids": ids}
    with pytest.raises(kind, match=said):
        call(rule, *rows, **given)


def test_a_spec_is_the_policy_that_it_names():
    assert np.array_equal(ct.emitted_law("band:price=1", Q, P), ct.emitted_law(BAND, Q, P))
    assert ct.audit("band:price=1", Q, P).acceptance == ct.audit(BAND, Q, P).acceptance


def test_a_divergence_has_a_value_of_its_own():
    with pytest.raises(NotImplementedError):
        Divergence().value(torch.ones(1), torch.ones(1))


THREE = torch.tensor(np.stack([[Q] * 3])), torch.tensor(np.stack([[P] * 2]))
IDS, PARENTS = torch.tensor([[2, 2]]), torch.tensor([[-1, 0]])
BAND = ct.policy("band:price=1")
VERIFY = [
    lambda policy, ids, **options: ct.verify_chain(policy, *THREE, ids, **options),
    lambda policy, ids, **options: ct.verify_block(policy, *THREE, ids, **options),
    lambda policy, ids, **options: ct.verify_tree(policy, *THREE, ids, PARENTS, **options),
]
OF_ROWS = [
    lambda q, p: ct.emitted_law(BAND, q, p),
    lambda q, p: ct.audit(BAND, q, p).acceptance,
    lambda q, p: ct.optimal_acceptance(q, p, delta=0.1).target,
    lambda q, p: ct.pooled_acceptance(q[None], p[None], delta=0.1).target,
    lambda q, p: ct.selection_law(q, p),
]


@pytest.mark.parametrize("verify", VERIFY)
def test_a_verifier_names_what_is_no_policy_and_no_token(verify):
    for policy in (None, 3, [BAND, 3]):
        with pytest.raises(TypeError, match=r"policy: must be a spec string or a Policy; got"):
            verify(policy, IDS)
    with pytest.raises(ValueError, match="policy: must be one of speculative"):
        verify("bend:price=1", IDS)
    coins = torch.full((1, 2), 0.9), torch.full((1, 3 if verify is VERIFY[2] else 1), 0.9)
    coins = coins if verify is VERIFY[2] else (coins[0], coins[1][:, 0])
    for spec in ("band:price=1", ["band:price=1"]):
        own, same = (verify(policy, IDS, coins=coins).output_token_ids for policy in (spec, BAND))
        assert own.tolist() == same.tolist()
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


def test_a_selection_law_is_exact_for_any_number_of_drafts():
    source = np.random.default_rng(0)
    for vocab in (3, 400):
        q, p = source.dirichlet(np.full(vocab, 0.3), size=2)
        for k in (1, 7, 10**6, 10**9, 10**15):
            law = ct.selection_law(q, p, k=k)
            assert abs(law.sum() - 1) < 1e-13 and (law >= 0).all()


def cycle(ids=(0, 1), position=0):
    q = THREE[0][0]
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

    @ct.rule(vectorised=True)
    def takes(q, p, n):
        return np.take_along_axis(q, n[:, None], -1)[:, 0]

    for rule in (mixed, takes):
        with pytest.raises(TypeError, match=f"{rule.name}.*must not mix numpy with torch"):
            ct.emitted_law(rule, Q, P)
