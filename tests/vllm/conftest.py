"""Servers of a fake vLLM with the hook of model runner V1 in place."""

from types import SimpleNamespace

import pytest

from cactus_theory.vllm import install, settings
from tests.vllm import fake


@pytest.fixture
def server(monkeypatch):
    """Return a function that starts one: its module, its runner's class, its hook and its log."""

    def start(policy, **environ):
        logged = []
        sampler, runner = fake.install(monkeypatch, logged=logged)
        hook = install.install(settings.read({"CACTUS_POLICY": policy} | environ))
        return SimpleNamespace(sampler=sampler, runner=runner, hook=hook, logged=logged)

    return start
