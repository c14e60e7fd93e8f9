"""First stage of a decode: the keywords of ``generate`` as one object, checked when made."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding.coins import checked_seeds
from cactus_theory.decoding.probabilities import checked_temperature
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.result import Seconds
from cactus_theory.decoding.schedule import (
    Schedule,
    Spec,
    check_rule,
    read_rule,
    relaxes_greedy,
)
from cactus_theory.decoding.text import Stop
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier, find_verifier
from cactus_theory.verify.draft import Draft

# values of ``device_loop`` that choose how the device loop verifies
STEPS = ("torch", "kernels")


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions that a decode calls after every round; None for no function.

    Arguments are copies. The seconds of callbacks are not part of the decode's seconds.

    Attributes
    ----------
    on_tokens : called with the new ids of the text, or in a batch with a list of new ids per text.
    on_rows : called with all target rows of the round (B, K + 1, V), including the rows after a
        rejection; the draft; the number of each text in the batch; and the number of new tokens
        that each text had before the round.
    on_round : called with the round's counts over all texts (:class:`readings.Reading`), and the
        round's seconds by part (``result.Seconds``). Seconds between two rounds are left out.

    Examples
    --------
    >>> new = []
    >>> told = Callbacks(on_round=lambda counts, seconds: new.append(counts.num_tokens))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> result = ct.generate(pair.target, pair.draft, ids, max_new_tokens=8, callbacks=told)
    >>> sum(new)
    8
    """

    on_tokens: Callable[[Any], None] | None = None
    on_rows: Callable[[Tensor, Draft, list[int], list[int]], None] | None = None
    on_round: Callable[[Reading, Seconds], None] | None = None


NO_CALLBACKS = Callbacks()


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeOptions:
    """The keywords of :func:`generate` as one checked object; :func:`generate` describes each.

    Specs are parsed in this class only; :func:`decode` and all later stages take the object.
    ``dataclasses.replace`` makes a changed copy.

    Raises
    ------
    ValueError, TypeError
        As :func:`generate`, for errors that do not depend on models and prompts.
    """

    policy: Spec | Schedule | Sequence[Spec | Schedule] = defaults.POLICY
    num_draft_tokens: int = defaults.NUM_DRAFT_TOKENS
    max_new_tokens: int
    attention_mask: Tensor | None = None
    temperature: float = defaults.TEMPERATURE
    logits_processor: Sequence[Any] = ()
    eos_token_ids: int | Iterable[int] | None = None
    stop: Stop | None = None
    seed: int | Sequence[int] | None = None
    verifier: str | Verifier = defaults.VERIFIER
    fast_forward: bool | None = None
    meter: bool | str | Divergence = True
    record_rows: bool = False
    log_probs: bool = False
    callbacks: Callbacks = NO_CALLBACKS
    device_loop: bool | str | None = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", checked_temperature(self.temperature))
        if self.eos_token_ids is not None:  # an iterator could be read only once
            object.__setattr__(self, "eos_token_ids", end_tokens(self.eos_token_ids))
        whole_number("max_new_tokens", self.max_new_tokens, 1)
        whole_number("num_draft_tokens", self.num_draft_tokens, 1)
        if self.stop is not None:
            check_stop(self.stop)
        for policy in self.policies:
            check_rule(policy, self.parsed_verifier)
        if self.relaxes_greedy and self.temperature:
            spec = self.policies[0].spec
            raise ValueError(f"temperature: must be 0 with {spec}; got {self.temperature:g}")
        if not isinstance(self.callbacks, Callbacks):
            raise TypeError(f"callbacks: must be a Callbacks object; got {self.callbacks!r:.60}")
        if self.log_probs and not self.meter:
            raise ValueError(
                "log_probs: needs the meter, which has the emitted laws; got meter=False"
            )
        loop = self.device_loop
        if not (loop is None or isinstance(loop, bool) or loop in STEPS):
            allowed = ", ".join(map(repr, (True, False, None, *STEPS)))
            raise ValueError(f"device_loop: must be one of {allowed}; got {loop!r}")
        _ = self.metered, self.seeds  # parsed now, so that a wrong value raises here

    @cached_property
    def policies(self) -> tuple[Policy | Schedule, ...]:
        """Return the parsed ``policy``: one entry for all texts, or one entry per text."""
        policies = self.policy
        if isinstance(policies, str | Policy | Schedule):
            policies = (policies,)
        elif not isinstance(policies, Sequence):
            raise TypeError(f"policy: must be a spec, a Policy or a Schedule; got {policies!r}")
        return tuple(read_rule(policy) for policy in policies)

    @cached_property
    def relaxes_greedy(self) -> bool:
        """Return whether the policies, such as ``regret``, read softmax rows at temperature 0."""
        return relaxes_greedy(self.policies)

    @cached_property
    def parsed_verifier(self) -> Verifier:
        """Return the Verifier that ``verifier`` names."""
        return find_verifier(self.verifier)

    @cached_property
    def metered(self) -> Divergence | None:
        """Return the divergence that is metered, None without a meter.

        ``meter=True`` means regret for policies that are charged in regret, KL for all others.
        """
        usual = REGRET if self.relaxes_greedy else defaults.DIVERGENCE
        named = usual if self.meter is True else self.meter
        return read_divergence(named) if named else None

    def ends(self, target_model: Any) -> frozenset[int]:
        """Return the token ids that end a text: ``eos_token_ids``, or by default the target's."""
        named = self.eos_token_ids
        return own_ends(target_model) if named is None else end_tokens(named)

    def at_ends_of(self, target_model: Any) -> "DecodeOptions":
        """Return the options with ``eos`` in knobs of policies replaced by end-of-text ids."""
        ends = sorted(self.ends(target_model))
        policies = tuple(policy.at_ends(ends) for policy in self.policies)
        return self if policies == self.policies else replace(self, policy=policies)

    @cached_property
    def seeds(self) -> int | list[int]:
        """Return the seed of the first text, or a list with the seed of each text."""
        return checked_seeds(self.seed)


def check_stop(stop: Any) -> None:
    """Raise TypeError unless ``stop`` accepts two arguments: a text's ids and the prompt length."""
    try:
        inspect.signature(stop).bind((), 0)
    except ValueError:  # some built-in callables have no signature
        return
    except TypeError:
        rule = "must be a callable of a row's ids and the prompt's length"
        raise TypeError(f"stop: {rule}; got {stop!r:.80}") from None


def own_ends(model: Any) -> frozenset[int]:
    """Return the end-of-text ids in a model's generation config."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return end_tokens(() if ends is None else ends)


def end_tokens(eos_token_ids: int | Iterable[int]) -> frozenset[int]:
    """Return the end-of-text ids as a set; raise for ids that are no whole numbers ≥ 0."""
    ids = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
    for token in ids:
        whole_number("eos_token_ids", token, 0)
    return frozenset(ids)
