"""Copy the state of users' logits processors, and detect when the state changes.

Used by ``processors``, for copies that are called at drafted places.
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

# classes whose objects are shared, not copied: they do not change, or cache results by whole text
SHARED = {
    "llguidance._lib.LLTokenizer",
    "lmformatenforcer.integrations.transformers.TransformersPrefixAllowedTokensFn",
    "torch.nn.modules.module.Module",
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "xgrammar.base.XGRObject",
}
FORKS = ("fork", "deep_copy", "__deepcopy__")  # methods that return a copy, of matchers and others
ATOMS = (type, ModuleType, BuiltinFunctionType, type(cache(len)))
DATA = (bool, bytes, int, float, str, tuple, list, dict, set, type(None), Tensor, np.ndarray)


class Snapshot(pickle.Pickler):
    """The state of an object as bytes, ``state``, and copies of the object.

    ``state`` differs after a change of the object, except for changes inside objects that are
    copied by a method of ``FORKS``. Functions and classes are not copied; the values that functions
    close over or name, and that classes of callable objects hold, are part of ``state``. Raises
    the errors of pickling.
    """

    def __init__(self, held: Any) -> None:
        room = BytesIO()
        super().__init__(room, protocol=5)
        self.parts, self.numbers = list[Any](), dict[int, int]()
        self.forked = self.closed = False
        self.dump(held)
        self.state = room.getvalue()
        if self.forked and self.closed:
            raise TypeError("a function holds a matcher")

    def persistent_id(self, obj: Any) -> Any:
        """Return None for an object that is pickled, else a number for the object.

        The first time the object's state comes with the number.
        """
        if not isinstance(obj, (Tensor, FunctionType, *ATOMS)) and not _way(type(obj)):
            return None
        if id(obj) in self.numbers:
            return (self.numbers[id(obj)],)
        self.numbers[id(obj)] = len(self.parts)
        self.parts.append(obj)
        return self.numbers[id(obj)], self._held(obj)

    def _held(self, obj: Any) -> Any:
        """Return the state of an object that is not pickled, for comparison of states."""
        if isinstance(obj, Tensor):
            flat = obj.detach().reshape(-1).contiguous().view(torch.uint8)
            return obj.dtype, obj.shape, flat.cpu().numpy().tobytes()
        if isinstance(obj, FunctionType):
            named = map(obj.__globals__.get, obj.__code__.co_names)
            held = [one for one in named if _holds(one, obj.__module__)]
            held += [cell.cell_contents for cell in obj.__closure__ or ()]
            self.closed |= not all(isinstance(one, (FunctionType, *ATOMS, *DATA)) for one in held)
            return held, obj.__defaults__, obj.__kwdefaults__, vars(obj)
        if isinstance(obj, type) and isinstance(obj.__call__, FunctionType):
            names = [pair for base in obj.__mro__ for pair in vars(base).items()]
            return [one for name, one in names if name == "__call__" or isinstance(one, DATA)]
        self.forked |= _way(type(obj)) in FORKS
        return id(obj)

    def copies(self) -> Any:
        """Return a copy of the object from its pickled state."""
        return _Copies(self).load()


class _Copies(pickle.Unpickler):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(BytesIO(snapshot.state))
        self.parts, self.made, self.copied = snapshot.parts, dict[int, Any](), dict[int, Any]()

    def persistent_load(self, pid: Any) -> Any:
        number, part = pid[0], self.parts[pid[0]]
        if number not in self.made:
            way = "__deepcopy__" if isinstance(part, Tensor) else _way(type(part))
            self.made[number] = part
            if way == "__deepcopy__":
                self.made[number] = copy.deepcopy(part, self.copied)
            elif way in FORKS:
                self.made[number] = getattr(part, way)()
        return self.made[number]


@cache
def _way(kind: type) -> str | None:
    """Return how objects of a class are copied: a method's name, ``shared``, or None (pickling)."""
    for name in FORKS:
        if isinstance(getattr(kind, name, None), FunctionType if name[0] == "_" else Callable):
            return name
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    return "shared" if names & SHARED else None


def _holds(one: Any, module: str) -> bool:
    """Return whether a global that a function of a module names may hold state between calls."""
    return isinstance(one, DATA) or type(one).__module__ == module or _way(type(one)) in FORKS
