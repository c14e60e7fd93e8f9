"""A task of a sweep: plain data that says all that decides its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..common.grid import files_of, label
from ..common.inputs import ROOT, digest, folder_digest

# what stands for the folder of the checkout in a path or a spec: each worker has its own
CHECKOUT = "{checkout}"
MANIFEST = "manifest.json"
Row = dict[str, Any]
File = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """One cell of a grid.

    Attributes
    ----------
    kind : which of :data:`simulations.sweep.kinds.KINDS`.
    policy : its spec, as a worker reads it.
    case : the columns that the grid sets, which its rows begin with; the policy's files by name.
    settings : what else decides its rows.
    files : name → (path, digest) of what a worker reads; the digest decides, the path does not.
    """

    kind: str
    policy: str
    case: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Return the name under which its result is kept, the same on every machine."""
        digests = {name: own for name, (_, own) in self.files.items()}
        plain = [self.kind, self.case, self.settings, digests]
        return digest(json.dumps(plain, sort_keys=True).encode())

    @property
    def name(self) -> str:
        """Return it in words."""
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def path(self, name: str) -> Path:
        """Return where this machine has a file, which must be the one the task was made for.

        Raises
        ------
        OSError, ValueError
            It is not there, or its content is another.
        """
        place, wanted = self.files[name]
        path = Path(local(place))
        return (_checked_folder if path.is_dir() else _checked)(name, path, wanted)


def task(
    kind: str,
    policy: str,
    case: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, File] | None = None,
) -> Task:
    """Return a task for a checked policy, whose own files are added to ``files``."""
    own = {f"policy_file_{number}": file for number, file in enumerate(files_of(policy))}
    spec = policy
    for file in own.values():
        spec = spec.replace(str(file), portable(file))
    named = {"policy": ":".join(filter(None, label(policy)))}
    return Task(
        kind, spec, named | dict(case), dict(settings or {}), known(own) | dict(files or {})
    )


def known(files: Mapping[str, Path]) -> dict[str, File]:
    """Return files as tasks name them."""
    return {name: (portable(path), content_digest(path)) for name, path in files.items()}


def portable(path: Path) -> str:
    """Return a path for other machines: within the checkout from there, else absolute."""
    place = path.resolve()
    if place.is_relative_to(ROOT):
        return f"{CHECKOUT}/{place.relative_to(ROOT).as_posix()}"
    return str(place)


def local(text: str) -> str:
    """Return a path or a spec of :func:`portable` paths as this machine reads it."""
    return text.replace(CHECKOUT, str(ROOT))


def content_digest(path: Path) -> str:
    """Return a digest of a file, of a trace (its manifest holds its shards'), of a folder."""
    if (path / MANIFEST).is_file():
        return digest((path / MANIFEST).read_bytes())
    return folder_digest(path) if path.is_dir() else digest(path.read_bytes())


def _checked(name: str, path: Path, wanted: str) -> Path:
    if not path.exists():
        raise OSError(f"{name}: {path} must be on every machine that works; it is not here")
    if (found := content_digest(path)) != wanted:
        raise ValueError(
            f"{name}: {path} must be what the sweep was planned with, {wanted}; it is {found} here"
        )
    return path


# once per worker: weights are long
_checked_folder = lru_cache(maxsize=64)(_checked)
