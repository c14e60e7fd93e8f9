"""Specs, which name objects with knobs: their grammar, a registry, a reader of ``FILE.py:NAME``.

A spec reads ``name:knob=value,knob=value`` or ``FILE.py:NAME:knob=value``. Policies, divergences,
verifiers and schedules are named by specs on the command line and in Python. Data (files, requests)
may name only registered objects, so readers of data call :meth:`Registry.find`.
"""

import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from cactus_theory.base import arguments as check

Kind = TypeVar("Kind")
# FILE.py:NAME:knobs; not a registered name whose knobs name a file: ``band:divergence=mine.py:D``
FORM = re.compile(
    r"(?!\s*\w*\s*:\s*\w+\s*=)(?P<file>.+?\.py)(?::(?P<name>[^:]*))?(?::(?P<knobs>.*))?", re.DOTALL
)


# files that are being run: a file that names itself would otherwise run without end
_BEING_READ: set[Path] = set()
# files that were run
_READ: set[Path] = set()


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split a spec into its name, registered or ``FILE.py:NAME``, and its knobs (as text)."""
    match = FORM.fullmatch(spec)
    if match is not None:
        return f"{match['file']}:{match['name']}", parse_knobs(match["knobs"] or "", spec)
    name, _, rest = spec.partition(":")
    return name.strip(), parse_knobs(rest, spec)


def spec_of(name: str, value: Any) -> str:
    """Return a spec: ``name``, and the fields of a dataclass that differ from their defaults."""
    # ``tilt`` is keyword-only and a field of the base class: unsorted it would be the first knob
    knob_fields = (
        sorted(fields(value), key=lambda knob: knob.kw_only is True) if is_dataclass(value) else ()
    )
    pairs = [(each.name, getattr(value, each.name), each.default) for each in knob_fields]
    knobs = ",".join(f"{knob}={value}" for knob, value, default in pairs if value != default)
    return f"{name}:{knobs}" if knobs else name


def parse_knobs(text: str, spec: str) -> dict[str, str]:
    """Split ``knob=value,knob=value``; ValueError, which names ``spec``, for another form."""
    knobs: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        knob, equals, value = item.partition("=")
        if not equals or not knob or not value:
            raise ValueError(f"spec: knobs must read knob=value; got {item!r} in {spec!r}")
        if knob.strip() in knobs:
            raise ValueError(f"spec: {knob.strip()} must be given once; got {spec!r}")
        knobs[knob.strip()] = value.strip()
    return knobs


def merged_knobs(spec: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that a spec sets, and ``knobs``; ValueError for a knob that is in both."""
    _, spec_knobs = parse_spec(spec)
    if twice := spec_knobs.keys() & knobs.keys():
        raise ValueError(f"{min(twice)}: must be given once; got {spec!r} and {knobs!r}")
    return {**spec_knobs, **knobs}


def names_a_file(spec: str) -> bool:
    """Return whether ``spec`` means a file rather than a registered name."""
    return FORM.fullmatch(spec) is not None


def file_of(spec: str) -> Path | None:
    """Return the file that a spec names, None for a registered name."""
    match = FORM.fullmatch(spec)
    return None if match is None else Path(match["file"])


def split(source: str, word: str = "rule") -> tuple[Path, str, str]:
    """Return (file, name, knobs) of ``FILE.py:NAME`` or ``FILE.py:NAME:knob=value,…``.

    ValueError for another form, OSError where there is no such file.
    """
    match = FORM.fullmatch(source)
    if match is None or not (match["name"] or "").isidentifier():
        raise ValueError(f"{word}: must read file.py:name; got {source!r}")
    path = Path(match["file"])
    if not path.is_file():
        raise FileNotFoundError(f"{word}: no such file; got {match['file']!r}")
    return path, match["name"], match["knobs"] or ""


