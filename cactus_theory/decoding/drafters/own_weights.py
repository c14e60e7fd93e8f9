"""Draft with the target's own weights: its first layers, without some, or all in four bits."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cactus_theory.decoding.drafters.eagle3_head import DTYPES
from cactus_theory.decoding.drafters.interface import DraftContext, Drafter, Drafting
from cactus_theory.decoding.drafters.model import ModelDrafting, check_stop
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.cache_check import INSTEAD
from cactus_theory.decoding.models.recognised import replaced

# weights in four bits that share a scale, and the largest whole number of times that they are of it
GROUP, LARGEST = 32, 7
FLOATING = "target_model: linear layers must hold floating-point weights that are not packed"


@dataclass(frozen=True)
class OwnWeights(Drafter):
    """A model made of the target's weights; ``greedy`` and ``stop`` are those of ModelDrafter."""

    greedy: bool = field(default=False, kw_only=True)
    stop: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_stop(self.stop)

    def of(self, target_model: Any) -> Any:
        """Return the model that drafts for a target; ValueError for a target that has none."""
        raise NotImplementedError

    def begin(self, setting: DraftContext) -> Drafting:
        model = self.of(setting.target_model)
        try:
            return ModelDrafting(setting, model, self.greedy, self.stop)
        except ValueError as error:
            kind, reason = type(self).__name__, str(error).removesuffix(INSTEAD)
            rule = f"the copy of {type(model).__name__} that {kind} drafts with does not run"
            raise ValueError(f"draft_model: {rule}, though the target does ({reason})") from error

    def check(self, target_model: Any) -> dict[str, Any]:
        self.of(target_model)
        return {}


@dataclass(frozen=True)
class EarlyExit(OwnWeights):
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

    def of(self, target_model: Any) -> Any:
        count = _count(target_model)
        return _without(target_model, range(self._below(count), count))

    def _below(self, end: int) -> int:
        number = self.layers
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < end:
            raise ValueError(f"layers: must be an integer in [1, {end}); got {number!r}")
        return number


@dataclass(frozen=True)
class SkipLayers(EarlyExit):
    """Draft with the target without ``layers`` of its n layers: slow, to measure laws with.

    Those at i n / (layers + 1), rounded down, for i = 1, 2, …: neither the first nor the last.

    Examples
    --------
    >>> ids, options = torch.tensor([[1, 2, 3]]), {"policy": "band:price=1", "max_new_tokens": 8}
    >>> ct.generate(pair.target, SkipLayers(1), ids, **options).num_tokens
    8
    """

    def of(self, target_model: Any) -> Any:
        count = _count(target_model)
        parts = self._below(count - 1) + 1
        return _without(target_model, {i * count // parts for i in range(1, parts)})


@dataclass(frozen=True)
class FourBit(OwnWeights):
    """Draft with the target in four bits: slow, to measure laws with.

    In a copy all linear weights but the head's are rounded to −7 … 7 times a scale, one for 32
    inputs of an output. It is made once for a target, and not again where weights change.

    Raises
    ------
    ValueError
        When decoding begins: a target without linear layers of torch, or with packed weights.

    Examples
    --------
    >>> ids, options = torch.tensor([[1, 2, 3]]), {"policy": "band:price=1", "max_new_tokens": 8}
    >>> ct.generate(pair.target, FourBit(), ids, **options).num_tokens
    8
    """

    @cached_property
    def _copies(self) -> WeakKeyDictionary[Any, Any]:
        return WeakKeyDictionary()

    def of(self, target_model: Any) -> Any:
        if target_model not in self._copies:
            self._copies[target_model] = _in_four_bits(target_model)
        return self._copies[target_model]


def _count(model: Any) -> int:
    """Return the number of a causal LM's layers, which it can run without some of."""
    stack = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(stack, nn.ModuleList):
        raise ValueError(
            f"target_model: must hold its layers at model.layers; got {type(model).__name__}"
        )
    if replaced(model) or replaced(model.model):
        raise ValueError(
            f"target_model: its forward must be that of its class, to leave layers out; "
            f"got another's in {type(model).__name__}"
        )
    return len(stack)


def _without(model: Any, left_out: Collection[int]) -> Any:
    kept = [number for number in range(len(model.model.layers)) if number not in left_out]
    short = _shallow(model)
    short.model = _shallow(model.model)
    layers = (_at(model.model.layers[number], place) for place, number in enumerate(kept))
    short.model.layers = nn.ModuleList(layers)
    short.config = short.model.config = config = copy.deepcopy(text_config(model))
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]
    return short


def _at(layer: Any, place: int) -> Any:
    """Return a layer whose parts know their place in the cache; itself where they do."""
    moved = {name: _at(part, place) for name, part in layer.named_children()}
    if getattr(layer, "layer_idx", place) == place and moved == dict(layer.named_children()):
        return layer
    layer = _shallow(layer)
    layer._modules |= moved
    if hasattr(layer, "layer_idx"):
        layer.layer_idx = place
    return layer


def _shallow(module: Any) -> Any:
    """Return a module of the same class with the same children in a table of its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin.__dict__.pop("forward", None)  # of its class, bound to the other one
    return twin


@torch.no_grad()
def _in_four_bits(model: Any) -> Any:
    head, names = model.get_output_embeddings(), []
    for name, part in model.named_modules():
        inside = [inner for inner in part.children() if hasattr(inner, "in_features")]
        if part is head or inside or not hasattr(part, "in_features"):  # an adapter wraps another
            continue
        names.append(name)
        weight = getattr(part, "weight", None)
        if type(weight) is not nn.Parameter or weight.dtype not in DTYPES:
            raise ValueError(f"{FLOATING}; got {type(part)} at {name} in {type(model).__name__}")
    if not names:
        raise ValueError(f"{FLOATING}; got none in {type(model).__name__}")
    rounded = copy.deepcopy(model)
    for weight in (rounded.get_submodule(name).weight for name in names):
        weight.copy_(_rounded(weight))
    return rounded


def _rounded(weight: Tensor) -> Tensor:
    rows, width = weight.shape
    groups = nn.functional.pad(weight, (0, -width % GROUP)).reshape(rows, -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return ((groups / scale).round() * scale).reshape(rows, -1)[:, :width]
