"""Which rules are priced, at their engines' defaults and at published settings.

``synthetic`` (vLLM's load-test mode) is not among them: it accepts by given rates whatever was
drafted, so it has no law that would be near a model's, and no price.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rule:
    """A policy and a verifier as someone ships or publishes them.

    Attributes
    ----------
    engine, setting : whose it is, and which of its settings.
    policy, verifier : specs.
    """

    engine: str
    setting: str
    policy: str
    verifier: str = "chain"


# sampled drafts, a target that samples at temperature 1; the whole text as between markers
SAMPLED = (
    Rule("TensorRT-LLM", "default k=1 δ=0", "relaxed:k=1,delta=0"),
    Rule("TensorRT-LLM", "example k=10 δ=.01", "relaxed:k=10,delta=0.01"),
    Rule("MAX, ATOM", "default k=10 δ=.6", "relaxed:k=10,delta=0.6"),
    Rule("ATOM", "earlier k=8 δ=.5", "relaxed:k=8,delta=0.5"),
    Rule("SGLang", "default 1, 1", "thresholds"),
    Rule("SGLang", "acc .5", "thresholds:acc=0.5"),
    Rule("SGLang", "single .3, acc .3", "thresholds:single=0.3,acc=0.3"),
    Rule("SGLang", "single .1, acc .1", "thresholds:single=0.1,acc=0.1"),
    Rule("vLLM FLy", "default", "speculative", "fly"),
    Rule("vLLM FLy", "W=2", "speculative", "fly:window=2"),
)
GREEDY = "relaxed:k=1,delta=0.0,recover=argmax"


class Greedy(NamedTuple):
    """A rule at temperature 0: a policy under a verifier, or θ of MARS, which reads raw logits."""

    engine: str
    setting: str
    policy: str = GREEDY
    verifier: str = "chain"
    theta: float | None = None


# greedy drafts, a greedy target, rules that read the rows of temperature 1
AT_ZERO = (
    Greedy("all engines", "exact match"),
    Greedy("TensorRT-LLM", "default k=1 δ=0"),
    Greedy("TensorRT-LLM", "example k=10 δ=.01", "relaxed:delta=0.01,recover=argmax"),
    Greedy("MAX, ATOM", "default k=10 δ=.6", "relaxed:recover=argmax"),
    Greedy("ATOM", "earlier k=8 δ=.5", "relaxed:k=8,delta=0.5,recover=argmax"),
    Greedy("MARS", "θ=.97", theta=0.97),
    Greedy("MARS", "θ=.9", theta=0.9),
    Greedy("MARS", "θ=.8", theta=0.8),
    Greedy("vLLM FLy", "default", verifier="fly"),
    Greedy("vLLM FLy", "W=2", verifier="fly:window=2"),
)
# price in tokens per nat: from nearly lossless to nearly everything accepted
PRICES = (20.0, 8.0, 4.0, 2.5, 1.5, 1.0, 0.7, 0.45, 0.3, 0.2, 0.12, 0.06)
