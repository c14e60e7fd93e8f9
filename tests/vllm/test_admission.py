"""What a request may ask for, what refusals say, and that no request opens a file."""

import os
import random
import re
import sys
from types import SimpleNamespace

import pytest

import cactus_theory as ct
from cactus_theory.vllm import settings
from cactus_theory.vllm.admission import BY_BIAS, BY_HOOK, Admission, of_processor
from cactus_theory.vllm.batch import try_rows, verify_flat
from tests.amounts import amount
from tests.vllm.flat import random_batch

BAND = "band:price=2.0"
EVERY = {"CACTUS_REQUESTS": "any"}


def untried(rule, asked):
    pass


def admission(policy=BAND, trial=untried, **more):
    return Admission(settings.read({"CACTUS_POLICY": policy} | more), BY_HOOK._replace(tried=trial))


def asked(given, **more):
    return admission(**more).policy_of({"cactus": given, "other": 1})


def request(extra):
    return SimpleNamespace(extra_args=extra, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def refusal(given, **more):
    with pytest.raises(ValueError) as caught:
        asked(given, **more)
    said = str(caught.value)
    assert said.startswith("extra_args['cactus']: ")
    assert "\n" not in said and said.isprintable() and len(said) < 1100
    return said


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("cactus:delta=0.5", "cactus:delta=0.5"),
        ("price=1", "band:price=1.0"),
        ({"price": 1}, "band:price=1.0"),
        ({"policy": "cactus", "delta": 0.5}, "cactus:delta=0.5"),
        ({"policy": "cactus:delta=0.5"}, "cactus:delta=0.5"),
        (" band : price = 3 ", "band:price=3.0"),
        (None, BAND),
    ],
)
def test_a_request_chooses_its_policy(given, spec):
    assert asked(given, **EVERY).spec == spec


@pytest.mark.parametrize("extra", [None, {}, {"other": 3}, {"cactus": None}])
def test_a_request_that_says_nothing_has_the_servers(extra):
    for mode in settings.MODES:
        door = admission(CACTUS_REQUESTS=mode)
        assert door.policy_of(extra) is door.settings.policy


STRICTER = [  # server, admitted, refused
    (BAND, ["band:price=2", "price=2.5", "band:price=inf", "speculative"], ["price=1.9"]),
    (BAND, [], ["band:price=0", "band:delta=0.01", "mixture:alpha=0", "mentored:price=4"]),
    (BAND, [], ["price=4,divergence=reverse_kl", "sample_and_match", "band:price=nan"]),
    ("cactus:delta=0.5", ["delta=0.5", "delta=0.1"], ["delta=0.6", "cactus_exact:delta=0.1"]),
    ("lenience:lenience=0.5", ["lenience=0.7"], ["lenience=0.4"]),
    ("typical:epsilon=0.1", ["epsilon=0.2"], ["epsilon=0.05", "epsilon=0.2,alpha=0.4"]),
    ("typical:epsilon=0.1", [], ["epsilon=0.2,recover=residual"]),
    ("top_k:k=5", ["k=4"], ["k=6"]),
    ("tempered:temperature=0.8", ["temperature=0.8"], ["temperature=0.9", "temperature=1"]),
    ("speculative", ["speculative"], ["band:price=1e9"]),
]


@pytest.mark.parametrize(("server", "admitted", "refused"), STRICTER)
def test_by_default_only_what_is_stricter_is_admitted(server, admitted, refused):
    for given in admitted:
        assert (
            asked(given, policy=server).spec
            == ct.policy(
                given
                if ":" in given or given == "speculative"
                else f"{server.partition(':')[0]}:{given}"
            ).spec
        )
    for given in refused:
        refusal(given, policy=server)


def test_a_refusal_names_the_knob_the_rule_and_the_value():
    said = refusal("price=0.7")
    assert said.endswith("price: must be at least 2.0, the server's own; got 0.7")


@pytest.mark.parametrize("given", [3, ["band"]])
def test_a_refusal_suggests_what_http_takes(given):
    """``vllm_xargs`` holds text and numbers, no mappings; verifiers are the server's."""
    said = refusal(given, **EVERY)
    assert "verifier='" not in said and "{" not in said
    (offered,) = re.findall(r'"(band:price=2|speculative)"', said)
    assert asked(offered, **EVERY).spec.startswith(offered)


