"""A context in which no value of a tensor may be read on the host, nor a shape depend on one."""

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")


class NothingRead(TorchDispatchMode):
    """Raises at the operations that wait for a device, on the CPU, too.

    An index by a mask is ``nonzero`` inside, which is not dispatched: it is looked at as it is.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype.is_floating_point is False and part.dtype.itemsize == 1
            for part in args[1]
        )
        if name in READS or masked:
            raise AssertionError(f"{func} reads what a tensor holds")
        return func(*args, **(kwargs or {}))
