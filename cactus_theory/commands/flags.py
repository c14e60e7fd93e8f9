"""Flags that several commands share: policies, models, prompts, rows, and files to write.

This module does not import torch or NumPy, so that ``--help`` is fast: ``inputs`` reads rows and
traces, ``models`` loads models.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import names
from cactus_theory.base.files import check_writable
from cactus_theory.base.prompts import KEYS, Prompt, Rendering, prompts_of
from cactus_theory.base.specs import files_of, label
from cactus_theory.commands.plot import METADATA


def flag(name: str) -> str:
    """Return the flag of an argument, such as ``--num-draft-tokens`` of ``num_draft_tokens``."""
    return f"--{name.replace('_', '-')}"


def refuse(args: argparse.Namespace, names: Iterable[str], rule: str, **usual: Any) -> None:
    """Raise ValueError with ``rule`` if one of the named flags is given.

    A flag counts as given if its value is neither None nor the default that ``usual`` names.
    """
    for name in names:
        if (value := getattr(args, name, None)) not in (None, usual.get(name)):
            got = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"{flag(name)}: {rule}; got {got}")


class Repeated(argparse.Action):
    """A flag that may be repeated; the values given replace the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Append a value to the values given so far."""
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if given is self.default else [*given, values])


def written(
    head: str, parser: argparse.ArgumentParser, args: argparse.Namespace, leave_out: Sequence[str]
) -> str:
    """Return the command line with every flag that is not at its default, for the provenance.

    ``head`` is the program with its command; ``leave_out`` names the flags that say where results
    go. Values of type Path and absolute paths are shortened to the file's name.
    """
    positional, flags = [head], []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings and action.dest != "help":
            positional += [] if value is None else [_words(value)]
        elif isinstance(action, Repeated):
            given = [] if value in (None, action.default) else value
            flags += [f"{flag(action.dest)} {_words(one)}" for one in given]
        elif action.dest not in (*leave_out, "help") and value != action.default:
            flags.append(f"{flag(action.dest)} {_words(value)}".rstrip())
    return " ".join([*positional, *flags])


def _words(value: Any) -> str:
    if value is True:
        return ""  # a switch has no value beside its flag
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    if isinstance(value, str) and files_of(value):
        return ":".join(filter(None, label(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_policy(
    parser: argparse.ArgumentParser,
    several: str = "",
    *,
    required: bool = False,
    default: Sequence[str] | None = None,
) -> None:
    """Declare ``--policy``.

    ``several`` is the part of the help that says what repeating the flag means. If it is empty,
    the flag must not be repeated, and commands read it with :func:`one_policy`.
    """
    text = f"one of {', '.join(names.POLICIES)}, or FILE.py:NAME; with :knob=value,knob=value"
    if several:
        text += f"; may be repeated, {several}"
    add = partial(parser.add_argument, "--policy", action=Repeated, metavar="SPEC")
    add(required=required, default=default, help=text)


def add_nats(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    """Declare ``--nats``: the divergence per emitted token, in the divergence's unit."""
    parser.add_argument("--nats", type=float, metavar="NATS", help=text, **options)


