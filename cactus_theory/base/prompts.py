"""Read prompts from JSON lines of the usual shapes or plain lines, and apply chat templates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.base.files import first_line, parsed_json

# keys of a JSON object that can hold its prompt; a line has exactly one of these keys
KEYS = ("messages", "turns", "question", "prompt", "text")
# keys of content that a model would have to read beside the prompt, which is not supported here
UNREAD = "system system_prompt tools functions image images audio videos documents".split()
ROLES = ("system", "user", "assistant")
Messages = tuple[Mapping[str, str], ...]
# most characters of the first prompt that notes show by default
SHOWN = 240


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was written: a text, or the messages of a chat, of which ``text`` is the last.

    ``later`` are further turns of a user, ``columns`` the other keys of the prompt's line, and
    ``place`` says in error messages where the prompt is written.
    """

    text: str
    messages: Messages | None = None
    later: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: str = "--prompt: the text"

    @property
    def source(self) -> str:
        """Return everything that a model may read of the prompt, as one text."""
        return self.text if self.messages is None else json.dumps(self.messages)


def prompts_of(path: str | Path, flag: str = "--prompts") -> list[Prompt]:
    """Return the prompts of a file, one a line; ``flag`` names the file in messages.

    If the first line begins with ``{``, each line holds a JSON object with one prompt: a text
    under ``prompt``, ``question`` or ``text``; texts of a user under ``turns``, of which the first
    is the prompt; a chat under ``messages``, with the roles system, user and assistant and with
    texts as contents. Other keys of the object are columns; keys with null are ignored. In any
    other file every line that is not blank is a prompt. A line ends with a line feed, which a
    carriage return may precede. A byte order mark at the start is ignored.
    OSError for a file that cannot be read; ValueError, with the line's number, for any other line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise OSError(f"{flag}: must be a readable file; {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: must be UTF-8 text; got {path.name}, {error}") from None
    numbered = ((at, line.removesuffix("\r")) for at, line in enumerate(lines, 1) if line.strip())
    written = [(f"{flag}: line {at} of {path.name}", line) for at, line in numbered]
    _must("hold at least one line", f"{flag}:", written, path.name)
    place, first = written[0]
    if first.lstrip().startswith("{"):
        return [_prompt(place, line) for place, line in written]
    _must("begin a JSON object, one a line", place, path.suffix not in (".json", ".jsonl"), first)
    return [Prompt(line, place=place) for place, line in written]


def _must(rule: str, place: str, holds: Any, got: Any) -> None:
    """Raise ValueError, with ``place`` and ``rule`` in its message, unless ``holds`` is true."""
    if not holds:
        raise ValueError(f"{place} must {rule}; got {got!r:.80}")


def _prompt(place: str, line: str) -> Prompt:
    """Return the prompt of a JSON line; ValueError, which names the place, for any other line."""
    record = parsed_json(f"{place} must be JSON", line)
    _must("hold a JSON object", place, isinstance(record, dict), line)
    record = {name: value for name, value in record.items() if value not in (None, [])}
    keys = [name for name in KEYS if name in record]
    rule = f"hold a prompt under one of {', '.join(KEYS)}"
    _must(rule, place, len(keys) == 1, keys or [*record])
    unread = ", ".join(name for name in UNREAD if name in record)
    _must("hold what a model gets (a system's text is a message)", place, not unread, unread)
    key, value = keys[0], record.pop(keys[0])
    if key == "messages":
        messages = _messages(place, value)
        return Prompt(messages[-1]["content"], messages, columns=record, place=place)
    written: Any = value if key == "turns" else [value]
    _must("hold a list under 'turns'", place, isinstance(written, list), written)
    turns = [_text(place, key, turn) for turn in written]
    return Prompt(turns[0], later=tuple(turns[1:]), columns=record, place=place)


def _text(place: str, key: str, text: Any) -> str:
    """Return a text; ValueError for anything else, an empty text or lone surrogates."""
    holds = isinstance(text, str) and text and is_utf8(text)
    _must(f"hold a text under {key!r}", place, holds, text)
    return text


def is_utf8(text: str) -> bool:
    """Return whether a text has a UTF-8 encoding, which lone surrogates do not have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(place: str, value: Any) -> Messages:
    """Return the messages of a chat; ValueError unless the last one is a user's."""
    _must("hold a list of messages", place, isinstance(value, list), value)
    _must("hold a list of messages", place, all(isinstance(item, dict) for item in value), value)
    messages = tuple(_message(place, message) for message in value)
    role = messages[-1]["role"]
    _must("end with a message of the user, which is answered", place, role == "user", role)
    return messages


