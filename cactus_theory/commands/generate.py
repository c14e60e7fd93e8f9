"""``cactus-theory generate``: decode one prompt with a pair of models."""

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.answer_bounds import event_bounds
from cactus_theory.base import arguments as check
from cactus_theory.base.prompts import is_utf8
from cactus_theory.base.tables import print_json
from cactus_theory.commands.flags import (
    add_cuts,
    add_policy,
    add_threads,
    add_trust,
    choose_threads,
    given_cuts,
    one_policy,
)
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.tuned import TunedSetting
from cactus_theory.verify.contract import verifiers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_policy(parser)
    add_trust(parser)
    parser.add_argument("--target", required=True, metavar="DIR", help="target model")
    parser.add_argument("--draft", required=True, metavar="DIR", help="draft model, or head")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "--tuned",
        metavar="FILE.json",
        help="policy, verifier, K and temperature as cactus-theory tune --out found them",
    )
    parser.add_argument(
        "--verifier",
        help=f"one of {', '.join(verifiers())}: token by token (default), or each drafted path "
        "as a whole, which accepts more (tree: with siblings, too, and their default)",
    )
    parser.add_argument(
        "--siblings",
        type=int,
        metavar="M",
        help="draft the M likeliest tokens beside each one, which may catch what replaces it",
    )
    parser.add_argument(
        "--cap",
        type=float,
        metavar="NATS",
        help="spend at most so many nats a token on any answer, whatever the policy would",
    )
    parser.add_argument(
        "--span",
        nargs=2,
        metavar=("OPEN", "CLOSE"),
        help='follow the policy between these two texts only ("<think>" "</think>"), and be '
        "lossless outside",
    )
    parser.add_argument("--num-draft-tokens", type=int, metavar="K", help="default: 4")
    parser.add_argument(
        "--draft-stop",
        type=float,
        metavar="THRESHOLD",
        help="end a draft where all of it is accepted with less than this probability, as far as "
        "the draft's own confidence tells (0.3, say)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, help="default: 1; 0 decodes greedily")
    add_cuts(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    add_threads(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object only")
    output.add_argument("--stream", action="store_true", help="print the text while it is decoded")


def run(args: argparse.Namespace) -> int:
    """Decode, print the text and what it took; return 0."""
    for name, text in (
        ("--prompt", args.prompt),
        *(("--span", marker) for marker in args.span or ()),
    ):
        if not is_utf8(text):
            raise ValueError(f"{name}: must be UTF-8 text; got {text!r:.60}")
    tuned = _tuned_setting(args)
    from cactus_theory.decoding import Callbacks, DecodeOptions, decode, load_pair
    from cactus_theory.decoding.drafters import Siblings
    from cactus_theory.decoding.stream import TextPieces

    keywords: dict[str, Any] = {} if tuned.plain else {**tuned.options}
    if not tuned.plain:
        keywords["policy"] = _scheduled(args, tuned)
    keywords |= tuned.cuts.options(tuned.temperature)
    options = DecodeOptions(  # checked before models are loaded
        **keywords, max_new_tokens=args.max_new_tokens, seed=args.seed
    )
    check.optional_module("transformers", "llm")
    threads = choose_threads(args)
    where = {"device": args.device, "trust_code": args.trust_code}
    pair = load_pair(args.target, args.draft, **where, heads=True)
    ids = torch.tensor([pair.tokenizer.encode(args.prompt)], device=args.device)
    if not ids.numel():
        raise ValueError(f"--prompt: must hold at least one token; got {args.prompt!r}")
    tuned.check_pair(pair.target, pair.draft)
    if warning := tuned.below_floor:
        print(f"cactus-theory generate: {warning}", file=sys.stderr)
    pieces = TextPieces(pair.tokenizer)
    options = replace(
        options,
        policy=options.policy if tuned.plain else _scheduled(args, tuned, pair.tokenizer),
        eos_token_ids=pair.target.generation_config.eos_token_id,
    )
    if args.stream:
        _print(args.prompt)
        show = Callbacks(on_tokens=lambda new: _print(pieces.add(new)))
        options = replace(options, callbacks=show)
    drafter: Any = None if tuned.plain else tuned.cuts.drafter(pair.draft, tuned.temperature)
    if args.draft_stop is not None:
        if not hasattr(drafter, "stop"):
            raise ValueError(f"--draft-stop: {type(drafter).__name__} has none")
        drafter = replace(drafter, stop=args.draft_stop)
    if args.siblings:
        drafter = Siblings(drafter, args.siblings)
    result = decode(pair.target, drafter, ids, options)
    text = pair.tokenizer.decode(result.output_token_ids[0], skip_special_tokens=True)
    statistics = result.statistics()
    if args.cap is not None:
        bounds = event_bounds(0.9, per_token=args.cap, tokens=args.max_new_tokens)
        statistics["event_bounds"] = bounds.sentence
    if args.json:
        spec = "plain" if tuned.plain else options.policies[0].spec
        header = {"policy": spec, "verifier": tuned.verifier, "text": text}
        readings = [reading.as_dict() for reading in result.readings()]
        return print_json(header | statistics | {"readings": readings})
    print(pieces.rest() if args.stream else args.prompt + text)
    for name, value in {"on": threads, **statistics}.items():
        digits = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):<28} {digits}", file=sys.stderr)
    return 0


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _tuned_setting(args: argparse.Namespace) -> TunedSetting:
    """Return the setting to decode with, from the flags or a file of ``cactus-theory tune``."""
    from cactus_theory.decoding.schedule import find_followed

    named = one_policy(args)
    if (named is None) == (args.tuned is None):
        got = "neither" if args.tuned is None else "both"
        raise ValueError(f"--policy, --tuned: exactly one must be given; got {got}")
    if named is not None:
        width = 4 if args.num_draft_tokens is None else args.num_draft_tokens
        temperature = 1.0 if args.temperature is None else args.temperature
        policy: Any = find_followed(named)
        verifier = args.verifier or ("chain" if args.siblings is None else "tree")
        cuts = given_cuts(args) or WHOLE
        return TunedSetting(policy, verifier, width, temperature, cuts=cuts)
    for name in ("verifier", "num_draft_tokens", "draft_stop", "siblings"):
        if (value := getattr(args, name)) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: must not be given with --tuned; got {value}")
    tuned = ct.load_tuned(args.tuned, trust_code=args.trust_code)
    if args.temperature not in (None, tuned.temperature):
        raise ValueError(
            f"--temperature: must be the {tuned.temperature:g} that was tuned at; "
            f"got {args.temperature:g}"
        )
    if (cuts := given_cuts(args)) not in (None, tuned.cuts):
        raise ValueError(f"--top-k, --top-p: must be those of the file, {tuned.cuts}; got {cuts}")
    return tuned


def _scheduled(args: argparse.Namespace, tuned: TunedSetting, tokenizer: Any = None) -> Any:
    """Return the policy under ``--span``, which takes a tokenizer, and ``--cap``."""
    from cactus_theory.decoding import Between, Ledger
    from cactus_theory.decoding.schedule import spellings

    policy: Any = tuned.policy
    if args.span and tokenizer is not None:
        opening, closing = (spellings(tokenizer, text) for text in args.span)
        policy = Between(policy, opening=opening, closing=closing)
    return policy if args.cap is None else Ledger(policy, args.cap)
