"""The dashboard and the alert rules ask for series and labels that a server shows."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from cactus_theory.vllm import install
from cactus_theory.vllm.metrics import Reporter
from tests.vllm import fake
from tests.vllm.test_metrics import tally

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cactus_theory" / "vllm"
DASHBOARD, ALERTS = FOLDER / "dashboard.json", FOLDER / "alerts.yml"
# of vLLM 0.32.0, vllm/v1/spec_decode/metrics.py
OF_VLLM = {"vllm:spec_decode_num_draft_tokens_total": {"model_name", "engine"}}
SUFFIXES = {"Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count"), "Gauge": ("",)}


@pytest.fixture
def shown(monkeypatch):
    """Return the labels of every series that a server shows, by its name at ``/metrics``."""
    kinds = {kind: type(kind, (fake.Metric,), {"made": []}) for kind in SUFFIXES}
    fake.install(monkeypatch)
    for kind, made in kinds.items():
        monkeypatch.setattr(f"prometheus_client.{kind}", made)
    own = tally()
    Reporter(own, print, 0.0, model="served")
    install.show_info(own.settings, fake.config(), print, print)
    series = {
        f"{metric.name}{suffix}": metric.label_names | ({"le"} if suffix == "_bucket" else set())
        for kind, suffixes in SUFFIXES.items()
        for metric in kinds[kind].made
        for suffix in suffixes
    }
    return series | OF_VLLM


def unknown(expression, shown):
    """Return names and labels of an expression that no server shows, and unbalanced brackets."""
    text = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(r"\b(?:cactus|vllm):\w+", text))
    labels = set(re.findall(r"(\w+)\s*=~?", text))
    for group in re.findall(r"\bby\s*\(([^)]*)\)", text):
        labels |= {label.strip() for label in group.split(",")}
    known = set.intersection(*(shown.get(name, set()) for name in names)) if names else set()
    wrong = (names - shown.keys()) | (labels - known)
    return wrong | {
        pair for pair in ("()", "{}", "[]") if text.count(pair[0]) != text.count(pair[1])
    }


def test_every_panel_asks_for_what_is_shown(shown):
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [own["query"] for own in board["templating"]["list"] if own["type"] == "query"]
    assert len(asked) >= 10 and {one["id"] for one in board["panels"]} == {*range(1, 9)}
    assert all(panel["title"] and panel["description"] for panel in board["panels"])
    for expression in asked:
        of_labels = re.fullmatch(r"label_values\((.*), (\w+)\)", expression)
        if of_labels:
            expression = f"sum by ({of_labels[2]}) ({of_labels[1]})"
        assert unknown(expression, shown) == set(), expression
    named = set(re.findall(r"cactus:\w+", DASHBOARD.read_text(encoding="utf-8")))
    left_out = {name for name in shown if name.startswith("cactus:")} - named
    assert left_out == {
        "cactus:undrafted_tokens_total", "cactus:answer_divergence_nats_sum",
        "cactus:answer_divergence_nats_count",
        "cactus:emitted_surprise_nats",
        "cactus:emitted_agreement",
    }  # fmt: skip


def test_alert_rules_are_those_of_prometheus_and_ask_for_what_is_shown(shown):
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    assert group.keys() == {"name", "rules"} and len(group["rules"]) == 3
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smhd]", rule["for"]) and re.fullmatch(r"\w+", rule["alert"])
        assert unknown(rule["expr"], shown) == set(), rule["alert"]
        kept = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        for group_by in re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"]):
            assert kept <= {label.strip() for label in group_by.split(",")}


def test_what_no_server_shows_is_seen(shown):
    assert unknown("rate(cactus:emitted_tokens[5m])", shown) == {"cactus:emitted_tokens"}
    assert unknown("sum by (pod) (cactus:emitted_tokens_total", shown) == {"pod", "()"}
    assert unknown('cactus:emitted_tokens_total{rule="x"}', shown) == {"rule"}


def test_an_installed_package_has_both():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    kept = told["tool"]["setuptools"]["package-data"]["cactus_theory"]
    assert {f"vllm/{path.name}" for path in (DASHBOARD, ALERTS)} <= {*kept}
