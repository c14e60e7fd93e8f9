"""What tests take for vLLM has the names of vLLM's own source: VLLM_SOURCE=DIR with ``vllm/``."""

import ast
import os
from dataclasses import fields
from pathlib import Path

import pytest

from tests.vllm import published

SOURCE = os.environ.get("VLLM_SOURCE")
pytestmark = pytest.mark.skipif(not SOURCE, reason="needs VLLM_SOURCE, an unpacked wheel of vLLM")
NEW_IN_33 = {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}


def parsed(module):
    assert SOURCE
    path = Path(SOURCE, *module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    return {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def arguments(node):
    return tuple(own.arg for own in node.args.args)


def method(node, name):
    return next(part for part in node.body if getattr(part, "name", None) == name)


@pytest.mark.parametrize("name", ["LogitsContext", "LogitsProcRequestState"])
def test_fields(name):
    node = parsed(published.INTERFACE)[name]
    found = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
    assert found == [field.name for field in fields(getattr(published, name))]


def test_methods():
    node = parsed(published.INTERFACE)["LogitsProcessor"]
    for name in ("__init__", "add_request", "apply_staged_writes", "apply"):
        own = getattr(published.LogitsProcessor, name)
        assert arguments(method(node, name)) == published.parameters(own)
    assert arguments(method(node, "validate_params")) == ("cls", "sampling_params")


def test_what_the_hook_replaces():
    found = arguments(parsed(published.UTILS)["rejection_sample"])
    expected = published.parameters(published.rejection_sample)
    assert found == expected or set(expected) - set(found) == NEW_IN_33
    runner = method(parsed(published.REJECTION)["RejectionSampler"], "_verify")
    names = published.parameters(published.RejectionSampler._verify)[:-1]
    assert arguments(runner) == names
    sampler = method(parsed(published.SAMPLER)["Sampler"], "add_request")
    assert arguments(sampler) == published.parameters(published.Sampler.add_request)


def test_the_runner_passes_what_the_tests_pass():
    """By place, twelve arguments; by name, rules that the hook refuses or knows."""
    from cactus_theory.vllm import model_runner_v2

    runner = method(parsed(published.REJECTION)["RejectionSampler"], "_verify")
    calls = [node for node in ast.walk(runner) if isinstance(node, ast.Call)]
    call = next(node for node in calls if getattr(node.func, "id", "") == "rejection_sample")
    assert len(call.args) == len(model_runner_v2.PARAMETERS)
    named = {own.arg for own in call.keywords if own.arg}
    assert named <= {*model_runner_v2.PRECISION, *model_runner_v2.REFUSED, *model_runner_v2.IGNORED}
