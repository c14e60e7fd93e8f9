"""Find the rule that ``file.py:name`` stands for."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from cactus_theory.policies import Policy


class BrokenRule(Exception):
    """A rule's file raised while it was read."""


def split_source(source: str) -> tuple[Path, str]:
    """Return (file, name) of ``file.py:name``; raise ValueError or OSError for anything else."""
    file, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise ValueError(f"rule: must read file.py:name; got {source!r}")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"rule: no such file; got {file!r}")
    return path, name


def load_rule(source: str) -> Policy:
    """Return the policy called ``name`` in ``file.py:name``: an instance, or a class to call.

    Raises
    ------
    ValueError, OSError
        Not of that form, no such file, no such name in it.
    TypeError
        The name does not stand for a policy.
    BrokenRule
        The file raised; the message says what and where.
    """
    path, name = split_source(source)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BrokenRule(f"{path.name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"rule: {path.name} must define {name}; got no such name")
    return as_policy(getattr(module, name), source)


def as_policy(value: Any, source: str) -> Policy:
    """Return the policy itself, or one made by calling the class without knobs."""
    if isinstance(value, type) and issubclass(value, Policy):
        try:
            value = value()
        except TypeError as error:
            raise BrokenRule(f"{source}: give the class's knobs default values; {error}") from error
    if not isinstance(value, Policy):
        raise TypeError(
            f"rule: {source} must be a Policy, for example a function under @ct.rule; got {value!r}"
        )
    return value
