"""What a request may ask for, what refusals say, and that no request opens a file."""

import sys
from types import SimpleNamespace

import pytest

import cactus_theory as ct
from cactus_theory.vllm import settings

BAND = "band:price=2.0"
FAST = "cactus_exact:delta=0.1,divergence=renyi:a=2"
OFFERED = {"CACTUS_POLICIES": f" gentle = band:price=4;fast={FAST} ;"}


def server(**more):
    return settings.read({"CACTUS_POLICY": BAND} | OFFERED | more)


def request(extra, temperature=1.0):
    return SimpleNamespace(extra_args=extra, temperature=temperature)


@pytest.mark.parametrize(
    ("extra", "spec"),
    [
        ({"cactus": "gentle", "other": 1}, "band:price=4.0"),
        ({"cactus": "fast"}, FAST),
        ({"cactus": "speculative"}, "speculative"),
        ({"cactus": None}, BAND),
        ({"other": 3, 3: 2, "kaktus": "price=4", " cactus": 1}, BAND),  # of others
        (None, BAND),
    ],
)
def test_a_request_names_its_policy(extra, spec):
    granted = server().grant(request(extra))
    assert (granted.policy.spec, granted.cap) == (spec, None)


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


BAD = ["bnad", "", "Gentle", "gentle ", "band:price=4", BAND, "price=4", "rules.py:mine", 3, True]
BAD += [[], {}, {"policy": "gentle"}, {"price": 4}, b"gentle", "g" * 10**7, 10**5000, object()]
BAD += ["/etc/passwd", "\0", "%s", "\n", float("nan"), 1j, *list(ct.list_policies())[1:]]


@pytest.mark.parametrize("given", BAD, ids=lambda given: repr(type(given)))
def test_a_name_that_is_not_offered_is_refused_in_one_short_line_and_opens_no_file(given, opened):
    own = server()
    opened.clear()
    with pytest.raises(ValueError) as caught:
        own.grant(request({"cactus": given}))
    said = str(caught.value)
    assert not opened
    assert said.startswith("extra_args['cactus']: must be one of speculative, gentle, fast, as")
    assert "\n" not in said and said.isprintable() and len(said) < 250


KEYS = ("cactus_top_p", "cactus_margin", "cactus-cap", "Cactus", "cactus_" + "x" * 10**5)


@pytest.mark.parametrize(
    ("environ", "given", "said"),
    [
        ({"CACTUS_POLICIES": ""}, request({"cactus": "band"}), "must be one of speculative, as"),
        ({}, request({"cactus_cap": 0.1}), "cactus_cap: must not be given, as this server takes"),
        ({}, request([]), "extra_args: must be a mapping; got a value of type list"),
        ({}, request(None, 1e300), r"temperature: must be at most 1e\+06 .* got 1e\+300"),
        *(({}, request({key: 1}), f"must be one of cactus, cactus_cap; got '{key[:50]}")
          for key in KEYS),
        *(({"CACTUS_CAP": "0.5"}, request({"cactus_cap": given}),
           r"cactus_cap: must lie in \[0, 0.5\], in nats a token; got")
          for given in (0.6, -1, "0.1", "nan", float("nan"), False, [], 10**400, "/dev/zero", 1j)),
        ({"CACTUS_CAP": "inf"}, request({"cactus_cap": 10**400}), r"must lie in \[0, 1e\+06\]"),
    ],
    ids=str,
)  # fmt: skip
def test_what_else_is_refused_says_what_must_be(environ, given, said):
    with pytest.raises(ValueError, match=said) as caught:
        server(**environ).grant(given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("cap", "given", "found"),
    [("0.5", None, 0.5), ("0.5", 0.1, 0.1), ("0.5", 0, 0.0), ("inf", None, None), ("inf", 3, 3.0)],
)
def test_a_cap_is_the_servers_or_lower(cap, given, found):
    extra = {} if given is None else {"cactus_cap": given}
    assert server(CACTUS_CAP=cap).grant(request(extra)).cap == found
