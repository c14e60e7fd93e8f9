"""Copy the state of users' logits processors, and detect when the state changes.

The module ``processors`` calls copies of a processor at drafted tokens: if a token is rejected, the
processor's state must not have changed.
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
    """A snapshot of the object ``held``: its state as bytes, ``state``, from which copies are made.

    If the object changes, a new snapshot has another ``state``. An object with a method ``fork``,
    ``deep_copy`` or ``__deepcopy__`` is copied by this method; changes inside such an object are
    not detected.
    Functions and classes are not copied. ``state`` includes the values in a function's closure, the
    globals that the function names, and the data in classes of callable objects.

    Raises the errors of pickling, and TypeError if copies might share an object that a function
    reads.
    """

    def __init__(self, held: Any) -> None:
        pickled = BytesIO()
        super().__init__(pickled, protocol=5)
        # objects that are not pickled, and by ``id`` the number of each
        self.parts, self.numbers = list[Any](), dict[int, int]()
        # whether a method of FORKS copies an object; whether a function reads an object that is
        # neither data nor a function, class or module
        self.forked = self.reads_object = False
        self.dump(held)
        self.state = pickled.getvalue()
        if self.forked and self.reads_object:  # copies would share the function and its matcher
            raise TypeError("a function holds a matcher")

    def persistent_id(self, obj: Any) -> Any:
        """Return None to pickle an object; otherwise the object's index in ``parts``, as a tuple.

        At the first call for an object the tuple also has the object's values (:meth:`_held`),
        which become part of ``state``.
        """
        if not isinstance(obj, (Tensor, FunctionType, *ATOMS)) and not _way(type(obj)):
            return None
        if id(obj) in self.numbers:
            return (self.numbers[id(obj)],)
        self.numbers[id(obj)] = len(self.parts)
        self.parts.append(obj)
        return self.numbers[id(obj)], self._held(obj)

    def _held(self, obj: Any) -> Any:
        """Return the values that stand in ``state`` for an object that is not pickled.

        For a tensor this is the content; for a function, the values that the function reads from
        outside; for a class of callable objects, its data and ``__call__``; otherwise, the ``id``.
        """
        if isinstance(obj, Tensor):
            flat = obj.detach().reshape(-1).contiguous().view(torch.uint8)
            return obj.dtype, obj.shape, flat.cpu().numpy().tobytes()
        if isinstance(obj, FunctionType):
            named = map(obj.__globals__.get, obj.__code__.co_names)
            read = [value for value in named if _holds(value, obj.__module__)]
            read += [cell.cell_contents for cell in obj.__closure__ or ()]
            known = FunctionType, *ATOMS, *DATA
            self.reads_object |= not all(isinstance(value, known) for value in read)
            return read, obj.__defaults__, obj.__kwdefaults__, vars(obj)
        if isinstance(obj, type) and isinstance(obj.__call__, FunctionType):
            pairs = [pair for base in obj.__mro__ for pair in vars(base).items()]
            return [value for name, value in pairs if name == "__call__" or isinstance(value, DATA)]
        self.forked |= _way(type(obj)) in FORKS
        return id(obj)

    def copies(self) -> Any:
        """Return a copy of the object, made from the pickled state."""
        return _Copies(self).load()


class _Copies(pickle.Unpickler):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(BytesIO(snapshot.state))
        self.parts, self.made, self.deep_copied = snapshot.parts, dict[int, Any](), dict[int, Any]()

    def persistent_load(self, pid: Any) -> Any:
        """Return the one copy of an object that was not pickled, or the object if never copied."""
        number, part = pid[0], self.parts[pid[0]]
        if number not in self.made:
            way = "__deepcopy__" if isinstance(part, Tensor) else _way(type(part))
            self.made[number] = part  # unless it is copied
            if way == "__deepcopy__":
                self.made[number] = copy.deepcopy(part, self.deep_copied)
            elif way in FORKS:
                self.made[number] = getattr(part, way)()
        return self.made[number]


@cache
def _way(kind: type) -> str | None:
    """Return how objects of a class are copied: a method's name, ``shared``, or None (pickling)."""
    for name in FORKS:
        # a ``__deepcopy__`` must be written in Python: an array's is not, and arrays are pickled
        if isinstance(getattr(kind, name, None), FunctionType if name[0] == "_" else Callable):
            return name
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    return "shared" if names & SHARED else None


def _holds(one: Any, module: str) -> bool:
    """Return whether ``one``, a global that a function of ``module`` reads, may hold state."""
    return isinstance(one, DATA) or type(one).__module__ == module or _way(type(one)) in FORKS
