"""A CPU tensor that says it is on a GPU, and objects when a host would have to wait for it."""

from contextlib import contextmanager

import torch

# what reads values on the host
READING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__")
READING += ("__index__", "__contains__", "masked_select", "unique", "allclose", "equal")


class Waited(AssertionError):
    """The host asked for a value."""


class Pretended(torch.Tensor):
    """Results of operations on it are such tensors, too."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READING:
            raise Waited(f"{name} waits for the device")
        if name in ("__getitem__", "__setitem__") and any(map(_mask, _parts(args[1]))):
            raise Waited(f"{name} with a mask waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


def _mask(index):
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def pretended(tensor):
    return tensor.as_subclass(Pretended)


@contextmanager
def no_uploads(monkeypatch):
    """Object to tensors made of host values, whose copy a capture refuses, too."""

    def refuse(made):
        def make(data, *args, **kwargs):
            if not isinstance(data, torch.Tensor) and isinstance(data, list | tuple):
                raise Waited("a list is copied to the device")
            return made(data, *args, **kwargs)

        return make

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", refuse(torch.tensor))
        patch.setattr(torch, "as_tensor", refuse(torch.as_tensor))
        yield