def test_a_rule_of_the_servers_own_is_compared_by_its_declaration(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(
        "import cactus_theory as ct\n\n\n@ct.rule(knob='share', direction=1)\n"
        "def mine(q, p, n, *, share=0.5, other=0.1):\n    return share * min(1, q[n] / p[n])\n"
    )
    spec = f"{file}:mine"
    assert dict(asked("share=0.25", policy=spec).values) == {"share": 0.25, "other": 0.1}
    for given in ("share=0.75", "other=0.05", "share=0.25,other=0.05", "nonsense=1"):
        assert str(tmp_path) not in refusal(given, policy=spec)
    for given in (spec, {"policy": spec}):
        assert "not a file" in refusal(given, policy=spec, **EVERY)


@pytest.mark.parametrize("key", ["cactus_polcy", "cactus-cap", "Cactus", "cactus_" + "x" * 10**5])
def test_a_key_that_nobody_reads_is_refused_by_name(key):
    for mode in settings.MODES:
        door = admission(CACTUS_REQUESTS=mode, CACTUS_CAP="1")
        with pytest.raises(ValueError) as caught:
            door.grant(request({key: "price=4", "other": 1}))
        said = str(caught.value)
        assert key[:20] in said and "cactus, cactus_cap" in said and len(said) < 200
        door.grant(request({"other": 1, 3: 2, "kaktus": "price=4", " cactus": 1}))  # of others


@pytest.mark.parametrize("key", ["cactus_top_p", "cactus_top_k", "cactus_min_p", "cactus_margin"])
def test_a_hook_refuses_by_name_what_only_the_logits_processor_reads(key):
    door = admission(CACTUS_MARGIN="1")
    with pytest.raises(ValueError, match=f"{key}: .*logits processor"):
        door.grant(request({key: 1}))
    door.way = BY_BIAS
    granted = door.grant(request({key: 1}))
    assert 1 in (granted.margin, granted.cut.top_k, granted.cut.top_p, granted.cut.min_p)


def test_off_admits_nothing():
    for given in (BAND, "speculative", {"price": 4}):
        assert "must not be given" in refusal(given, CACTUS_REQUESTS="off")


@pytest.mark.parametrize(
    "given",
    ["bnad", "", 3, [{}], {"prise": 1}, {"price": -1}, {"policy": 3}, {1: 2}, {"price": [1]}]
    + [{"price": 10**400}, {"price": 10**5000}, "price=" + "1" * 10**7, {"price": "1" * 10**7}]
    + [{"policy": "band:price=3", "price": 4}, {"price": 3, "price ": 4}, {"p" * 10**6: 1}]
    + [{f"k{n}": n for n in range(10**4)}, "band\x1b[31m", {"price\n": 4}, {"price": b"4"}]
    + ["rules.py:mine", {"policy": "rules.py:mine:k=1"}],
    ids=lambda given: repr(given)[:30] if not isinstance(given, dict) else str(list(given)[0])[:20],
)
def test_a_bad_request_is_refused_in_one_short_line(given):
    refusal(given, trial=try_rows, **EVERY)


def test_orders_keep_their_digits():
    spec = "cactus_exact:delta=0.1,divergence=renyi:a=1.0000000001"
    assert ct.policy(spec).spec == spec and ct.divergence("renyi:a=2").spec == "renyi:a=2"
    assert asked(spec, trial=try_rows, **EVERY).spec == spec


def test_what_raises_or_is_no_law_on_a_few_rows_is_refused(monkeypatch):
    from cactus_theory.policies.cactus import Cactus

    assert asked("cactus:delta=1e308", trial=try_rows, **EVERY).delta == 1e308
    monkeypatch.setattr(Cactus, "emitted", lambda rule, q, p: 2 * q)
    assert "does not sum to 1" in refusal("cactus:delta=0.1", trial=try_rows, **EVERY)
    from cactus_theory.policies.band import Band

    monkeypatch.setattr(Band, "row", lambda *given: 1 / 0)
    assert "ZeroDivisionError" in refusal("band:price=3", trial=try_rows)


def test_a_policy_is_built_once_and_few_are_kept(monkeypatch):
    tried = []
    door = admission(trial=lambda rule, asked: tried.append(rule))
    found = door.policy_of({"cactus": "price=3"})
    assert door.policy_of({"cactus": {"price": "3"}}) is found and len(tried) == 1
    monkeypatch.setattr("cactus_theory.vllm.admission.REMEMBERED", 5)
    for price in range(4, 40):
        door.policy_of({"cactus": f"price={price}"})
    assert len(door.policies) <= 5 and all(len(digest) == 32 for digest in door.policies)


@pytest.mark.parametrize("given", ["divergence={}", "band:price=4,divergence={}"])
def test_a_request_names_no_file_and_none_is_opened(tmp_path, opened, given):
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)  # to open it would hang
    door = admission(**EVERY)
    opened.clear()
    with pytest.raises(ValueError, match="divergence: is set by the server alone"):
        door.policy_of({"cactus": given.format(f"{pipe}:far")})
    assert not opened


