"""What a request may ask for, what refusals say, and that no request opens a file."""

import random
import sys
from types import SimpleNamespace

import pytest

import cactus_theory as ct
from cactus_theory.vllm import settings
from cactus_theory.vllm.admission import (
    LOSSLESS,
    OF_HOOK,
    OF_PROCESSOR,
    Admission,
    Cut,
    of_processor,
)
from cactus_theory.vllm.batch import verify_flat
from tests.amounts import amount
from tests.vllm.flat import random_batch

BAND = "band:price=2.0"
FAST = "cactus_exact:delta=0.1,divergence=renyi:a=2"
OFFERED = {"CACTUS_POLICIES": f" gentle = band:price=4;fast={FAST} ;"}


def admission(keys=OF_HOOK, **more):
    return Admission(settings.read({"CACTUS_POLICY": BAND} | OFFERED | more), keys)


def request(extra):
    return SimpleNamespace(extra_args=extra, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("gentle", "band:price=4.0"),
        ("fast", FAST),
        ("speculative", "speculative"),
        (None, BAND),
    ],
)
def test_a_request_names_its_policy(name, spec):
    assert admission().grant(request({"cactus": name, "other": 1})).policy.spec == spec


@pytest.mark.parametrize("extra", [None, {}, {"other": 3}])
def test_a_request_that_says_nothing_has_the_servers(extra):
    door = admission()
    assert door.grant(request(extra)).policy is door.settings.policy


BAD = ["bnad", "", "Gentle", "gentle ", "band:price=4", BAND, "price=4", "rules.py:mine", 3, True]
BAD += [[], {}, {"policy": "gentle"}, {"price": 4}, b"gentle", "g" * 10**7, 10**5000, object()]


@pytest.mark.parametrize("given", BAD, ids=lambda given: repr(type(given)))
def test_a_name_that_is_not_offered_is_refused_in_one_short_line(given):
    with pytest.raises(ValueError) as caught:
        admission().grant(request({"cactus": given}))
    said = str(caught.value)
    assert said.startswith("extra_args['cactus']: must be one of speculative, gentle, fast, as")
    assert "\n" not in said and said.isprintable() and len(said) < 250


def test_without_a_list_only_lossless_decoding_may_be_asked_for():
    door = Admission(settings.read({"CACTUS_POLICY": BAND}))
    assert door.policy_of("speculative") is LOSSLESS
    with pytest.raises(ValueError, match="must be one of speculative, as this server"):
        door.policy_of("band")


@pytest.mark.parametrize("key", ["cactus_polcy", "cactus-cap", "Cactus", "cactus_" + "x" * 10**5])
def test_a_key_that_nobody_reads_is_refused_by_name(key):
    door = admission(CACTUS_CAP="1")
    with pytest.raises(ValueError) as caught:
        door.grant(request({key: "gentle", "other": 1}))
    said = str(caught.value)
    assert key[:20] in said and "cactus, cactus_cap" in said and len(said) < 200
    door.grant(request({"other": 1, 3: 2, "kaktus": "price=4", " cactus": 1}))  # of others


@pytest.mark.parametrize("key", ["cactus_top_p", "cactus_top_k", "cactus_min_p", "cactus_margin"])
def test_a_hook_refuses_by_name_what_only_the_logits_processor_reads(key):
    with pytest.raises(ValueError, match=f"{key}: .*logits processor"):
        admission(CACTUS_MARGIN="1").grant(request({key: 1}))
    granted = admission(OF_PROCESSOR, CACTUS_MARGIN="1").grant(request({key: 1}))
    assert 1 in (granted.margin, granted.cut.top_k, granted.cut.top_p, granted.cut.min_p)


@pytest.mark.parametrize(
    ("cap", "given", "found"),
    [
        ("0.5", None, 0.5),
        ("0.5", 0.1, 0.1),
        ("0.5", "0", 0.0),
        ("inf", None, None),
        ("inf", 3, 3.0),
    ],
)
def test_a_cap_is_the_servers_or_lower(cap, given, found):
    extra = {} if given is None else {"cactus_cap": given}
    assert admission(CACTUS_CAP=cap).grant(request(extra)).cap == found


@pytest.mark.parametrize("given", [0.6, -1, "nan", True, [], 10**400, "much"], ids=str)
def test_a_cap_above_the_servers_is_refused(given):
    with pytest.raises(ValueError, match=r"cactus_cap: must lie in \[0, 0.5\]"):
        admission(CACTUS_CAP="0.5").grant(request({"cactus_cap": given}))


def test_a_server_without_caps_takes_none():
    with pytest.raises(ValueError, match="cactus_cap: must not be given"):
        admission().grant(request({"cactus_cap": 0.1}))


@pytest.fixture(scope="module")
def ear():
    """What a hook hears that no process can take off again: it listens where it is told to."""
    found = SimpleNamespace(listens=False, opened=[])

    def hear(event, given):
        if found.listens and event == "open":
            found.opened.append(given[0])

    sys.addaudithook(hear)
    return found


@pytest.fixture
def opened(ear):
    """Return a list of what this process opens."""
    ear.listens = True
    yield ear.opened
    ear.listens = False


NAMES = (*ct.list_policies(), "gentle", "fast", "x.py:f", "/etc/passwd", "\0", "Band", "", BAND)
VALUES = ("0", "0.5", "3", "-1", "inf", "nan", "1e-320", "1e400", "1_0", "٣", "none", "9" * 10**5)
VALUES += ("/dev/zero", "x.py:f", "%s", "\n", 1, float("nan"), 10**400, True, None, b"x", [], {})
VALUES += ([1], {"price": 1}, 1j, object())
KEYS = ("cactus_cap", "cactus_margin", "cactus_top_p", "cactus_top_k", "cactus_min_p")


def test_strangers_get_a_policy_that_runs_or_one_line(opened):
    """Nothing but ValueError, in one line, and no file; what is admitted decides."""
    door = admission(CACTUS_CAP="0.5")
    other = of_processor({"CACTUS_POLICY": BAND} | OFFERED)
    draw, batch = random.Random(0), random_batch(0, [2, 1])
    runs = {one.spec: one for one in (LOSSLESS, door.settings.policy)}
    runs |= {one.spec: one for one in door.settings.policies.values()}
    for rule in runs.values():
        output, _ = verify_flat(door.settings.verifier, [rule], batch)
        assert bool(((output >= -1) & (output < batch.target_logits.shape[-1])).all())
    opened.clear()
    granted = 0
    for _ in range(amount(400, 20_000)):
        sent = {"cactus": draw.choice(NAMES if draw.random() < 0.7 else VALUES)}
        sent |= {key: draw.choice(VALUES) for key in KEYS if draw.random() < 0.05}
        for own in (other, door):
            try:
                found = own.grant(request(sent))
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 1100
            else:
                assert found.policy.spec in runs and 0 <= (found.cap or 0.0) <= 0.5
                assert 0 < found.cut.top_p <= Cut().top_p and found.margin == 0
                granted += 1
    assert granted and not opened