def add_regret(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    """Declare ``--regret``, in place of ``--nats`` at temperature 0: nats of regret per token."""
    parser.add_argument("--regret", type=float, metavar="NATS", help=text, **options)


def add_undrafted(parser: argparse.ArgumentParser) -> None:
    """Declare ``--undrafted``: the row from which tokens that were not drafted are drawn."""
    text = "who draws bonus and plain tokens; the target does so at no cost (%(default)s)"
    choices = names.UNDRAFTED
    parser.add_argument("--undrafted", choices=choices, default=choices[0], help=text)


def one_policy(args: argparse.Namespace) -> str | None:
    """Return the value of ``--policy``, or None; raise ValueError if the flag was repeated."""
    if len(named := args.policy or []) > 1:
        raise ValueError(f"--policy: must be given once; got {' and '.join(named)}")
    return named[0] if named else None


def add_cuts(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of top-k and top-p, which truncate rows after the temperature."""
    add = parser.add_argument
    add("--top-k", type=int, metavar="K", help="cut both models' rows to the K likeliest (0: no)")
    add("--top-p", type=float, metavar="P", help="cut both to a nucleus of the mass P (1: no)")
    add("--draft-top-k", type=int, metavar="K", help="another K for the draft's rows (as --top-k)")
    add("--draft-top-p", type=float, metavar="P", help="another P for them (as --top-p)")


PROMPTS = f"JSON lines with one of {', '.join(KEYS)}, or a prompt a line"


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Declare the flags for rendering prompts, which :func:`rendering` reads."""
    add = parser.add_argument
    chat = "read texts as a user's turn, by the tokenizer's chat template (messages always are)"
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="system message that begins every chat")
    add("--show-prompt", action="store_true", help="show the first prompt as the models read it")


def rendering(args: argparse.Namespace) -> Rendering:
    """Return the rendering of prompts that the flags of :func:`add_chat` name."""
    return Rendering(args.chat, args.system, not getattr(args, "no_start", False))


def given_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts that the flags name, after the checks that need no tokenizer."""
    prompts = prompts_of(args.prompts) if args.prompts else [Prompt(args.prompt)]
    rendering(args).check(prompts)
    return prompts


def rendered_ids(
    args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Return the token ids of each prompt, and print notes about the rendering to stderr."""
    how = rendering(args)
    ids = [how.ids(prompt, tokenizer) for prompt in prompts]
    for note in how.notes(prompts, tokenizer, args.show_prompt):
        print(f"prompts: {note}", file=sys.stderr)
    return ids


def add_models(
    parser: argparse.ArgumentParser,
    *,
    target: Path | None = None,
    draft: Path | None = None,
    required: bool = False,
    drafted: bool = True,
) -> None:
    """Declare ``--target``, ``--draft`` and the flags for loading them, for ``models.loaded``.

    If ``drafted`` is false, ``--draft`` is not declared.
    """
    add = parser.add_argument
    text = "target model: folder, or id on the Hugging Face Hub"
    add("--target", metavar="MODEL", type=_model, default=target, required=required, help=text)
    if drafted:
        text = f"draft model, likewise; or a head's folder; or {names.DRAFTERS}"
        add("--draft", metavar="MODEL", type=_model, default=draft, help=text)
    text = "branch, tag or commit of the target's id, and of the draft's (main)"
    add("--revision", nargs="+", metavar="REV", help=text)
    add("--dtype", default=names.AUTO, choices=names.DTYPES,
        help="of the models; auto: the checkpoint's on a GPU; on a CPU bfloat16 if the checkpoint "
        "has it and the processor has instructions for it, else float32")  # fmt: skip
    add("--device", default="cpu", help="cpu (default), or cuda")
    text = "run Python that data files name (FILE.py:NAME) and that models bring along"
    add("--trust-code", action="store_true", help=text)


def _model(text: str) -> Path | str:
    """Return a path, or the text itself if it may be an id on the Hugging Face Hub."""
    return Path(text) if Path(text).exists() or not names.HUB_ID.fullmatch(text) else text


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declare ``--threads``, the number of torch's threads."""
    parser.add_argument(
        "--threads", type=int, help="of torch (1 for a small target or none, else one a core)"
    )


OUTPUTS = {"csv": (".csv",), "latex": (".tex",), "plot": tuple(METADATA)}
OUT = {"solve": ".npy", "tune": ".json"}  # command → suffix of the file that --out names


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Declare the flags for target and draft rows, for reading them, and for saving results."""
    parser.add_argument("target", help="target rows q: .npy .npz .json; or the folder of a trace")
    parser.add_argument(
        "draft",
        nargs="?",
        help="draft rows p, same shape; none where target is a trace, or a .npz of both",
    )
    parser.add_argument(
        "--divergence",
        default="kl",
        help=f"one of {', '.join(names.DIVERGENCES)} (alpha:a=0.5), or FILE.py:NAME",
    )
    parser.add_argument("--logits", action="store_true", help="the files hold logits")
    parser.add_argument("--temperature", type=float, help="of both models' logits (1)")
    add_cuts(parser)
    parser.add_argument(
        "--normalise", action="store_true", help="divide rows by their sums: rounded in a text, say"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--csv", metavar="FILE.csv", help="also save one line per row")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise an error, before the command does any work, if its output files cannot be written.

    The error is a ValueError for a wrong suffix, an OSError for a file that cannot be written, and
    a ModuleNotFoundError for a plot without matplotlib (extra ``figures``).
    """
    traced = args.command == "trace"  # the --out of trace is a folder
    of_out = () if traced else (OUT.get(args.command, ""),)
    for name, suffixes in (OUTPUTS | {"out": of_out}).items():
        check_writable(f"--{name}", getattr(args, name, None), *suffixes, folders=traced)
    if getattr(args, "plot", None) is not None:
        check.optional_module("matplotlib", "figures")
