"""Knobs arrive in the type they are annotated with; what cannot be read raises."""

from dataclasses import dataclass
from typing import Literal, Optional

import pytest

import cactus_theory as ct
from cactus_theory.policies import FixedTarget
from cactus_theory.policies.knob_values import converted
from cactus_theory.policies.registry import POLICIES


@dataclass(frozen=True)
class Knobs(FixedTarget):
    """A policy with a knob of every kind."""

    share: float
    top: int = 5
    strictly: bool = True
    word: str = "kl"
    how: Literal["sq", "exp"] = "sq"
    cut: int | None = None
    most: Optional[float] = None  # noqa: UP045  the older spelling is read, too
    name = "knobs"

    def target(self, q, p, path=None):
        return q


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES, "known", dict(POLICIES.known))


def values(rule: ct.Policy) -> list[object]:
    return [getattr(rule, name) for name in rule.__dataclass_fields__]


def test_text_becomes_what_the_annotation_says(registry: None) -> None:
    ct.register("knobs")(Knobs)
    rule = ct.policy("knobs:share=.5,top=3,strictly=no,word=3,how=exp,cut=none,most=2")
    assert values(rule) == [0.5, 3, False, "3", "exp", None, 2.0]
    assert list(map(type, values(rule))) == [float, int, bool, str, str, type(None), float]
    assert values(ct.policy("knobs:share=1,cut=7"))[5] == 7
    assert ct.policy(rule.spec) == rule
    assert values(ct.policy(Knobs, share=1, top="4"))[:2] == [1.0, 4]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"share": "x"}, "share: must be a number; got 'x'"),
        ({"share": [1]}, r"share: must be a number; got \[1\]"),
        ({"top": "2.5"}, "top: must be a whole number; got '2.5'"),
        ({"top": True}, "top: must be a whole number; got True"),
        ({"top": "inf"}, "top: must be a whole number; got 'inf'"),
        ({"strictly": "maybe"}, "strictly: must be true or false; got 'maybe'"),
        ({"word": 3}, "word: must be text; got 3"),
        ({"how": "log"}, "how: must be one of sq, exp; got 'log'"),
        ({"cut": "all"}, "cut: must be a whole number; got 'all'"),
        ({"shard": 1}, "policy: Knobs takes the knobs share, top, .*; got 'shard'"),
        ({"top": 1}, "policy: Knobs needs the knob share; got 'Knobs'"),
    ],
)
def test_what_cannot_be_read_is_named(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ct.policy(Knobs, **({"share": 1.0} if set(knobs) - {"share", "top"} else {}) | knobs)


def test_a_policy_is_taken_to_other_knobs() -> None:
    assert ct.policy(ct.policy("cactus:delta=1"), delta="2").spec == "cactus:delta=2.0"
    with pytest.raises(ValueError, match="policy: cactus takes the knobs delta; got 'price'"):
        ct.policy(ct.policy("cactus:delta=1"), price=2)
    with pytest.raises(ValueError, match="exactly one must be given"):
        ct.policy(ct.policy("band:delta=1"), price=2)


def scaled(q, p, n, *, alpha: float = 0.5, top=3, wide=False, limit: "float | None" = None):
    """Keep with alpha q/p."""
    return min(1, alpha * q[n] / p[n])


def test_knobs_of_a_function() -> None:
    made = ct.policy(ct.rule(scaled), alpha="1", top="4", wide="true", limit="none")
    assert values(made) == [1.0, 4, True, None]
    assert ct.policy(ct.rule(scaled), top=0.5).top == 0.5  # no annotation
    with pytest.raises(ValueError, match="policy: scaled takes the knobs alpha, top, .*'delta'"):
        ct.policy(ct.rule(scaled), delta=1)


def test_a_function_is_registered(registry: None) -> None:
    mine = ct.register("mine")(ct.rule(scaled, direction=1))
    assert mine.spec == "mine:alpha=0.5,top=3,wide=False,limit=None"
    made = ct.policy("mine:alpha=.25")
    assert made == ct.policy(mine, alpha=0.25) == ct.policy(made.spec)
    entry = ct.list_policies()["mine"]
    assert entry["summary"] == "Keep with alpha q/p." and entry["declares"] == "no budget"
    assert entry["knobs"] == {"alpha": 0.5, "top": 3, "wide": False, "limit": None}
    with pytest.raises(ValueError, match="policy: mine takes the knobs .*; got 'delta'"):
        ct.policy("mine:delta=1")
    ct.register("mine")(ct.rule(scaled))  # the same function, read again
    with pytest.raises(ValueError, match="must not be registered already; got 'mine'"):
        ct.register("mine")(ct.rule(lambda q, p, n: 1.0))


@pytest.mark.parametrize("name", ["", "a:b", "a,b", "a b"])
def test_a_name_that_no_spec_can_hold(name: str) -> None:
    with pytest.raises(ValueError, match="name: must be a word"):
        ct.register(name)


def test_only_policies_are_registered() -> None:
    with pytest.raises(TypeError, match="register: must be a Policy class or a function under"):
        ct.register("plain")(scaled)


def test_what_no_annotation_describes_passes_through() -> None:
    assert converted("x", {1: 2}, dict[int, int]) == {1: 2}
