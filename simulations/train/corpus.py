"""Training texts: the Python standard library of this machine, or others.

The choice of files, the held-out share and the corpus's fingerprint depend only on relative paths
and contents, so two machines with the same Python release get the same corpus. The tokenizer
(byte-level BPE) is trained on the corpus.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cactus_theory.base.prompts import prompts_of

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})
GENERATED_TABLE = re.compile(r"generated from .{0,200}gencodec\.py", re.DOTALL)
TOP_LEVEL = re.compile(r"^(?:@\w|def |class |async def )", re.MULTILINE)
# share of documents that are held out, chosen by a digest of the path
HELD_OUT = 0.05
T = TypeVar("T")
# suffixes of text files; characters after which the next paragraph begins a new document
TEXTS, PART = (".txt", ".md"), 2**13
KINDS = (".py", ".jsonl", *TEXTS)
# lengths in tokens of the beginnings that a target continues; 1 is the end-of-text token alone
PREFIX_LENGTHS = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class Document:
    """A file, a part of a text file or a line of a .jsonl file, with its path in the corpus."""

    path: str
    text: str


def is_held_out(path: str, share: float = HELD_OUT, seed: int = 0) -> bool:
    """Return whether a document is held out, by path and seed alone.

    So adding other documents never moves a document between the two parts.
    """
    digest = hashlib.sha256((f"{seed} {path}" if seed else path).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10_000 < round(10_000 * share)


def read_corpus(
    root: Path, share: float = HELD_OUT, seed: int = 0, kinds: Sequence[str] = KINDS
) -> tuple[list[Document], list[Document]]:
    """Read the documents of a file or a folder; return training and held-out documents.

    A ``.py`` file is one document, a line of a ``.jsonl`` file is one document (as in a file of
    prompts), and a text is split at blank lines. Documents are sorted by relative path. Left out
    are installed packages and test folders, build settings of one machine (``_sysconfigdata*``),
    generated character tables, and .py files that are not UTF-8. Raises ValueError if one of the
    two parts is empty.
    """
    files = [root] if root.is_file() else [p for p in root.rglob("*") if p.suffix in kinds]
    base = root.parent if root.is_file() else root
    documents = sorted((d for path in files for d in _read(path, base)), key=lambda d: d.path)
    return parted("--corpus", documents, [d.path for d in documents], share, seed)


def parted(
    flag: str, texts: Sequence[T], names: Iterable[str], share: float, seed: int
) -> tuple[list[T], list[T]]:
    """Return training texts and held-out texts; raise ValueError if one of the parts is empty."""
    parts: tuple[list[T], list[T]] = [], []
    for text, name in zip(texts, names, strict=True):
        parts[is_held_out(name, share, seed)].append(text)
    for kind, part in zip(("training", "held-out"), parts, strict=True):
        if not part:
            raise ValueError(f"{flag}: must hold at least one {kind} text; got {len(texts)} texts")
    return parts


def fingerprint(documents: list[Document]) -> str:
    """Return SHA-256 over the sorted lines ``path<TAB>sha256(content)``."""
    lines = sorted(f"{d.path}\t{hashlib.sha256(d.text.encode()).hexdigest()}\n" for d in documents)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def num_bytes(documents: list[Document]) -> int:
    return sum(len(d.text.encode()) for d in documents)


def _read(path: Path, root: Path) -> list[Document]:
    relative = path.relative_to(root)
    if SKIPPED_FOLDERS & set(relative.parts[:-1]) or path.name.startswith("_sysconfigdata"):
        return []
    name = relative.as_posix()
    if path.suffix == ".jsonl":
        lines = prompts_of(path)
        if chats := [line.place for line in lines if line.messages or line.later]:
            raise ValueError(f"--corpus: every line must hold one text; got a chat, {chats[0]}")
        return [Document(f"{name}:{number}", line.text) for number, line in enumerate(lines, 1)]
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        if path.suffix == ".py":
            return []
        raise ValueError(f"--corpus: must be UTF-8 text; got {path}") from None
    if not text.strip() or GENERATED_TABLE.search(text[:1000]):
        return []
    if path.suffix == ".py":
        return [Document(name, text)]
    parts = [""]
    for paragraph in re.split(r"(?<=\n\n)", text):
        parts += [""] * (len(parts[-1]) > PART)
        parts[-1] += paragraph
    return [Document(f"{name}:{number}", part) for number, part in enumerate(parts, 1)]


END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# positions of the models: the longest training windows have four times 256 tokens
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Stream:
    """Concatenated documents, each after an end-of-text token, and starts for short windows."""

    tokens: Tensor  # (n,) int32
    starts: Tensor  # (m,) int64, the first token of each document or top-level definition


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE: id 0 is end-of-text, the other ids are 256 bytes and merges.

    End-of-text is also the bos, eos and pad token.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encoded(tokenizer: Any, documents: Sequence[Document]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each document's tokens and the indices at which windows may start.

    These are the first token and every token that begins a top-level definition.
    """
    told = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    for document in documents:
        begins = {0, *(found.start() for found in TOP_LEVEL.finditer(document.text))}
        read = tokenizer(document.text, **told)
        offsets = enumerate(read["offset_mapping"])
        yield read["input_ids"], [at for at, (begin, _) in offsets if begin in begins]


def encode_stream(tokenizer: Any, documents: Sequence[Document]) -> Stream:
    tokens, starts = list[int](), list[int]()
    for ids, begins in encoded(tokenizer, documents):
        tokens.append(END_OF_TEXT_ID)
        starts.extend(len(tokens) + at for at in begins)
        tokens.extend(ids)
    tokens.append(END_OF_TEXT_ID)
    return Stream(torch.tensor(tokens, dtype=torch.int32), torch.tensor(starts))


def beginnings(tokenizer: Any, documents: Sequence[Document]) -> list[list[int]]:
    """Return the first tokens of documents and of top-level definitions, with varying lengths."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    lengths = itertools.cycle(PREFIX_LENGTHS)
    return [
        [*start, *ids[at : at + max(next(lengths) - len(start), not start)]]
        for ids, begins in encoded(tokenizer, documents)
        for at in begins
    ]
