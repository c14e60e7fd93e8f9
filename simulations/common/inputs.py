"""Inputs of simulations: flags for models and prompts, and digests of the files that were read."""

import argparse
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cactus_theory.base import defaults
from cactus_theory.base.prompts import Prompt, Rendering, prompts_of
from cactus_theory.base.specs import files_of
from cactus_theory.commands.flags import PROMPTS as KINDS
from cactus_theory.commands.flags import (
    add_chat,
    add_models,
    add_policy,
    flag,
    rendered_ids,
    written,
)
from cactus_theory.decoding.drafters import named_drafter
from cactus_theory.decoding.load import Source, dtype_rule

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "simulations" / "pair"
PROMPTS = ROOT / "simulations" / "data" / "prompts.jsonl"
# folder of the committed CSV files that figures and pages are made from
DATA = ROOT / "paper_figures" / "data"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=KINDS)
    add_chat(parser)


def add_decode_arguments(
    parser: argparse.ArgumentParser, *, policies: Sequence[str], out: str, widths: list[int],
    repeats: int | None, **sizes: int,
) -> None:  # fmt: skip
    """Declare the flags that all tables of decodes share: models, texts, K, policies, seed, …

    The arguments are the flags' defaults. ``repeats`` None leaves this flag out; ``sizes`` may have
    num_prompts and max_new_tokens.
    """
    add_pair_arguments(parser)
    add_end_arguments(parser)
    numbers = {"num_prompts": 16, "max_new_tokens": defaults.MAX_NEW_TOKENS} | sizes
    add = parser.add_argument
    add("--num-prompts", type=int, default=numbers["num_prompts"], help="prompts that are decoded")
    add("--num-draft-tokens", type=int, nargs="+", default=widths, metavar="K", help="K to try")
    add("--max-new-tokens", type=int, default=numbers["max_new_tokens"], metavar="N")
    if repeats is not None:
        add("--repeats", type=int, default=repeats, help="timed repeats, each with its own seeds")
    add("--seed", type=int, default=defaults.SEED)
    add("--threads", type=int, help="of torch (1, which is best for small models; else one a core)")
    add_policy(parser, "(%(default)s)", default=list(policies))
    add("--out", type=Path, default=Path(out), metavar="DIR")


# flags on which the tokens of every decode depend
DECIDE = ("max_new_tokens", "seed", "threads", "chat", "system", "eos_token_ids", "no_start")


def add_end_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags for end-of-text tokens and for the start token."""
    add = parser.add_argument
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    add("--no-start", action="store_true", help="put no start token before the prompts")


def prompt_ids(args: argparse.Namespace, pair: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt, and set the target's end-of-text tokens by the flags."""
    if args.eos_token_ids is not None:
        pair.target.generation_config.eos_token_id = args.eos_token_ids
    return rendered_ids(args, pair.tokenizer, prompts)


def settings_of(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    *flags: str,
    methods: Iterable[str] = (),
    **others: Any,
) -> dict[str, Any]:
    """Return all settings that a decode depends on, by which a journal tells runs apart.

    These are digests of prompts, models and policy files, and the values of flags.
    """
    files = sorted({file for method in methods for file in files_of(method)})
    revisions: dict[str, Any] = dict(zip(("target", "draft"), args.revision or (), strict=False))
    models = [name for name in ("target", "draft") if name in args]
    return {
        "dtype": dtype_rule(args.dtype, args.device),
        "prompts": digest("\0".join(prompt.source for prompt in prompts).encode()),
        **{name: model_digest(vars(args)[name], revisions.get(name)) for name in models},
        **{name: getattr(args, name) for name in (*DECIDE, *flags)},
        **others,
        "rules": {str(file): digest(file.read_bytes()) for file in files},
    }


def at_least(args: argparse.Namespace, **least: int) -> None:
    """Raise ValueError for the first flag that has a value below the least allowed value."""
    for name, low in least.items():
        values = getattr(args, name)
        if (value := min(values) if isinstance(values, list) else values) < low:
            raise ValueError(f"{flag(name)}: must be at least {low}; got {value}")


# numerical flags of a command: name → (default, help)
Numbers = Mapping[str, tuple[Any, str]]


def add_numbers(parser: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Declare numerical flags; :func:`check_numbers` checks their values."""
    for name, (default, words) in numbers.items():
        parser.add_argument(flag(name), type=type(default), default=default, help=words or None)


def check_numbers(args: argparse.Namespace, numbers: Numbers) -> None:
    """Raise ValueError for the first count below 1, seed below 0, or share outside (0, 1)."""
    for name, (default, _) in numbers.items():
        if isinstance(default, int):
            at_least(args, **{name: int(name != "seed")})
        elif not 0 < (value := getattr(args, name)) < 1:
            raise ValueError(f"{flag(name)}: must be in (0, 1); got {value}")


def command_line(args: argparse.Namespace, leave_out: Sequence[str]) -> str:
    """Return the command line of ``python -m simulations`` that gives ``args``, for provenance."""
    parser = argparse.ArgumentParser()
    args.declare(parser)
    head = ["python -m simulations", args.command, *([args.table] if "table" in args else [])]
    return written(" ".join(head), parser, args, leave_out)


def digest(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of the content's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest(b"".join(path.name.encode() + path.read_bytes() for path in files))


def model_digest(model: Path | str | None, revision: str | None = None) -> str:
    """Return an identifier of a model: a digest of its folder, its commit on the Hub, or its name.

    A name identifies a drafter without weights, such as an n-gram drafter.
    """
    if model is None or str(model) == "none" or named_drafter(model) is not None:
        return str(model)
    if isinstance(model, Path):
        return folder_digest(model)
    return f"{model}@{Source('model', model, revision).commit}"


def code_digest(*patterns: str) -> str:
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return digest(
        b"".join(path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in files)
    )


def load_prompts(path: str | Path, tokenizer: Any) -> list[list[int]]:
    return [Rendering().ids(prompt, tokenizer) for prompt in prompts_of(path)]
