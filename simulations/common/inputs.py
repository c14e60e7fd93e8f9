"""Inputs of simulations: flags that name pairs and prompts, models, rows along real text."""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.base.prompts import Prompt, Rendering, prompts_of
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import PROMPTS as KINDS
from cactus_theory.commands.flags import add_chat, flag, rendered_ids
from cactus_theory.commands.models import add_models
from cactus_theory.decoding._text import check_model_vocabularies, fitted
from cactus_theory.decoding.drafters import named_drafter
from cactus_theory.decoding.load import Source, dtype_rule

from .grid import files_of, label

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "simulations" / "pair"
PROMPTS = ROOT / "simulations" / "data" / "prompts.jsonl"
# folder of the committed numbers that figures and pages are made from
DATA = ROOT / "paper_figures" / "data"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of models and of prompts; the shipped ones by default."""
    add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=KINDS)
    add_chat(parser)


def add_decode_arguments(
    parser: argparse.ArgumentParser, *, widths: list[int], repeats: int, **sizes: int
) -> None:
    """Declare what every table of decodes asks for: texts, drafted tokens, repeats, seed, threads.

    ``sizes`` are other defaults of num_prompts and max_new_tokens.
    """
    numbers = {"num_prompts": 16, "max_new_tokens": defaults.MAX_NEW_TOKENS} | sizes
    add = parser.add_argument
    add("--num-prompts", type=int, default=numbers["num_prompts"], help="that are decoded")
    add("--num-draft-tokens", type=int, nargs="+", default=widths, metavar="K", help="to try")
    add("--max-new-tokens", type=int, default=numbers["max_new_tokens"], metavar="N")
    add("--repeats", type=int, default=repeats, help="that are timed, with seeds of their own")
    add("--seed", type=int, default=defaults.SEED)
    add("--threads", type=int, help="of torch (1, which is best for small models; else one a core)")


ENDS = ("eos_token_ids", "no_start")
# flags of every decode that decide it
DECIDE = ("max_new_tokens", "seed", "threads", "chat", "system", "no_template")


def add_end_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ENDS: where texts end, and whether prompts are where they start."""
    add = parser.add_argument
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    add("--no-start", action="store_true", help="prompts without the token that starts a text")


def prompt_ids(args: argparse.Namespace, pair: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt; texts of the pair end as the flags say from here on."""
    if args.eos_token_ids is not None:
        pair.target.generation_config.eos_token_id = args.eos_token_ids
    return rendered_ids(args, pair.tokenizer, prompts)


def settings_of(args: argparse.Namespace, prompts: Sequence[Prompt], *flags: str) -> dict[str, Any]:
    """Return the prompts, models and flags that decide a decode: two runs are never mixed."""
    revisions = dict(zip(("target", "draft"), args.revision or (), strict=False))
    return {
        "dtype": dtype_rule(args.dtype, args.device),
        "prompts": digest("\0".join(prompt.source for prompt in prompts).encode()),
        **{name: model_digest(vars(args)[name], revisions.get(name))
           for name in ("target", "draft") if name in args},
        **{name: getattr(args, name) for name in (*DECIDE, *flags)},
        **({"cost": args.cost} if "cost" in args else {}),
    }  # fmt: skip


def at_least(args: argparse.Namespace, **least: int) -> None:
    """Raise ValueError for the first flag whose value, or smallest one, is below its least."""
    for name, low in least.items():
        values = getattr(args, name)
        if (value := min(values) if isinstance(values, list) else values) < low:
            raise ValueError(f"{flag(name)}: must be at least {low}; got {value}")


def command_line(args: argparse.Namespace, leave_out: tuple[str, ...]) -> str:
    """Return the command with every flag that is not at its default, for the provenance.

    ``args`` as ``python -m simulations`` parses them, with the command's name and its flags;
    ``leave_out`` are flags for where results go. Of files, only the name is kept.
    """
    parser = argparse.ArgumentParser()
    positional = [args.command]
    args.declare(parser)
    flags = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings and action.dest != "help":
            positional += [] if value is None else [_words(value)]
        elif action.dest not in (*leave_out, "help") and value != action.default:
            words = "" if value is True else _words(value)
            flags.append(f"{flag(action.dest)} {words}".rstrip())
    return " ".join(["python -m simulations", *positional, *flags])


def digest(content: bytes) -> str:
    """Return a digest of the content: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """Return the digest of all files that lie in a folder itself, names included."""
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
    """Return the digest of the checkout's files of these patterns, paths included."""
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return digest(
        b"".join(path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in files)
    )


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


def load_prompts(path: str | Path, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt of :func:`prompts_of`, texts as they are."""
    return [Rendering(plain=True).ids(prompt, tokenizer) for prompt in prompts_of(path)]


Rows = Float[Tensor, "rows vocab"]


@torch.inference_mode()
def log_rows(
    target: Any, draft: Any, prompts_ids: Sequence[Sequence[int]], tokens_each: int, seed: int
) -> tuple[Rows, Rows]:
    """Sample text from the target at temperature 1 and return both models' rows along it.

    After each prompt, of which the last ids that fit are used, ``tokens_each`` are sampled, fewer
    where the text ends itself. Returns target_probs and draft_probs, (N, V) float64, row i of both
    given the same text; the log-softmax is taken in float64, so no token that has a finite logit
    is lost. Raises ValueError for no prompt, an empty one, two vocabularies, or ``tokens_each``
    outside the context.
    """
    _check(target, draft, prompts_ids, tokens_each)
    generator, size = torch.Generator().manual_seed(seed), target.config.vocab_size
    longest = min(model.config.max_position_embeddings for model in (target, draft)) - tokens_each
    logged: tuple[list[Tensor], list[Tensor]] = ([], [])
    with Progress("logging rows", len(prompts_ids)) as progress:
        for prompt in prompts_ids:
            prompt = list(prompt)[-longest:]
            text = sample(target, prompt, tokens_each, generator)
            for model, rows in zip((target, draft), logged, strict=True):
                rows.append(next_token_probs(model, text, size)[len(prompt) - 1 : -1])
            progress.advance()
    return torch.cat(logged[0]), torch.cat(logged[1])


def sample(model: Any, prompt: Sequence[int], tokens: int, generator: torch.Generator) -> list[int]:
    """Return the prompt and up to ``tokens`` sampled ones, ending after an end-of-text token."""
    text, new_ids, cache = list(prompt), list(prompt), None
    for _ in range(tokens):
        new = torch.tensor([new_ids], device=model.device)
        step = model(new, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        row = step.logits[0, -1].cpu().double().softmax(-1)
        new_ids = torch.multinomial(row, 1, generator=generator).tolist()
        text += new_ids
        if new_ids[0] == model.config.eos_token_id:
            break
    return text


def next_token_probs(model: Any, text: Sequence[int], size: int) -> Rows:
    """Return the model's row of ``size`` tokens after each token of ``text``, float64."""
    text = [min(token, model.config.vocab_size - 1) for token in text]
    logits = model(torch.tensor([list(text)], device=model.device), use_cache=False).logits[0]
    return fitted(logits, size).cpu().double().log_softmax(-1).exp()


def _check(target: Any, draft: Any, prompts: Sequence[Sequence[int]], tokens_each: int) -> None:
    check_model_vocabularies(target, draft)
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts_ids: must hold prompts of at least one token; got {prompts!r}")
    longest = min(model.config.max_position_embeddings for model in (target, draft)) - 1
    if not 1 <= tokens_each <= longest:
        raise ValueError(f"tokens_each: must be from 1 to {longest}; got {tokens_each!r}")
