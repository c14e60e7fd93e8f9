"""Load the models that the flags of a command name, and set the number of threads."""

import argparse
import random
import shlex
import sys
import warnings
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.names import AUTO
from cactus_theory.base.prompts import Prompt
from cactus_theory.commands.flags import given_prompts, refuse, rendered_ids
from cactus_theory.decoding.load import Pair, dtype_rule, load_pair
from cactus_theory.decoding.prepare import has_instructions

# flags that name the models and their prompts
OF_MODELS = ("target", "draft", "prompts")
# flags for loading models and prompts, which have no effect without these
OF_LOADING = ("revision", "dtype", "device", "chat", "system", "show_prompt", "ignored", "work")
# bytes of a target's weights above which several threads make its forward passes faster; the
# shipped target has 21 MB, and a second thread slows it down
LARGE = 1 << 26


def choose_threads(count: int | None, target: Any = None) -> str:
    """Set torch's number of threads for the whole process, and return the number in words."""
    if count is None:
        weights = () if target is None else target.parameters()
        size = sum(weight.nbytes for weight in weights)
        count = torch.get_num_threads() if size >= LARGE else 1
    torch.set_num_threads(check.threads(count))
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''} of torch"


def has_models(args: argparse.Namespace) -> bool:
    """Return whether the flags name target, draft and prompts.

    Raises ValueError if only some of the three are named, or if flags for loading
    models are given without them.
    """
    models = [name for name in OF_MODELS if getattr(args, name) is not None]
    missing = [name for name in OF_MODELS if name not in models]
    if models and missing:
        given = ", ".join(f"--{name}" for name in models)
        raise ValueError(f"--{missing[0]}: must be given with {given}")
    usual = {"dtype": AUTO, "device": "cpu", "chat": False, "show_prompt": False, "ignored": []}
    if not models:
        refuse(args, OF_LOADING, "must be given with --target", **usual)
    return bool(models)


def decoding(args: argparse.Namespace) -> str:
    """Return the ``generate`` command for the models of ``args`` and the file of ``tune --out``."""
    given = {"target": args.target or "DIR", "draft": args.draft or "DIR", "tuned": args.out}
    given |= {name: getattr(args, name) for name in ("revision", "dtype", "device", "system")}
    words = ["cactus-theory", "generate"]
    for name, value in given.items():
        if value not in (None, AUTO, "cpu"):  # the defaults of generate
            words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    switches = {"--chat": args.chat, "--trust-code": args.trust_code}
    return shlex.join([*words, *(name for name, given in switches.items() if given)])


def loaded(args: argparse.Namespace) -> Pair:
    """Load the target and the draft that the flags name, and print their dtype to stderr.

    Raises
    ------
    ValueError
        Errors of :func:`cactus_theory.decoding.load_pair`; more than two revisions.
    """
    asked: str = args.dtype
    # None for each of the two that was not given
    revision, draft_revision, *more = *(args.revision or ()), None, None
    if (count := getattr(args, "threads", None)) is not None:
        check.threads(count)
    if any(more):
        raise ValueError(f"--revision: at most two may be given; got {len(args.revision)}")
    pair = load_pair(
        args.target,
        getattr(args, "draft", None),
        args.device,
        asked,
        revision=revision,
        draft_revision=draft_revision,
        trust_code=args.trust_code,
    )
    if asked != AUTO:
        warnings.filterwarnings("ignore", ".* runs in .* on a CPU")  # the user chose the dtype
    rule = f" (--dtype auto: {dtype_rule(asked, args.device)})" if asked == AUTO else ""
    if rule and not has_instructions(torch.bfloat16) and pair.target.device.type == "cpu":
        rule = " (--dtype auto: float32, as this processor lacks bfloat16)"
    threads = choose_threads(getattr(args, "threads", None), pair.target)
    if not getattr(args, "json", False):  # the JSON object has the dtype
        print(f"models run in {pair.dtype}{rule} on {threads}", file=sys.stderr)
    return pair


def opened(
    args: argparse.Namespace, drawn: bool = False
) -> tuple[Pair, list[Prompt], list[list[int]]]:
    """Return the models and the prompts that the flags name, and the token ids of the prompts.

    Prompts are read first, so that an error in them costs no loading of models. With ``drawn`` the
    ids are shuffled by ``--seed``, as a command may decode only the first few of a sorted file.
    """
    prompts = given_prompts(args)
    pair = loaded(args)
    ids = rendered_ids(args, pair.tokenizer, prompts)
    return pair, prompts, random.Random(args.seed).sample(ids, len(ids)) if drawn else ids
