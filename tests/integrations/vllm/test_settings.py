"""What a server and a request may ask for, and what refusals say."""

import pytest

import cactus_theory as ct
from cactus_theory.integrations.vllm import settings

BAND = {"CACTUS_POLICY": "band:price=2.0"}


@pytest.mark.parametrize("environ", [{}, {"CACTUS_POLICY": " "}, {"CACTUS_VERIFIER": "nonsense"}])
def test_nothing_is_asked_for_without_a_policy(environ):
    assert settings.read(environ) is None


def test_what_is_not_said_has_its_default():
    found = settings.read(BAND)
    assert found.policy == ct.policy("band", price=2.0)
    assert (found.verifier.spec, found.divergence.spec, found.meter) == ("chain", "kl", 16)


def test_what_is_said_is_read():
    more = {"CACTUS_VERIFIER": "block", "CACTUS_DIVERGENCE": "renyi:a=2", "CACTUS_METER": "3"}
    found = settings.read(BAND | more)
    assert (found.verifier.spec, found.divergence.spec, found.meter) == ("block", "renyi:a=2", 3)
    assert settings.read(BAND | {"CACTUS_METER": "off"}).meter == 0


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("CACTUS_POLICY", "bnad:price=2", "cascade_token"),
        ("CACTUS_POLICY", "band:prise=2", "price"),
        ("CACTUS_POLICY", "band:price=-2", "[0, inf]"),
        ("CACTUS_POLICY", "nowhere.py:rule", "nowhere.py"),
        ("CACTUS_VERIFIER", "tree", "chain, block"),
        ("CACTUS_DIVERGENCE", "kk", "pearson_chi2"),
        ("CACTUS_METER", "-1", "whole number"),
        ("CACTUS_METER", "1.5", "whole number"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_with_the_valid_ones(name, value, valid):
    with pytest.raises(ValueError) as caught:
        settings.read(BAND | {name: value})
    said = str(caught.value)
    assert said.startswith(f"{name}: ") and valid in said and "\n" not in said


def test_a_policy_that_the_verifier_cannot_follow_is_refused():
    with pytest.raises(ValueError, match="CACTUS_VERIFIER.*typical"):
        settings.read({"CACTUS_POLICY": "typical", "CACTUS_VERIFIER": "block"})


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("cactus:delta=0.5", "cactus:delta=0.5"),
        ("price=1", "band:price=1.0"),
        ({"price": 1}, "band:price=1.0"),
        ({"policy": "cactus", "delta": 0.5}, "cactus:delta=0.5"),
        ({"policy": "cactus:delta=0.5"}, "cactus:delta=0.5"),
        (None, "band:price=2.0"),
    ],
)
def test_a_request_chooses_its_policy(given, spec):
    found = settings.of_request(settings.read(BAND), {"cactus": given, "other": 1})
    assert found.spec == spec


@pytest.mark.parametrize("extra", [None, {}, {"other": 3}])
def test_a_request_that_says_nothing_has_the_servers(extra):
    read = settings.read(BAND)
    assert settings.of_request(read, extra) is read.policy


@pytest.mark.parametrize(
    "given",
    ["bnad", "", 3, [{}], {"prise": 1}, {"price": -1}, {"policy": 3}, {1: 2}, {"price": [1]}]
    + ["rules.py:mine", {"policy": "rules.py:mine:k=1"}]
    + ["soft_band:price=1,values=/etc/hostname", {"policy": "soft_band", "values": "x.json"}],
    ids=str,
)
def test_a_bad_request_is_refused_in_one_line(given):
    with pytest.raises(ValueError) as caught:
        settings.of_request(settings.read(BAND), {"cactus": given})
    said = str(caught.value)
    assert said.startswith("extra_args['cactus']: ") and "\n" not in said


def test_a_request_cannot_name_a_file_that_is_there(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text("import cactus_theory as ct\n\nmine = ct.policy('speculative')\n")
    spec = f"{file}:mine"
    assert settings.read({"CACTUS_POLICY": spec}).policy == ct.policy("speculative")
    for given in (spec, {"policy": spec}):
        with pytest.raises(ValueError, match="not a file"):
            settings.of_request(settings.read(BAND), {"cactus": given})


@pytest.mark.parametrize(
    "given", ["soft_band:price=1,values=x", "values=x", {"policy": "soft_band", "values": "x"}]
)
def test_a_request_cannot_set_a_knob_that_is_read_from_a_file(given):
    with pytest.raises(ValueError, match="by the server alone"):
        settings.of_request(settings.read(BAND), {"cactus": given})


def test_a_request_may_not_choose_what_a_block_cannot_follow():
    with pytest.raises(ValueError, match="block"):
        settings.of_request(
            settings.read(BAND | {"CACTUS_VERIFIER": "block"}), {"cactus": "typical"}
        )
