import pytest
import torch

from cactus_theory.base import roots
from cactus_theory.divergences.classical import KL
from cactus_theory.policies.policy import accept_probability
from cactus_theory.verify.draw import pick
from tests import shapes

pytest.importorskip("beartype", reason="shape annotations are checked with beartype")


@pytest.fixture(autouse=True)
def every_call(monkeypatch):
    monkeypatch.setattr(shapes, "ONE_IN", 1)


def test_a_wrong_shape_inside_the_package_raises():
    with pytest.raises(TypeError, match="draw"):
        pick(torch.full((2, 3), 1 / 3), torch.zeros(2, 1))


def test_axes_of_one_name_must_agree():
    with pytest.raises(TypeError, match="rows"):
        pick(torch.full((2, 3), 1 / 3), torch.zeros(5))


def test_a_wrong_dtype_raises():
    evaluate = lambda x: (x, torch.ones_like(x))  # noqa: E731
    whole = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="over"):
        roots.convex_root(evaluate, whole, torch.zeros(2), torch.zeros(2))


def test_annotations_without_shapes_are_left_alone():
    assert accept_probability(torch.ones(2), torch.ones(2)).tolist() == [1.0, 1.0]
    assert KL().f(torch.ones(())).item() == 0.0
