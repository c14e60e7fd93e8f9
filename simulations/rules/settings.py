"""Which rules are priced, at their engines' defaults and at published settings.

``synthetic`` (vLLM's load-test mode) is not among them: it accepts by given rates whatever was
drafted, so it has no law that would be near a model's, and no price.
"""

from dataclasses import dataclass


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
# greedy drafts, a greedy target, rules that read the rows of temperature 1; ``top`` of MARS is
# taken from the raw logits of each row instead
GREEDY = "relaxed:k=1,delta=0.0,recover=argmax"
AT_ZERO = (
    Rule("all engines", "exact match", GREEDY),
    Rule("TensorRT-LLM", "default k=1 δ=0", GREEDY),
    Rule("TensorRT-LLM", "example k=10 δ=.01", "relaxed:delta=0.01,recover=argmax"),
    Rule("MAX, ATOM", "default k=10 δ=.6", "relaxed:recover=argmax"),
    Rule("ATOM", "earlier k=8 δ=.5", "relaxed:k=8,delta=0.5,recover=argmax"),
    Rule("MARS", "θ=.97", "mars:theta=0.97,top=1"),
    Rule("MARS", "θ=.9", "mars:theta=0.9,top=1"),
    Rule("MARS", "θ=.8", "mars:theta=0.8,top=1"),
    Rule("vLLM FLy", "default", GREEDY, "fly"),
    Rule("vLLM FLy", "W=2", GREEDY, "fly:window=2"),
)
# price in tokens per nat: from nearly lossless to nearly everything accepted
PRICES = (8.0, 4.0, 2.0, 1.2, 0.8, 0.5, 0.3, 0.17, 0.08)
