"""What a server and its requests may ask of the logits processor; nothing here imports vLLM."""

import os
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cactus_theory.divergences import divergence
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.vllm import settings
from cactus_theory.vllm.admission import HOTTEST, PROCESSOR_KEYS, Admission, number
from cactus_theory.vllm.bias import check_policy, drafted_bias, is_lossless, lifts_of
from cactus_theory.vllm.settings import require_names

TESTED = ("0.32.0", "0.33.0")  # their interface and rejection function; no engine was run
MARGIN, MARGIN_ARGUMENT = settings.MARGIN, "cactus_margin"
MOST_MARGIN, MARGINS = 1e6, "must be a number of at least 0, in logits, at most 1e6"
SERVER_SETTINGS = (settings.POLICY, settings.REQUESTS, settings.CAP, settings.READINGS)
CUTS = {
    "top_p": (1.0, "must lie in (0, 1]"),
    "top_k": (2**31, "must be a whole number of at least 0"),
    "min_p": (1.0, "must lie in [0, 1]"),
}
CONFIG = ("draft_sample_method", "rejection_sample_method", "num_speculative_tokens")


class Cut(NamedTuple):
    """A truncation of q before the policy acts; these values leave it whole."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Wish(NamedTuple):
    """What a request gets: policy and cut at positive temperatures, a margin at 0."""

    policy: Policy
    cut: Cut
    margin: float  # in logits

    def acts(self, temperature: float) -> bool:
        """Return whether logits are changed."""
        lossy = self.cut != Cut() or not is_lossless(self.policy)
        return lossy if temperature > 0 else self.margin > 0


def wish_of(sampling_params: Any, environ: Mapping[str, str] = os.environ) -> Wish:
    """Return what a request gets.

    ValueError, in one line, for a setting outside its range, a policy that is no bias, and
    truncation beside it.
    """
    extra = sampling_params.extra_args or {}
    admission = admission_of(*(environ.get(name, "").strip() for name in SERVER_SETTINGS))
    admission.check(sampling_params)
    most = number(MARGIN, environ.get(MARGIN) or 0.0, MOST_MARGIN, MARGINS)
    margin = number(MARGIN_ARGUMENT, extra.get(MARGIN_ARGUMENT, most), MOST_MARGIN, MARGINS)
    mode = admission.settings.requests
    if not (margin == most or mode == "any" or (mode == "stricter" and margin < most)):
        raise ValueError(
            f"{MARGIN_ARGUMENT}: must not exceed the server's own, {most}; got {margin}"
        )
    wish = Wish(admission.policy_of(extra), _cut_of(extra), margin)
    if sampling_params.temperature > 0 and wish.acts(sampling_params.temperature):
        _refuse_truncation(sampling_params)
    return wish


@lru_cache(maxsize=4)
def admission_of(spec: str, requests: str, cap: str, readings: str) -> Admission:
    """Return what the server admits; the verifier is the engine's own, given biased logits."""
    for name, value in ((settings.CAP, cap), (settings.READINGS, readings)):
        if value:
            raise ValueError(f"{name}: is kept by the hook of model runner V1 alone; got {value!r}")
    engine: Any = SimpleNamespace(check=check_policy)
    policy = settings.named(settings.POLICY, find_policy, spec or "speculative")
    settings.named(settings.POLICY, check_policy, policy)
    mode = settings.requests_of({settings.REQUESTS: requests})
    server_settings = settings.Settings(policy, engine, divergence("kl"), requests=mode)
    return Admission(server_settings, try_bias, PROCESSOR_KEYS)


def try_bias(policy: Policy, _: settings.Settings) -> None:
    """Raise what the policy raises on a few logits; ArithmeticError for a bias not finite."""
    logits = torch.tensor(
        [[0.0, 1.0, -torch.inf], [30.0, -30.0, 0.0], [-torch.inf, 0.0, -torch.inf]]
    )
    for drafted in ([0, 1, -1], [1, 0, -1], [2, 2, -1], [1, 1, 1]):
        ids = torch.tensor(drafted)
        for heat in (1e-2, 1.0, HOTTEST):
            bias = drafted_bias(
                lifts_of([policy]), logits, ids, torch.full((3,), heat), width=len(drafted)
            )
            if not bool(bias.to(logits.dtype).isfinite().all()):  # as it is added
                raise ArithmeticError(f"a bias that is no number at temperature {heat:g}")


def drafts_of(vllm_config: Any) -> int:
    """Return the most tokens that are drafted, 0 without speculation.

    ValueError for drafts that are sampled and for an engine whose own method is not lossless.
    """
    drafts = vllm_config.speculative_config
    if drafts is None:
        return 0
    require_names(drafts, CONFIG, "SpeculativeConfig", TESTED)
    if drafts.draft_sample_method != "greedy":
        raise ValueError(
            "draft_sample_method: must be greedy for CactusLogitsProcessor, since a biased logit "
            f"is the law of certain drafts alone; got {drafts.draft_sample_method!r}"
        )
    if drafts.rejection_sample_method not in ("standard", "block"):
        raise ValueError(
            "rejection_sample_method: must be standard or block for CactusLogitsProcessor, since "
            f"the engine has to be lossless; got {drafts.rejection_sample_method!r}"
        )
    return drafts.num_speculative_tokens


class PlainRequest:
    """A request that asks for nothing."""

    extra_args, temperature, top_p, top_k, min_p = None, 1.0, 1.0, 0, 0.0


def _refuse_truncation(sampling_params: Any) -> None:
    off = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (0.0, None)}
    for name, values in off.items():
        value = getattr(sampling_params, name)
        if value not in values:
            raise ValueError(
                f"{name}: must be off beside a lossy policy of cactus-theory, since vLLM cuts "
                f"after the policy's bias; got {value} (before it, over HTTP in vllm_xargs: "
                f'{{"{settings.ARGUMENT}_{name}": {value}}}; lossless: '
                f'{{"{settings.ARGUMENT}": "speculative"}})'
            )


def _cut_of(extra: Mapping[str, Any]) -> Cut:
    """Return what ``cactus_top_p``, ``cactus_top_k`` and ``cactus_min_p`` ask for."""
    cut: dict[str, Any] = {}
    for name, (most, requirement) in CUTS.items():
        argument = f"{settings.ARGUMENT}_{name}"
        if argument in extra:
            value = cut[name] = number(argument, extra[argument], most, requirement)
            if (name == "top_k" and value != int(value)) or (name == "top_p" and not value):
                raise ValueError(f"{argument}: {requirement}; got {value}")
    if "top_k" in cut:
        cut["top_k"] = int(cut["top_k"])
    return Cut(**cut)
