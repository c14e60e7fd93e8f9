"""Read prompts from a file: JSON lines of the usual shapes, or plain lines of text."""

from pathlib import Path
from typing import Any

from cactus_theory.base.files import parsed_json

# fields of a JSON object that may hold the prompt, in the order they are looked for
FIELDS = ("prompt", "question", "turns", "messages", "text")


def prompts_of(path: str | Path) -> list[str]:
    """Return the prompts of a file, one a line.

    A file whose first line begins with ``{`` holds JSON objects: a text under ``prompt``,
    ``question`` or ``text``, a list of texts under ``turns`` (the first one counts), or a chat
    under ``messages`` (its first message of the user counts). In any other file every line
    that is not blank is a prompt. Lines end with a line feed, which a carriage return may precede,
    and nowhere else; a byte order mark is no part of the first one. OSError, ValueError for a file
    that cannot be read, and for a line that is no JSON object or holds no prompt.
    """
    path = Path(path)
    written = _written(path)
    if not written[0][1].lstrip().startswith("{"):
        return [line for _, line in written]
    return [_prompt(path.name, number, line) for number, line in written]


def column_of(path: str | Path, name: str) -> list[str]:
    """Return the values under ``name`` of the prompts in a file of JSON objects: texts or numbers.

    OSError, ValueError for a file that cannot be read or is plain text, and for a line without it.
    """
    path = Path(path)
    values = []
    for number, line in _written(path):
        record = parsed_json(f"--by: line {number} of {path.name} must be JSON", line)
        value = record.get(name) if isinstance(record, dict) else None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(
                f"--by: line {number} of {path.name} must hold a text or a number under {name!r}; "
                f"got {line[:60]!r}"
            )
        values.append(str(value))
    return values


def _written(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    lines = (line.removesuffix("\r") for line in _text(path).split("\n"))
    written = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not written:
        raise ValueError(f"--prompts: must hold at least one line; got {path.name}, empty")
    return written


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OSError(f"--prompts: must be a readable file; {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts: must be UTF-8 text; got {path.name}, {error}") from None


def _prompt(file: str, number: int, line: str) -> str:
    record = parsed_json(f"--prompts: line {number} of {file} must be JSON", line)
    record = record if isinstance(record, dict) else {}
    value = _first(next((record[name] for name in FIELDS if name in record), None))
    if not isinstance(value, str) or not value or not is_utf8(value):
        raise ValueError(
            f"--prompts: line {number} of {file} must hold a text under one of "
            f"{', '.join(FIELDS)}; got {line[:60]!r}"
        )
    return value


def is_utf8(text: str) -> bool:
    """Return whether a text is one: no lone surrogates, which stand for bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first(value: Any) -> Any:
    """Return the text, the first of several turns, or what the user says first in a chat."""
    if not isinstance(value, list) or not value:
        return value
    if not isinstance(value[0], dict):
        return value[0]
    chat = [turn for turn in value if isinstance(turn, dict)]
    contents = (turn.get("content") for turn in chat if turn.get("role", "user") == "user")
    return next(contents, None)
