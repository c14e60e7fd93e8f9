"""``cactus-theory generate``: decode prompts with a draft, or with the target alone."""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.names import VERIFIERS
from cactus_theory.base.prompts import Prompt, is_utf8
from cactus_theory.commands.flags import (
    PROMPTS,
    add_chat,
    add_cuts,
    add_models,
    add_policy,
    add_threads,
    given_prompts,
    one_policy,
    refuse,
    rendered_ids,
    rendering,
)

# parts of a decode's time, and their names in the summary
PARTS = {"target": "target", "draft": "draft", "verify": "verification and draws"}
PARTS |= {"other": "other", "preparation": "once, at the start", "meter": "meter"}
# flags for drafting and verification, which have no effect without a draft
OF_DRAFTS = "policy verifier siblings cap num_draft_tokens draft_top_k draft_top_p".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_policy(parser)
    add_models(parser, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompts", metavar="FILE", help=f"{PROMPTS}: a JSON line out for each")
    add_chat(parser)
    add = parser.add_argument
    text = "policy, verifier, K and temperature as found by tune --out"
    add("--tuned", metavar="FILE.json", help=text)
    add("--verifier",
        help=f"one of {', '.join(VERIFIERS)}: chain (default) judges token by token, block "
        "a path as a whole, which accepts more, tree siblings, too (their default)")  # fmt: skip
    text = "beside each sampled token draft the M likeliest of its row, of which one may"
    add("--siblings", type=int, metavar="M", help=f"{text} replace it if it is rejected")
    text = "spend at most so many nats a token on any answer (of KL, or of regret)"
    add("--cap", type=float, metavar="NATS", help=text)
    add("--num-draft-tokens", type=int, metavar="K", help=f"default: {defaults.NUM_DRAFT_TOKENS}")
    usual = defaults.MAX_NEW_TOKENS
    add("--max-new-tokens", type=int, default=usual, metavar="N", help="default: %(default)s")
    text = f"default: {defaults.TEMPERATURE:g}; 0 decodes greedily"
    add("--temperature", type=float, help=f"{text}, and with --policy regret:price=20 nearly so")
    add_cuts(parser)
    text = "measure the nats spent (on); of a rule of your own, off saves V × V questions a token"
    add("--meter", choices=("on", "off"), default="on", help=text)
    add("--seed", type=int, default=defaults.SEED)
    add_threads(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object only")
    output.add_argument("--stream", action="store_true", help="print the text while it is decoded")


def run(args: argparse.Namespace) -> int:
    """Decode, print the text with its counts, nats and seconds; return 0."""
    from cactus_theory.base.tables import print_json
    from cactus_theory.commands.inputs import given_cuts
    from cactus_theory.commands.models import loaded
    from cactus_theory.decoding import DecodeOptions, Ledger
    from cactus_theory.decoding.drafters import Siblings
    from cactus_theory.decoding.schedule import read_rule
    from cactus_theory.decoding.truncation import WHOLE
    from cactus_theory.tuned import TunedSetting

    if args.prompts and (args.json or args.stream):
        raise ValueError("--json, --stream: must be given with --prompt; --prompts has JSON lines")
    if args.prompt is not None and not is_utf8(args.prompt):
        raise ValueError(f"--prompt: must be UTF-8 text; got {args.prompt!r:.60}")
    if args.siblings is not None:
        check.whole_number("--siblings", args.siblings, 1)
    prompts, drafted = given_prompts(args), args.draft is not None and str(args.draft) != "none"
    if not drafted:
        refuse(args, OF_DRAFTS, "must be given with --draft")
    named, cuts = one_policy(args), given_cuts(args)
    if args.tuned is None:
        usual = defaults.VERIFIER if args.siblings is None else "tree"
        asked = args.num_draft_tokens
        width = defaults.NUM_DRAFT_TOKENS if asked is None else asked
        temperature = defaults.TEMPERATURE if args.temperature is None else args.temperature
        policy: Any = read_rule(named or defaults.POLICY) if drafted else None
        setting = TunedSetting(policy, width, args.verifier or usual, temperature, cuts or WHOLE)
    else:
        if named is not None:
            raise ValueError("--policy, --tuned: at most one may be given; got both")
        refuse(args, ("verifier", "num_draft_tokens", "siblings"), "must not be given with --tuned")
        setting = ct.load_tuned(args.tuned, trust_code=args.trust_code)
        _check_tuned(setting, args.tuned, args.temperature, cuts, drafted)
        if setting.plain:
            refuse(args, ("cap",), f"{args.tuned} is of plain decoding, exact")
    if args.cap is not None and not setting.plain:
        setting = replace(setting, policy=Ledger(setting.policy, args.cap))
    sizes = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "meter": args.meter == "on"}
    options = DecodeOptions(**setting.keywords, **sizes)
    check.optional_module("transformers", "llm")  # options are checked before models are loaded
    pair = loaded(args)
    setting.check_pair(pair.target, pair.draft)
    if setting.plain and drafted:
        _note(f"plain decoding was the fastest in {args.tuned}: nothing is drafted")
    lossy = named not in (None, defaults.POLICY)
    if drafted and lossy and not options.temperature and not options.relaxes_greedy:
        exact = f"{named} relaxes nothing at temperature 0, unless it leaves the target's tokens"
        _note(f"{exact}; regret:price=20 does")
        # the decode would say so again
        warnings.filterwarnings("ignore", "policy: .* relaxes nothing at temperature 0")
    if warning := setting.below_floor:
        _note(warning)
    options = options.at_ends_of(pair.target)
    ids = rendered_ids(args, pair.tokenizer, prompts)
    drafter: Any = setting.drafter(pair.draft)
    if args.siblings:
        drafter = Siblings(drafter, args.siblings)
    if args.prompts:
        return _answers(pair, drafter, prompts, ids, options, args.cap)
    chat = rendering(args).chat  # then only the answer is printed, without the prompt
    if args.stream:
        options, streamer = _streamed(options, pair.tokenizer, ids[0], chat)
    answer = _decoded(pair, drafter, ids[0], options, args.cap)
    if args.json:
        return print_json(answer)
    if args.stream:
        streamer.end()
    else:
        print(("" if chat else args.prompt) + answer["text"])
    for line in _summary(answer, drafter is not None):
        print(line, file=sys.stderr)
    return 0


def _note(text: str) -> None:
    print(f"cactus-theory generate: {text}", file=sys.stderr)


def _summary(answer: dict[str, Any], drafted: bool) -> Iterator[str]:
    """Yield the counts, nats and seconds of a decode in a few lines."""
    tokens, calls = answer["num_tokens"], answer["target_calls"]
    end = "to its end" if answer["ended"] else "cut off at --max-new-tokens"
    yield f"{tokens} tokens, {end}, in {calls} calls of the target ({tokens / calls:.3g} a call)"
    if drafted:
        count, rates = answer["num_draft_tokens"], answer["conditional_acceptance_rates"]
        by_place = ", ".join("–" if math.isnan(rate) else f"{rate:.0%}" for rate in rates)
        accepted = f"{answer['num_accepted_tokens']} of {count} drafted tokens accepted"
        yield accepted + (f"; by position, of those reached: {by_place}" if rates else "")
    for unit, of in (("kl", ""), ("regret", " of regret")):
        if drafted and f"emitted_{unit}" in answer:
            per_token, largest = answer[f"emitted_{unit}_per_token"], answer[f"largest_row_{unit}"]
            total = f"{answer[f'emitted_{unit}']:.4g} nats{of}, {per_token:.4g} a token"
            yield f"{total}, {largest:.4g} at the largest row"
    yield f"{answer['tokens_per_second']:.4g} tokens a second; seconds: " + ", ".join(
        f"{answer[f'{part}_seconds']:.3g} {name}"
        for part, name in PARTS.items()
        if f"{part}_seconds" in answer and (drafted or part != "draft")
    )
    if "event_bounds" in answer:
        yield f"cap: {answer['event_bounds']}"
    yield "--json prints every number"


def _streamed(options: Any, tokenizer: Any, prompt_ids: Sequence[int], chat: bool) -> Any:
    """Return options that feed a ``TextStreamer`` of transformers, and the streamer.

    The prompt of a chat is not printed.
    """
    import torch
    from transformers import TextStreamer

    from cactus_theory.decoding.hugging_face import streamed

    streamer = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    streamer.put(torch.tensor([prompt_ids], device="cpu"))
    return replace(options, callbacks=streamed(options.callbacks, streamer)), streamer


def _check_tuned(
    tuned: Any, file: str, temperature: float | None, cuts: Any, drafted: bool
) -> None:
    """Raise ValueError if flags differ from the settings that the file was tuned with."""
    if temperature not in (None, tuned.temperature):
        raise ValueError(
            f"--temperature: must be the {tuned.temperature:g} that was tuned at; "
            f"got {temperature:g}"
        )
    if cuts not in (None, tuned.cuts):
        raise ValueError(f"--top-k, --top-p: must be those of the file, {tuned.cuts}; got {cuts}")
    if not drafted and not tuned.plain:
        raise ValueError(f"--draft: must be given with {file}, which tuned one; got none")


def _decoded(
    pair: Any, drafter: Any, prompt_ids: Sequence[int], options: Any, cap: float | None
) -> dict[str, Any]:
    """Decode one prompt; return the answer with its counts and, under a cap, its event bounds."""
    import torch

    from cactus_theory.answer_bounds import EventBounds
    from cactus_theory.decoding import decode
    from cactus_theory.decoding.text import completion

    ids = torch.tensor([prompt_ids], device=pair.target.device)
    result, plain = decode(pair.target, drafter, ids, options), drafter is None
    new = result.output_token_ids[0].tolist()
    answer = {
        "policy": "plain" if plain else options.policies[0].spec,
        "verifier": None if plain else options.parsed_verifier.spec,
        "text": completion(pair.tokenizer, prompt_ids, new),
        "prompt_token_ids": list(prompt_ids),
        "token_ids": new,
    } | result.statistics()
    if cap is not None and not options.relaxes_greedy:  # only a cap on KL bounds events
        bounds = EventBounds(0.9, per_token=cap, tokens=options.max_new_tokens)
        answer["event_bounds"] = bounds.sentence
    return answer


def _answers(
    pair: Any,
    drafter: Any,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    options: Any,
    cap: float | None,
) -> int:
    """Print the answer to each prompt i, decoded with the seed plus i, as a JSON line; return 0."""
    import torch

    from cactus_theory.base.tables import print_json
    from cactus_theory.decoding.prepare import opened_texts

    models = {"target_model": pair.target} | ({} if drafter is None else drafter.check(pair.target))
    for prompt, prompt_ids in zip(prompts, ids, strict=True):  # all before the first is decoded
        try:
            opened_texts(models, torch.tensor([prompt_ids], device="cpu"), options)
        except ValueError as error:
            raise ValueError(f"{prompt.place}: {error}") from error
    for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True)):
        seeded = replace(options, seed=options.seed + number)
        asked = {"prompt": prompt.text, "columns": dict(prompt.columns)}
        print_json(asked | _decoded(pair, drafter, prompt_ids, seeded, cap))
        sys.stdout.flush()
    return 0
