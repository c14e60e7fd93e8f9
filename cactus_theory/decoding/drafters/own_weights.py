"""Draft with the target's weights: its first layers, all but some layers, or 4-bit weights."""

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

# number of 4-bit weights that share a scale, and the largest multiple of the scale
GROUP, LARGEST = 32, 7
FLOATING = "target_model: linear layers must hold floating-point weights that are not packed"


@dataclass(frozen=True)
class OwnWeights(Drafter):
    """Base of drafters that draft with a model made of the target's weights.

    ``greedy`` and ``stop`` are as in :class:`ModelDrafter`.
    """

    greedy: bool = field(default=False, kw_only=True)
    stop: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_stop(self.stop)

    def of(self, target_model: Any) -> Any:
        """Return the draft model made of a target's weights; ValueError if none can be made."""
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
    """Draft with the first ``layers`` layers of the target, its final norm and its LM head.

    No second model is needed; drafts are good only if the target was trained to exit early.
    ``greedy`` and ``stop`` are as in :class:`ModelDrafter`.

    Raises
    ------
    ValueError
        When decoding begins: a target without a list of layers, or without more than ``layers``.

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
    """Draft with the target without ``layers`` of its n layers: slow, for measuring emitted laws.

    Layers i n / (layers + 1), rounded down, for i = 1, …, ``layers`` are left out; the first and
    the last layer stay.

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
    """Draft with the target's weights rounded to four bits: slow, for measuring emitted laws.

    In a copy of the target all linear weights except the LM head's are rounded to an integer from
    −7 to 7 times a scale; each group of 32 weights of a row (one output) has a scale. The copy is
    made once per target, and does not follow later changes of the target's weights.

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
    """Return a causal LM's number of layers; ValueError if layers cannot be left out."""
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
    """Return a causal LM that shares all modules of ``model`` except the left-out layers."""
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
    """Return a layer with ``layer_idx`` set to ``place`` in all parts, copied only if needed.

    Without this the layers after a left-out layer would write to cache layers that do not exist.
    """
    moved = {name: _at(part, place) for name, part in layer.named_children()}
    if getattr(layer, "layer_idx", place) == place and moved == dict(layer.named_children()):
        return layer
    layer = _shallow(layer)
    layer._modules |= moved
    if hasattr(layer, "layer_idx"):
        layer.layer_idx = place
    return layer


def _shallow(module: Any) -> Any:
    """Return a copy of a module that has the same children in a new table of children."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin.__dict__.pop("forward", None)  # an attribute ``forward`` is bound to the original module
    return twin


@torch.no_grad()
def _in_four_bits(model: Any) -> Any:
    """Return a copy of a causal LM with all linear weights rounded, except the LM head's.

    An entry becomes an integer from −7 to 7 times the scale of its group (:func:`_rounded`), in
    the weight's dtype. Biases, norms and embeddings stay.
    """
    head, names = model.get_output_embeddings(), []
    for name, part in model.named_modules():
        inside = [inner for inner in part.children() if hasattr(inner, "in_features")]
        # an adapter has a linear layer inside, which comes by itself
        if part is head or inside or not hasattr(part, "in_features"):
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
    """Return a weight with each group of 32 entries of a row rounded to multiples of a scale.

    The scale is the group's largest absolute entry divided by 7, so that multiples reach ±7.
    """
    rows, width = weight.shape
    groups = nn.functional.pad(weight, (0, -width % GROUP)).reshape(rows, -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    scale = scale.clamp(min=torch.finfo(weight.dtype).tiny)  # 0/0 in a group of zeros
    return ((groups / scale).round() * scale).reshape(rows, -1)[:, :width]