def _message(place: str, message: Mapping[str, Any]) -> Mapping[str, str]:
    role: Any = message.get("role")
    _must(f"have roles {', '.join(ROLES)}", place, role in ROLES, role)
    filled = {name for name, value in message.items() if value not in (None, [])}
    others = sorted(filled - {"role", "content"})
    _must("hold role and content alone in a message", place, not others, ", ".join(others))
    return {"role": role, "content": _text(place, "content", message.get("content"))}


@dataclass(frozen=True)
class Rendering:
    """How a prompt is turned into the text that a model reads: ``--chat`` and ``--system``.

    With ``start`` a text begins with the tokenizer's start token; chat templates write it anyway.
    """

    chat: bool = False
    system: str | None = None
    start: bool = True

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for prompts that cannot be rendered, before any model is loaded."""
        if self.system is not None and not is_utf8(self.system):
            raise ValueError(f"--system: must be UTF-8 text; got {self.system!r:.60}")
        chats = [prompt for prompt in prompts if prompt.messages is not None]
        if self.system is not None and not (self.chat or chats):
            raise ValueError("--system: must be given with --chat or a file of messages")
        if not self.start and (self.chat or chats):
            raise ValueError("--no-start: takes texts; a template writes what a chat starts with")
        with_system = [p for p in chats if any(m["role"] == "system" for m in p.messages or ())]
        if with_system and self.system is not None:
            raise ValueError(f"{with_system[0].place} has a message of the system, as has --system")

    def messages(self, prompt: Prompt) -> list[Mapping[str, str]] | None:
        """Return the messages for the chat template; None for a text that needs no template."""
        if prompt.messages is None and not self.chat:
            return None
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, *(prompt.messages or ({"role": "user", "content": prompt.text},))]

    def text(self, prompt: Prompt, tokenizer: Any) -> str:
        """Return the text that the model reads, without the start token that a tokenizer adds."""
        messages = self.messages(prompt)
        if messages is None:
            return prompt.text
        if not tokenizer.chat_template:
            named = "--chat: a text" if prompt.messages is None else prompt.place
            raise ValueError(f"{named} needs a chat template; the target's tokenizer has none")
        try:
            options = {"tokenize": False, "add_generation_prompt": True}
            return tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may raise anything
            rule = "must be a chat that the template takes"
            raise ValueError(f"{prompt.place} {rule}; {first_line(error)}") from error

    def ids(self, prompt: Prompt, tokenizer: Any) -> list[int]:
        """Return the token ids of a prompt, with at most one start token; ValueError for no ids."""
        added = self.start and self.messages(prompt) is None
        ids = tokenizer(self.text(prompt, tokenizer), add_special_tokens=added)["input_ids"]
        while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            ids = ids[1:]
        if not ids:
            raise ValueError(f"{prompt.place} must hold at least one token; got {prompt.text!r}")
        return ids

    def notes(self, prompts: Sequence[Prompt], tokenizer: Any, whole: bool = False) -> list[str]:
        """Return notes on prompts: columns, further turns, the template, the first prompt.

        The first prompt is shown in full if ``whole`` is true; otherwise its beginning is shown,
        and only if a chat template renders it.
        """
        templated = [self.messages(prompt) is not None for prompt in prompts]
        lines: list[str] = []
        if columns := dict.fromkeys(name for prompt in prompts for name in prompt.columns):
            lines.append(f"columns beside the prompts, which no model reads: {', '.join(columns)}")
        if longer := [prompt for prompt in prompts if prompt.later]:
            share = f"{len(longer)} of {len(prompts)} prompts have several turns of a user"
            lines.append(f"{share}: the first is taken, as the others follow an answer")
        if tokenizer.chat_template and not all(templated):
            unused = "the tokenizer's chat template is not applied to texts"
            lines.append(f"{unused}: --chat applies it")
        if whole or templated[0]:
            text = self.text(prompts[0], tokenizer)
            shown = text if whole or len(text) <= SHOWN else f"{text[:SHOWN]}…"
            count = len(self.ids(prompts[0], tokenizer))
            lines.append(f"the first prompt, {count} tokens: {shown!r}")
        return lines