def test_a_request_may_not_choose_what_a_block_cannot_follow():
    assert "block" in refusal("typical", CACTUS_VERIFIER="block", **EVERY)


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
    assert admission(CACTUS_CAP=cap).cap_of(extra) == found


@pytest.mark.parametrize("given", [0.6, -1, "nan", True, [], 10**400, "much"], ids=str)
def test_a_cap_above_the_servers_is_refused(given):
    with pytest.raises(ValueError, match=r"cactus_cap: must lie in \[0, 0.5\]"):
        admission(CACTUS_CAP="0.5").cap_of({"cactus_cap": given})


def test_a_server_without_caps_takes_none():
    for more in ({}, {"CACTUS_CAP": "1", "CACTUS_REQUESTS": "off"}):
        with pytest.raises(ValueError, match="cactus_cap: must not be given"):
            admission(**more).cap_of({"cactus_cap": 0.1})


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


NAMES = (*ct.list_policies(), "x.py:f", "/etc/passwd", "\0", "Band", "")
KNOBS = (
    "price",
    " price",
    "delta",
    "k",
    "divergence",
    "policy",
    "spec",
    "__class__",
    "pri\tce",
    "",
)
GOOD = ("band:price=", "band:delta=", "mixture:alpha=", "typical:epsilon=", "top_k:k=", "price=")
VALUES = ("0", "0.5", "3", "-1", "inf", "nan", "1e-320", "1e308", "1e400", "1_0", "٣", "none", "kl")
VALUES += ("renyi:a=1.0000000001", "/etc/passwd", "/dev/zero", "x.py:f", "%s", "\n", "9" * 10**5)
VALUES += (1, float("nan"), 10**400, True, None, b"x", [], {}, [1], {"price": 1}, 1j, object())
KEYS = ("cactus_cap", "cactus_margin", "cactus_top_p", "cactus_top_k", "cactus_min_p")


def hostile(draw):
    """Return what a stranger may send as extra arguments."""
    name, value = draw.choice(NAMES), draw.choice(VALUES)
    pairs = [(draw.choice(KNOBS), draw.choice(VALUES)) for _ in range(draw.randrange(4))]
    text = f"{name}:" + ",".join(f"{knob}={own}" for knob, own in pairs)
    near, mapping = f"{draw.choice(GOOD)}{value}", dict(pairs)
    given = draw.choice((text, near, mapping, mapping | {"policy": name}, value))
    return {"cactus": given} | {key: draw.choice(VALUES) for key in KEYS if draw.random() < 0.03}


@pytest.mark.parametrize("mode", settings.MODES)
def test_strangers_get_a_policy_that_runs_or_one_line(opened, mode):
    """Nothing but ValueError, in one line, and no file; what is admitted decides."""
    door = admission(trial=try_rows, CACTUS_REQUESTS=mode, CACTUS_CAP="0.5")
    other = of_processor({"CACTUS_POLICY": BAND, "CACTUS_REQUESTS": mode})
    draw, batch, runs = random.Random(0), random_batch(0, [2, 1]), 0
    verify_flat(door.settings.verifier, [ct.policy(BAND)], batch)  # what is imported is read now
    opened.clear()
    for _ in range(amount(80, 2000)):
        sent = request(hostile(draw))
        for own in (other, door):
            try:
                own.grant(sent)
                rule = own.policy_of(sent.extra_args)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 1100
                rule = None
        if rule is not None:
            output, _ = verify_flat(door.settings.verifier, [rule], batch)
            assert bool(((output >= -1) & (output < batch.target_logits.shape[-1])).all())
            runs += 1
    assert (runs or mode == "off") and not opened
