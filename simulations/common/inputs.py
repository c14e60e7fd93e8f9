"""Inputs of simulations: flags that name pairs and prompts, models, digests of what was read."""

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
# folder of the committed numbers that figures and pages are made from
DATA = ROOT / "paper_figures" / "data"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=KINDS)
    add_chat(parser)


def add_decode_arguments(
    parser: argparse.ArgumentParser, *, policies: Sequence[str], out: str, widths: list[int],
    repeats: int | None, **sizes: int,
) -> None:  # fmt: skip
    """Declare what every table of decodes asks for: models, texts and their ends, K, policies, …

    Without ``repeats`` there is no such flag; ``sizes`` are other defaults of num_prompts and
    max_new_tokens. The rest are defaults.
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


# flags of every decode that decide it
DECIDE = ("max_new_tokens", "seed", "threads", "chat", "system", "eos_token_ids", "no_start")


def add_end_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where texts end, and whether a start token begins them."""
    add = parser.add_argument
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    add("--no-start", action="store_true", help="put no start token before the prompts")


def prompt_ids(args: argparse.Namespace, pair: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt; texts of the pair end as the flags say from here on."""
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
    """Return prompts, models, flags and files that decide a decode: two runs are never mixed."""
    files = sorted({file for method in methods for file in files_of(method)})
    revisions = dict(zip(("target", "draft"), args.revision or (), strict=False))
    return {
        "dtype": dtype_rule(args.dtype, args.device),
        "prompts": digest("\0".join(prompt.source for prompt in prompts).encode()),
        **{name: model_digest(vars(args)[name], revisions.get(name))
           for name in ("target", "draft") if name in args},
        **{name: getattr(args, name) for name in (*DECIDE, *flags)},
        **others,
        "rules": {str(file): digest(file.read_bytes()) for file in files},
    }  # fmt: skip


def at_least(args: argparse.Namespace, **least: int) -> None:
    """Raise ValueError for the first flag whose value, or smallest one, is below its least."""
    for name, low in least.items():
        values = getattr(args, name)
        if (value := min(values) if isinstance(values, list) else values) < low:
            raise ValueError(f"{flag(name)}: must be at least {low}; got {value}")


# of numbers of a command: name → default, help
Numbers = Mapping[str, tuple[Any, str]]


def add_numbers(parser: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Declare a flag for each of some numbers; :func:`check_numbers` looks at their values."""
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
    """Return the command, as :func:`written` does, of ``args`` as ``python -m simulations`` has."""
    parser = argparse.ArgumentParser()
    args.declare(parser)
    head = ["python -m simulations", args.command, *([args.table] if "table" in args else [])]
    return written(" ".join(head), parser, args, leave_out)


def digest(content: bytes) -> str:
    """Return a digest of the content: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest(b"".join(path.name.encode() + path.read_bytes() for path in files))


def model_digest(model: Path | str | None, revision: str | None = None) -> str:
    """Return the digest of a folder's files, the commit of an id of the hub, or a draft's name."""
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
