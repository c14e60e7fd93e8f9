"""Read the Python standard library found on this machine as training text.

Which files count, which are held out and what identifies the corpus are pure
functions of relative paths and contents, so two machines with the same Python
release agree without sharing a file.
"""

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})
GENERATED_TABLE = re.compile(r"generated from .{0,200}gencodec\.py", re.DOTALL)
TOP_LEVEL = re.compile(r"^(?:@\w|def |class |async def )", re.MULTILINE)
# 5 % of the files are only scored
HELD_OUT_PER_10000 = 500


@dataclass(frozen=True)
class Document:
    """One source file: path relative to the corpus root, with ``/``, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training (about 5 %, by hash of the path)."""
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Decide from the relative path alone; additions elsewhere never move a file."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10_000 < HELD_OUT_PER_10000


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path) -> list[Document]:
    """Return every usable ``.py`` file under ``root``, sorted by relative path.

    Left out: installed packages and test folders, build settings of one machine
    (``_sysconfigdata*``), generated character tables, and files that are not UTF-8.

    Raises
    ------
        ValueError: nothing usable, or nothing in one of the two parts.
    """
    found = (_read(path, root) for path in sorted(root.rglob("*.py")))
    documents = sorted((d for d in found if d is not None), key=lambda d: d.path)
    for name, part in (("training", training(documents)), ("held-out", held_out(documents))):
        if not part:
            raise ValueError(f"corpus must hold at least one {name} .py file, got none in {root}")
    return documents


def training(documents: list[Document]) -> list[Document]:
    """Return the documents that are trained on."""
    return [d for d in documents if not d.held_out]


def held_out(documents: list[Document]) -> list[Document]:
    """Return the documents that are only ever scored."""
    return [d for d in documents if d.held_out]


def fingerprint(documents: list[Document]) -> str:
    """Return SHA-256 over the sorted lines ``path<TAB>sha256(content)``."""
    lines = sorted(f"{d.path}\t{hashlib.sha256(d.text.encode()).hexdigest()}\n" for d in documents)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def num_bytes(documents: list[Document]) -> int:
    """Return the total length in UTF-8 bytes."""
    return sum(len(d.text.encode()) for d in documents)


def boundaries(text: str) -> list[int]:
    """Return the character offsets where a top-level ``def``, ``class`` or decorator starts."""
    return [match.start() for match in TOP_LEVEL.finditer(text)]


def _read(path: Path, root: Path) -> Document | None:
    relative = path.relative_to(root)
    if SKIPPED_FOLDERS & set(relative.parts[:-1]) or path.name.startswith("_sysconfigdata"):
        return None
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")
    if not text.strip() or GENERATED_TABLE.search(text[:1000]):
        return None
    return Document(relative.as_posix(), text)
