"""Read the policy that ``FILE.py:NAME`` stands for."""

import ast
import importlib.util
import re
import sys
import traceback
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from cactus_theory.policies import _knobs
from cactus_theory.policies._base import Policy

FORM = re.compile(r"(?P<file>.+\.py)(?::(?P<name>[^:]*))?(?::(?P<knobs>.*))?", re.DOTALL)


class BrokenRule(ValueError):
    """A policy's file raised while it was read."""


def names_a_file(spec: str) -> bool:
    """Return whether ``spec`` means a file rather than a registered name."""
    return FORM.fullmatch(spec) is not None


def split(source: str) -> tuple[Path, str, str]:
    """Return (file, name, knobs) of ``FILE.py:NAME`` or ``FILE.py:NAME:knob=value,…``.

    Raises
    ------
    ValueError, OSError
        Not of that form; no such file.
    """
    found = FORM.fullmatch(source)
    name = found["name"] if found else None
    if found is None or (name is not None and not name.isidentifier()):
        raise ValueError(f"rule: must read file.py:name; got {source!r}")
    path = Path(found["file"])
    if not path.is_file():
        raise FileNotFoundError(f"rule: no such file; got {found['file']!r}")
    if name is None:
        held = ", ".join(_written(path)) or "no function or class"
        raise ValueError(f"rule: must read file.py:name; got {source!r}; it holds {held}")
    return path, name, found["knobs"] or ""


def load(path: Path, name: str) -> Policy | type[Policy]:
    """Return what ``name`` stands for in a file: a policy, or a class of policies.

    Its spec becomes ``FILE.py:NAME`` and its knobs, unless it is registered under a name.

    Raises
    ------
    ValueError, TypeError
        No such name in the file, or one that is no policy.
    BrokenRule
        The file raised; the message says what, and on which line.
    """
    module = _module(path.resolve(), path.stat().st_mtime_ns)
    if not hasattr(module, name):
        raise ValueError(
            f"rule: {path.name} must define {name}; got no such name; {_offers(module)}"
        )
    value = getattr(module, name)
    kind = value if isinstance(value, type) else type(value)
    if not issubclass(kind, Policy):
        raise TypeError(
            f"rule: {path}:{name} must be a Policy, for example a function under @ct.rule; "
            f"got {value!r}; {_offers(module)}"
        )
    return _named(value, module, path, name)


def _named(value: Any, module: ModuleType, path: Path, name: str) -> Policy | type[Policy]:
    """Make the policy's spec name the file it was read from."""
    if not isinstance(value, type) and hasattr(value, "read_as"):
        return value.read_as(f"{path}:{name}")
    kind = value if isinstance(value, type) else type(value)
    registered = "registered_as" in vars(kind)
    if not registered and kind.__module__ == module.__name__:
        home = f"{path}:{kind.__name__}"
        if getattr(module, kind.__name__, None) is kind:
            kind.name = home
    return value


def defined(module: ModuleType) -> list[str]:
    """Return the names in a module that stand for policies of its own."""
    found = []
    for name, value in vars(module).items():
        kind = value if isinstance(value, type) else type(value)
        foreign = isinstance(value, type) and kind.__module__ != module.__name__
        if issubclass(kind, Policy) and not foreign and not name.startswith("_"):
            found.append(name)
    return found


def _written(path: Path) -> list[str]:
    """Return the functions under decorators and the classes of a file, without running it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    plain = (ast.FunctionDef, ast.ClassDef)
    return [
        node.name
        for node in tree.body
        if isinstance(node, plain) and (isinstance(node, ast.ClassDef) or node.decorator_list)
    ]


def _offers(module: ModuleType) -> str:
    """Return which policies a file defines, in words."""
    found = defined(module)
    return f"it defines {', '.join(found)}" if found else "it defines no policy"


@lru_cache(maxsize=16)
def _module(path: Path, changed: int) -> ModuleType:
    """Run a file; run it again only if it has changed on disk."""
    if str(path.parent) not in sys.path:  # at the end: nothing there may replace a library
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = PathFinder.find_spec(path.stem)
    if known is None or known.origin == str(path):
        sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise BrokenRule(_blame(path, error)) from error
    return module


def _blame(path: Path, error: BaseException) -> str:
    """Return what a file raised, on which line, and that line."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path.name}, line {error.lineno}: SyntaxError: {error.msg}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    said = f"{type(error).__name__}: {error}"
    if not lines:
        return f"{path.name}: {said}"
    return f"{path.name}, line {lines[-1].lineno} ({lines[-1].line}): {said}"


def policy_from(source: str, knobs: dict[str, Any]) -> Policy:
    """Return the policy of ``FILE.py:NAME`` at the knobs given; raises as :func:`load`."""
    path, name, _ = split(source)
    found = load(path, name)
    called = f"{path.name}:{name}"
    if isinstance(found, type):
        return _knobs.built(found, called, source, knobs)
    return _knobs.with_knobs(found, called, knobs)
