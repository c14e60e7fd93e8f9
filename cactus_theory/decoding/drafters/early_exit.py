"""Draft with the target's own first layers."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from cactus_theory.decoding.drafters._base import DraftContext, Drafter, Drafting
from cactus_theory.decoding.drafters.model import ModelDrafting
from cactus_theory.decoding.drafters.stop import check_stop
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.recognised import replaced


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """Draft with the first ``layers`` layers of the target, its final norm and its head.

    Needs no second model; drafts well only if the target was trained to exit early.
    ``greedy`` and ``stop`` are those of :class:`ModelDrafter`.

    Raises
    ------
    ValueError
        When decoding begins: a target whose layers are no list, or fewer than ``layers``.

    Examples
    --------
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> result = ct.generate(pair.target, EarlyExit(1), ids, policy="speculative", max_new_tokens=8)
    >>> result.num_tokens
    8
    """

    layers: int
    greedy: bool = False
    stop: float | None = None

    def __post_init__(self) -> None:
        check_stop(self.stop)

    def begin(self, setting: DraftContext) -> Drafting:
        """Return this drafter at work on one decode."""
        short = first_layers(setting.target_model, self.layers)
        return ModelDrafting(setting, short, self.greedy, self.stop)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for targets whose layers are not a list at ``model.layers``, or are too few."""
        first_layers(target_model, self.layers)
        return {}


def first_layers(model: Any, layers: int) -> Any:
    """Return a view of a causal LM that ends after its first layers; weights are shared."""
    stack = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(stack, nn.ModuleList):
        raise ValueError(
            f"target_model: must hold its layers at model.layers; got {type(model).__name__}"
        )
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < len(stack):
        raise ValueError(f"layers: must be an integer in [1, {len(stack)}); got {layers!r}")
    if replaced(model) or replaced(model.model):
        raise ValueError(
            f"target_model: its forward must be that of its class, to end early; "
            f"got another's in {type(model).__name__}"
        )
    short = _shallow(model)
    short.model = _shallow(model.model)
    short.model.layers = stack[:layers]
    short.config = short.model.config = config = copy.deepcopy(text_config(model))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return short


def _shallow(module: Any) -> Any:
    """Return a module of the same class with the same children in a table of its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin.__dict__.pop("forward", None)  # of its class, bound to the other one
    return twin