class Registry(Generic[Kind]):
    """A registry of objects by name, which also reads ``FILE.py:NAME``.

    ``kind`` is the class of registered objects, or the base of registered classes. In messages
    ``word`` names this kind, ``must_be`` says what ``NAME`` in a file must be, and ``argument`` is
    the argument that names an object.
    """

    def __init__(self, word: str, kind: type, must_be: str, argument: str) -> None:
        self.word, self.kind, self.must_be, self.argument = word, kind, must_be, argument
        self.known: dict[str, Kind] = {}

    def taken(self, name: str, value: Kind) -> bool:
        """Return whether the name belongs to an object of another module or class.

        Reading a file again is allowed: its objects replace those of the first time.
        """
        return name in self.known and _origin(self.known[name]) != _origin(value)

    def add(self, name: str, value: Kind) -> None:
        """Register an object, and give its class the name; ValueError for a name that is taken."""
        if self.taken(name, value):
            raise ValueError(f"name: must not be registered already; got {name!r}")
        self.known[name] = value
        kind = _kind_of(value)
        kind.name = kind.registered_as = name

    def names(self) -> tuple[str, ...]:
        """Return the registered names in order of registration."""
        return tuple(self.known)

    def find(self, name: str) -> Kind:
        """Return the object registered under a name; ValueError for another name."""
        return self.known[check.one_of(self.word, name, self.names())]

    def read(self, source: str, *others: type) -> tuple[Any, str]:
        """Return the object that ``FILE.py:NAME`` names, and ``FILE.py:NAME`` without knobs.

        The object may also be of a class in ``others``. Its spec becomes ``FILE.py:NAME`` with its
        knobs, unless its class is registered. ValueError for another form or a missing name,
        OSError for a missing file, TypeError for an object of another kind. ValueError also if the
        file raises an error; the message then has this error and its line.
        """
        path, name, _ = split(source, self.argument)
        module = _module(path.resolve(), path.stat().st_mtime_ns)
        if not hasattr(module, name):
            raise ValueError(f"{self.argument}: {path.name} must define {name}; got no such name")
        value = getattr(module, name)
        if not issubclass(_kind_of(value), (self.kind, *others)):
            raise TypeError(f"{self.argument}: {path}:{name} must be {self.must_be}; got {value!r}")
        return _named(value, module, path, name), f"{path}:{name}"


def _kind_of(value: Any) -> Any:
    return value if isinstance(value, type) else type(value)


def _origin(value: Any) -> tuple[str, str]:
    """Return module and name of a class, or of an object's class."""
    kind = _kind_of(value)
    return kind.__module__, kind.__qualname__


def _named(value: Any, module: ModuleType, path: Path, name: str) -> Any:
    """Set the spec of an object read from a file to ``FILE.py:NAME``; return the object."""
    kind = _kind_of(value)
    if "registered_as" in vars(kind):
        return value
    if getattr(module, kind.__name__, None) is kind and kind.__module__ == module.__name__:
        kind.name = f"{path}:{kind.__name__}"
    elif hasattr(kind, "source"):  # a policy made from a function, for which a class was made
        kind.name = f"{path}:{name}"
    return value


@lru_cache(maxsize=16)
def _module(path: Path, changed: int) -> ModuleType:
    """Run a file and return its module; a file is run again only if it has changed on disk."""
    if path in _BEING_READ:
        raise ValueError(
            f"{path.name}: must not be named while it is read; what it registers has a name"
        )
    if str(path.parent) not in sys.path:  # at the end: no file there may replace a library
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    installed = PathFinder.find_spec(path.stem)
    # if a library has the file's name, an import of this name must go on finding the library
    if installed is None or installed.origin == str(path):
        sys.modules.setdefault(path.stem, module)
    _BEING_READ.add(path)
    _READ.add(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise ValueError(_blame(path, error)) from error
    finally:
        _BEING_READ.discard(path)
    return module


def blamed(error: BaseException) -> str | None:
    """Return, as text with function and line, an error that code of a user's ``FILE.py`` raised.

    The function is the outermost one of the file, the line the innermost. Return None if no code
    of such a file ran, or if the code's ``__post_init__`` rejected a knob value.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SystemExit):
        # A print to a closed stdout ends in this package's writer, which raises SystemExit: then
        # the last frame is the package's, and the user's code is not to blame.
        codes = codes[-1:]
    code = next((code for code in codes if Path(code.co_filename) in _READ), None)
    if code is None or (code.co_name == "__post_init__" and isinstance(error, ValueError)):
        return None
    return f"{code.co_qualname}: {_blame(Path(code.co_filename), error)}"


def _blame(path: Path, error: BaseException) -> str:
    """Return as text the error that a file raised, with its line number and the line's text."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path.name}, line {error.lineno}: SyntaxError: {error.msg}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    message = f"{type(error).__name__}: {error}"
    if not lines:
        return f"{path.name}: {message}"
    return f"{path.name}, line {lines[-1].lineno} ({lines[-1].line}): {message}"


def files_of(spec: str) -> list[Path]:
    """Return the files that a spec names, as the rule or as values of knobs."""
    files = [file_of(spec), *map(_file_of_knob, _parts(spec)[1])]
    return [file for file in files if file is not None]


def label(spec: str) -> tuple[str, str]:
    """Return name and knobs as tables show them: names of files without their folders."""
    name, knobs = _parts(spec)
    return name, ",".join(map(_without_folder, knobs))


def _parts(spec: str) -> tuple[str, list[str]]:
    """Return name and knobs of a spec; a name ``FILE.py:NAME`` loses the file's folder."""
    file = file_of(spec)
    start = "" if file is None else f"{file.name}:"
    name, _, knobs = spec[spec.find(start) + len(start) :].partition(":")
    return start + name, knobs.split(",")


def _file_of_knob(knob: str) -> Path | None:
    return file_of(knob.partition("=")[2])


def _without_folder(knob: str) -> str:
    file = _file_of_knob(knob)
    return knob if file is None else knob.replace(str(file), file.name)
