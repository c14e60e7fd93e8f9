"""What a run has found so far, and the files it is written to: six at most, each whole or not.

``gpu_check.html`` is the page to read, ``gpu_check.json`` holds everything. The three tables and
the picture go by the names that the figures know: copied into ``paper_figures/data``, they are
what ``make figures`` draws.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.inputs import ROOT
from ..common.results import write_bytes, write_csv, write_json, write_text
from .page import page, verdict
from .sections import Message, Note, Row

# section: the table that is committed when it was measured on a GPU
TABLES = {"agreement": "gpu_checks", "verify": "gpu_verify", "decode": "gpu_decode"}
PICTURE = "gpu"
PAGE, WHOLE = "gpu_check.html", "gpu_check.json"
FILES = (PAGE, WHOLE, f"{PICTURE}.png", *(f"{name}.csv" for name in TABLES.values()))


@dataclass
class Report:
    """Tables by section, notes, seconds of finished sections, the picture as last drawn."""

    provenance: dict[str, str]
    tables: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    picture: bytes | None = None

    def add(self, section: str, message: Message) -> None:
        """Take in what a section gave."""
        if isinstance(message, Note):
            self.notes.append(replace(message, section=section))
        else:
            row = {key: _plain(value) for key, value in message.items()}
            self.tables.setdefault(section, []).append(row)

    def take_up(self, out: Path, names: Sequence[str]) -> None:
        """Keep what sections other than ``names`` gave, if the same machine and code wrote it."""
        if not (out / WHOLE).is_file():
            return
        before = json.loads((out / WHOLE).read_text(encoding="utf-8"))
        made = before["provenance"]
        if any(made.get(key) != self.provenance.get(key) for key in ("device", "source", "tiny")):
            return
        for name, rows in before["tables"].items():
            if name not in names:
                self.tables[name] = rows
        self.seconds = {k: s for k, s in before["seconds"].items() if k not in names}
        self.notes = [Note(**note) for note in before["notes"] if note["section"] in self.seconds]
        if self.seconds:
            self.provenance["command"] = f"{made['command']}; {self.provenance['command']}"

    @property
    def failed(self) -> bool:
        """Return whether a check did not pass, or something did not run to its end."""
        wrong = any(row["passed"] is False for row in self.tables.get("agreement", ()))
        return wrong or any(note.kind == "failed" for note in self.notes)

    def write(self, out: Path, picture: bool) -> None:
        """Write what there is; ``picture`` says whether to draw anew."""
        for section, name in TABLES.items():
            if self.tables.get(section):
                write_csv(out / f"{name}.csv", even(self.tables[section]), self.provenance)
        if picture:
            self.picture = self._drawn(out)
        found = {
            "provenance": self.provenance,
            "verdict": verdict(self.tables, self.notes),
            "seconds": self.seconds,
            "tables": self.tables,
            "notes": [vars(note) for note in self.notes],
        }
        write_json(out / WHOLE, found)
        write_text(out / PAGE, page(found, self.picture))

    def _drawn(self, out: Path) -> bytes | None:
        """Draw the figure from the tables as written, if there is something to draw with."""
        from paper_figures.__main__ import draw

        with tempfile.TemporaryDirectory() as folder:
            try:
                draw(PICTURE, out, Path(folder))
            except ValueError as error:  # matplotlib is not there
                self.notes.append(Note("skipped", "pictures", str(error)))
                return None
            content = (Path(folder) / f"{PICTURE}.png").read_bytes()
        write_bytes(out / f"{PICTURE}.png", content)
        return content


def source_hash() -> str:
    """Return the beginning of the SHA-256 of the library's code and this folder's."""
    found = hashlib.sha256()
    for folder in (ROOT / "cactus_theory", Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def clear(out: Path) -> None:
    """Remove what an earlier run wrote, so that the folder holds what is in the report only."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)


def even(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows that share all columns, those of any of them; None where one had no value."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{**columns, **row} for row in rows]


def _plain(value: Any) -> Any:
    """Return a value that JSON has: NaN and infinity as text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
