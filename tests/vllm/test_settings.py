"""What a server and a request may ask for, and what refusals say."""

import pytest

import cactus_theory as ct
from cactus_theory.vllm import settings

BAND = {"CACTUS_POLICY": "band:price=2.0"}


@pytest.mark.parametrize("environ", [{}, {"CACTUS_POLICY": " ", "CACTUS_CAP": ""}])
def test_nothing_is_asked_for_without_a_policy(environ):
    assert settings.read(environ) is None


@pytest.mark.parametrize("name", settings.NAMES[1:])
def test_a_setting_that_does_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: does nothing without CACTUS_POLICY; set that"):
        settings.read({name: "1"})


@pytest.mark.parametrize("more", [{}, BAND])
@pytest.mark.parametrize(
    "name", ["CACTUS_VERIFER", "CACTUS_POLICIY", "CACTUS_cap", "Cactus_Policy", "CACTUS_"]
)
def test_a_setting_with_an_unknown_name_is_refused(name, more):
    with pytest.raises(ValueError) as caught:
        settings.read(more | {name: "block"})
    said = str(caught.value)
    assert said.startswith(f"{name}: ") and "CACTUS_VERIFIER" in said and "\n" not in said


def test_names_of_others_are_left_alone():
    """The package's own tests, and what Kubernetes tells every container of a service "cactus"."""
    links = ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "2_SERVICE_PORT")
    others = {f"CACTUS_{name}": "1" for name in ("THEORY_THOROUGH", *links)}
    assert settings.read(others | {"CACTUSES": "1"}) is None
    assert settings.read(others | BAND) is not None


def test_what_is_not_said_has_its_default():
    found = settings.read(BAND)
    assert found.policy == ct.policy("band", price=2.0)
    assert (found.verifier.spec, found.meter) == ("chain", 16)


def test_what_is_said_is_read():
    found = settings.read(BAND | {"CACTUS_VERIFIER": "block", "CACTUS_METER": "3"})
    assert (found.verifier.spec, found.meter) == ("block", 3)
    assert settings.read(BAND | {"CACTUS_METER": "off"}).meter == 0


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("CACTUS_POLICY", "bnad:price=2", "cactus_exact"),
        ("CACTUS_POLICY", "band:prise=2", "price"),
        ("CACTUS_POLICY", "band:price=-2", "[0, inf]"),
        ("CACTUS_POLICY", "nowhere.py:rule", "nowhere.py"),
        ("CACTUS_VERIFIER", "tree", "chain, block"),
        ("CACTUS_METER", "-1", "whole number"),
        ("CACTUS_METER", "1.5", "whole number"),
        ("CACTUS_POLICIES", "band:price=2", "name=spec"),
        ("CACTUS_POLICIES", "gentle=bnad", "gentle: policy: must be one of"),
        ("CACTUS_POLICIES", "gentle=band:price=2;gentle=typical", "gentle: must be named once"),
        ("CACTUS_POLICIES", "speculative=band:price=2", "speculative is there anyway"),
        ("CACTUS_POLICIES", "two words=band:price=2", "name=spec"),
        ("CACTUS_POLICIES", "soft=band:price=2,hold=eos", "soft: hold"),
        ("CACTUS_CAP", "-1", "[0, inf]"),
        ("CACTUS_CAP", "much", "a number"),
        ("CACTUS_READINGS", "/nowhere/at/all", "No such file"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_with_the_valid_ones(name, value, valid):
    with pytest.raises(ValueError) as caught:
        settings.read(BAND | {name: value})
    said = str(caught.value)
    assert said.startswith(f"{name}: ") and valid in said and "\n" not in said


def test_readings_measure_every_row():
    for meter in ("", "1"):
        assert settings.read(BAND | {"CACTUS_READINGS": "log", "CACTUS_METER": meter}).meter == 1
    with pytest.raises(ValueError, match="CACTUS_METER: must be 1 or unset beside CACTUS_READ"):
        settings.read(BAND | {"CACTUS_READINGS": "log", "CACTUS_METER": "off"})


def test_every_policy_of_a_server_suits_its_verifier():
    for own in ({"CACTUS_POLICY": "typical"}, BAND | {"CACTUS_POLICIES": "odd=typical"}):
        with pytest.raises(ValueError, match="CACTUS_VERIFIER.*typical"):
            settings.read(own | {"CACTUS_VERIFIER": "block"})
