"""Every registered verifier has every property; every planted fault is seen by its own."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.testing import (
    Bounds,
    assert_verifier_properties,
    verifier_property,
)
from cactus_theory.testing.verifiers import POLICIES, VERIFIER_PROPERTIES, trees
from cactus_theory.verify import Assignment, Chain, Draft, Verdict, find_verifier, verifiers
from cactus_theory.verify.chain import chain_on_device
from tests.amounts import amount, some
from tests.rules import RULES, of_each
from tests.testing.faulty_verifiers import FAULTS, Fading
from tests.testing.plain_verifier import Plain

# trees of a policy: the bands take a solve a row, other policies a line
CHEAP, SOLVED = amount(8, 100), amount(2, 50)
# decides a chain by the same code as the block, to the last bit (tests/verify/test_tree.py)
AS_BLOCK = {"tree"}
KINDS = of_each(2)


def trees_for(spec):
    return SOLVED if spec.startswith("band") else CHEAP


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("name", verifiers())
def test_registered_verifiers_have_every_property(name, spec):
    checked = assert_verifier_properties(name, policies=[spec], examples=trees_for(spec))
    assert checked == trees_for(spec)


def test_a_naive_verifier_has_every_property():
    examples = amount(6, 50)
    specs = ["speculative", "mixture:alpha=0.3"]
    assert assert_verifier_properties(Plain(), policies=specs, examples=examples) == 2 * examples


@pytest.mark.parametrize("verifier", [Plain(), "block"])
def test_a_policy_may_depend_on_the_path(verifier):
    assert_verifier_properties(verifier, policies=[Fading()], examples=amount(6, 50))


class OnDevice(Chain):
    """The chain as it is decided on a device, here on a CPU."""

    name = "chain on a device"

    def verify(self, assigned, target_probs, draft, accept, draw):
        if not draft.token_ids.shape[1]:
            return super().verify(assigned, target_probs, draft, accept, draw)
        found = chain_on_device(assigned, target_probs, draft, accept, draw)
        return Verdict(draft.token_ids, *found)


def test_the_chain_on_a_device_has_every_property():
    specs = ["cactus:delta=0.1", "typical"]
    assert_verifier_properties(OnDevice(), policies=specs, examples=amount(3, 50))


@pytest.mark.parametrize("name", [name for name in verifiers() if name not in AS_BLOCK])
@pytest.mark.parametrize("spec", some(KINDS, 2))
def test_every_policy_that_a_verifier_follows(name, spec):
    try:
        find_verifier(name).check(RULES[spec])
    except ValueError:
        return
    assert_verifier_properties(name, policies=[RULES[spec]], examples=amount(2, 24))


# (trees with deterministic tokens are enumerated in tests/verify/test_tree.py)
BANDS = (
    "price=0.7", "price=0.7,per_row=True", "price=0.5,divergence=pearson_chi2",
    "price=0.5,divergence=reverse_kl,per_row=True", "delta=0.05",
    "delta=0.05,divergence=renyi:a=2",
)  # fmt: skip
BOXES = ("head=0.6", "floor=0", "hold=1", "head=0.6,floor=1,hold=0", "floor=0+1")
BOXED = [(name, f"band:{band},{box}") for name in ("chain", "block") for band in BANDS
         for box in BOXES]  # fmt: skip


@pytest.mark.parametrize(("name", "spec"), some(BOXED, 4))
def test_boxed_bands_have_every_property(name, spec):
    assert_verifier_properties(name, policies=[spec], examples=amount(2, 24))


# prices at which an edge has no digits left, or is beside 1
FAR = (
    "band:price=1e-20,divergence=pearson_chi2", "band:price=1e-300,divergence=neyman_chi2",
    "band:price=1e300,divergence=alpha:a=3", "band:price=1e-8,divergence=alpha:a=10,hold=0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "spec"), some([(name, spec) for name in ("block", "chain") for spec in FAR], 2)
)
def test_bands_of_far_prices_have_every_property(name, spec):
    assert_verifier_properties(name, policies=[spec], examples=amount(12, 24))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title.replace(" ", "-"))
def test_planted_faults_are_seen(fault):
    with pytest.raises(AssertionError, match=f"breaks the property {fault.prop}\n") as found:
        assert_verifier_properties(
            fault.verifier, policies=[fault.policy], properties=[fault.prop], examples=24
        )
    assert "expected" in str(found.value) and "again     assert_verifier" in str(found.value)


def test_every_property_sees_something():
    assert {fault.prop for fault in FAULTS} == set(VERIFIER_PROPERTIES)


def test_the_message_shows_a_small_tree():
    fault = FAULTS[2]
    with pytest.raises(AssertionError) as found:
        assert_verifier_properties(fault.verifier, policies=["speculative"], examples=24)
    said = str(found.value)
    assert "plain with speculative breaks the property next_token_has_the_law\n" in said
    assert "V=3, K=2, smooth rows" in said and "perhaps   a residual of another row" in said
    assert "after [2]: q = [" in said and "after [1 0]: q = [" in said


def test_trees_are_what_they_say():
    groups = trees(264)
    kinds = {kind for group in groups for kind in group.kinds}
    assert len(kinds) == 10 and sum(len(group.kinds) for group in groups) == 264
    for group in groups:
        assert len(group.paths) == group.vocab**group.depth
        for rows in (*group.q, *group.p):
            assert (rows >= 0).all() and ((rows.sum(-1) - 1).abs() <= 2.0**-51).all()
        assert ((group.reached[-1].sum(-1) - 1).abs() < 1e-12).all()
    heavy = [g.q[0][g.kinds.index("heavy"), 0] for g in groups if "heavy" in g.kinds]
    assert all(float(row.sum()) == 1 + 2.0**-52 for row in heavy)
    first, again = (trees(count)[0].q[0][0] for count in (12, 30))
    assert torch.equal(first, again)


def test_the_joint_law_is_that_of_a_tree_worked_out_by_hand():
    """K = 2, V = 2, h = q: P and the residuals of block verification in fractions."""
    q = torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    law = find_verifier("block").law(
        Assignment((ct.policy("speculative"),)),
        q,
        Draft(torch.tensor([[0, 1]]), [2], p),
    )
    # P = 1, 1/2, 3/4; R_1 = 0: the first place never ends the path
    assert law.alive.tolist() == [[1.0, 0.5, 0.75]]
    assert law.stop.tolist() == [[0.25, 0.0, 0.75]]
    assert law.last[0, 0].tolist() == [0.0, 1.0]


def test_a_property_of_your_own_is_checked():
    before = dict(VERIFIER_PROPERTIES)
    try:

        @verifier_property(hint="a draft of good tokens")
        def refuses_everything(seen):
            """No drafted token is ever accepted."""
            yield Bounds(seen.stopped[..., 1:].sum((1, 2)), 0, 0, "accepted")

        with pytest.raises(AssertionError, match="refuses_everything\n.* No drafted token"):
            assert_verifier_properties("chain", properties=["refuses_everything"], examples=1)
        with pytest.raises(ValueError, match="verifier_property: silent needs a docstring"):

            @verifier_property()
            def silent(seen):
                yield

    finally:
        VERIFIER_PROPERTIES.clear()
        VERIFIER_PROPERTIES.update(before)


class Branching(Chain):
    name = "branching"
    drafts = ("tree",)


def test_what_cannot_be_checked_raises():
    with pytest.raises(ValueError, match=r"verifier: must take chains; branching takes"):
        assert_verifier_properties(Branching())
    with pytest.raises(ValueError, match="properties: must be one of .*; got 'speed'"):
        assert_verifier_properties("chain", properties=["speed"])
    with pytest.raises(ValueError, match="block needs a policy with a row of its own"):
        assert_verifier_properties("block", policies=["typical"])
    with pytest.raises(ValueError, match="examples"):
        assert_verifier_properties("chain", examples=0)
