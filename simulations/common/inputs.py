"""What a simulation reads: the shipped pair, prompts, and the flags that name others."""

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.prompts import prompts_of

from .grid import files_of, label

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "simulations" / "pair"
PROMPTS = ROOT / "simulations" / "data" / "prompts.jsonl"
# committed numbers that figures and pages are made from
DATA = ROOT / "paper_figures" / "data"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--target``, ``--draft`` and ``--prompts``; the shipped ones by default."""
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target", help="target model folder")
    add("--draft", type=Path, default=PAIR / "draft", help="draft model folder")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines")


def at_least(args: argparse.Namespace, **least: int) -> None:
    """Raise ValueError for the first flag whose value, or smallest one, is below its least."""
    for name, low in least.items():
        given = getattr(args, name)
        if (value := min(given) if isinstance(given, list) else given) < low:
            raise ValueError(f"--{name.replace('_', '-')}: must be at least {low}; got {value}")


def command_line(
    name: str,
    declare: Callable[[argparse.ArgumentParser], None],
    args: argparse.Namespace,
    leave_out: tuple[str, ...] = ("out",),
) -> str:
    """Return the command with every flag that is not at its default, for the provenance.

    Parameters
    ----------
    name : of the simulation.
    declare : its ``add_arguments``.
    args : what was parsed.
    leave_out : flags for where results go. Of files given, only the name is kept.
    """
    parser = argparse.ArgumentParser()
    positional = [name]
    declare(parser)
    flags = []
    for action in parser._actions:
        given = getattr(args, action.dest, None)
        if not action.option_strings and action.dest != "help":
            positional += [] if given is None else [_words(given)]
        elif action.dest not in (*leave_out, "help") and given != action.default:
            words = "" if given is True else _words(given)
            flags.append(f"--{action.dest.replace('_', '-')} {words}".rstrip())
    return " ".join(["python -m simulations", *positional, *flags])


def digest(content: bytes) -> str:
    """Return what tells one content from another: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """Return the digest of all files that lie in a folder itself, names included."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest(b"".join(path.name.encode() + path.read_bytes() for path in files))


def _words(value: Any) -> str:
    if value is True:
        return ""  # the flag says it
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str) and files_of(value):
        return ":".join(filter(None, label(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_model(folder: str | Path) -> Any:
    """Return the causal language model stored in ``folder``, float32, ready for inference.

    Raises
    ------
    ValueError
        ``folder`` holds no model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"folder: must hold a Hugging Face model; got {str(folder)!r}")
    load = _transformers().AutoModelForCausalLM.from_pretrained
    options = {"local_files_only": True, "trust_remote_code": False}
    return load(folder, dtype=torch.float32, **options).eval()


def load_prompts(path: str | Path, tokenizer_folder: str | Path) -> list[list[int]]:
    """Return the token ids of each prompt of :func:`prompts_of`."""
    load = _transformers().AutoTokenizer.from_pretrained
    tokenizer = load(tokenizer_folder, local_files_only=True, trust_remote_code=False)
    return [tokenizer(text)["input_ids"] for text in prompts_of(Path(path))]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise RuntimeError("transformers is needed: pip install 'cactus-theory[llm]'") from error
    transformers.utils.logging.disable_progress_bar()  # one bar is ours
    return transformers
