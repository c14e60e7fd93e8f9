"""Price the lossy rules of engines and papers on one pair: tokens per call, nats per token.

At temperature 1 every rule is replayed on logged rows, of sampled and of greedy drafts, at its
engine's defaults and at published settings, with the whole text as between markers. Beside it stand
the band token by token and the soft band in blocks, at the same nats and at the same tokens; errors
count texts, differences are paired. FLy looks ahead: its nats are exact for greedy drafts, and for
sampled ones, where rows after undrafted tokens count, an estimate from drafting on with both
models. At temperature 0 no KL is finite: greedy rules get the share of tokens that they
change, which is the total variation of a token. vLLM's ``synthetic`` mode accepts by given rates
whatever was drafted: it is for load tests, has no law near a model's, and is not priced.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.decoding import load_pair
from cactus_theory.traces import Estimate, Replay, Trace, divergence_at
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.replays import replay_widths
from cactus_theory.verify import find_verifier

from ..common.inputs import add_pair_arguments, at_least, prompts_of
from ..common.progress import Progress
from ..common.results import publish
from ..common.terminal import fitted, width_of_terminal
from ..traces.log import DRAFTERS as EVERY_DRAFTER
from ..traces.table import reached, valued
from .ahead import Looked, looked_ahead
from .greedy import counted, cycles
from .settings import AT_ZERO, PRICES, SAMPLED, Rule

WIDEST = 100
FAMILIES = {"band": ("band", "chain"), "soft_band": ("soft_band", "block")}
METERED = ("kl", "total_variation")
# with an error each; empty where a rule has no such number
COLUMNS = ("tokens_per_call", "tokens_ratio", "kl_per_token", "tv_per_token", "changed_calls",
           *(f"{name}_{said}" for name in FAMILIES for said in ("tokens_at_kl", "kl_at_tokens"))
           )  # fmt: skip
# nats that are none
ROUNDING = 1e-9
# sampled from the draft's rows, as paper and theory have it; certain, as most engines draft
DRAFTERS = {name: EVERY_DRAFTER[name] for name in ("sampled", "greedy")}
Row = dict[str, Any]
Replays = dict[tuple[str, str], dict[int, Replay]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--num-draft-tokens", type=int, nargs="+", default=[5, 8], metavar="K")
    add("--cycles", type=int, default=160, help="logged at temperature 1, at least so many")
    add("--ahead", type=int, default=32, help="of those, drafted on from for FLy's nats")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of a text")
    add("--greedy-prompts", type=int, default=8, help="prompts of the texts of temperature 0")
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    add("--seed", type=int, default=0)
    add("--work", type=Path, default=Path("build/rules"), metavar="DIR", help="for the trace")
    add("--out", type=Path, default=Path("build/rules.csv"), metavar="FILE.csv")


def run(args: argparse.Namespace) -> int:
    """Price every rule, print the tables, write the CSV; return 0."""
    at_least(args, num_draft_tokens=2, cycles=1, ahead=2, max_new_tokens=1, greedy_prompts=2)
    pair = load_pair(args.target, args.draft)
    prompts = [pair.tokenizer(text)["input_ids"] for text in prompts_of(args.prompts)]
    ends = _ends(pair, args.eos_token_ids)
    widths = sorted(set(args.num_draft_tokens))
    made: list[Row] = []
    for drafts, drafter in DRAFTERS.items():
        options = {"num_draft_tokens": max(widths), "eos_token_ids": ends}
        trace = log_shown(args, pair, prompts, args.work / drafts,
                          draft_model=drafter(pair.draft), **options)  # fmt: skip
        found = _replayed(trace, widths)
        ahead = sorted({own.verifier for own in SAMPLED if find_verifier(own.verifier).looks_ahead})
        looked = looked_ahead(pair, prompts, trace, [(own, k) for own in ahead for k in widths],
                              cycles=args.ahead, seed=args.seed)  # fmt: skip
        made += [_row(drafts, rule, width, found, looked) for width in widths for rule in SAMPLED]
    made += _at_zero(args, pair, prompts, ends, widths)
    publish(args, made, nats=NATS)
    print(_shown(made))
    return 0


NATS = (
    "KL of the emitted law from the target's row, per emitted token, bonus tokens free; FLy's for "
    "sampled drafts is estimated, on its own number of cycles; at temperature 0 tv_per_token is "
    "the share of tokens that were changed, changed_calls that of calls; _se over texts"
)


def _ends(pair: Any, given: Sequence[int] | None) -> list[int]:
    """Return the tokens that end a text: those given, or the target's own."""
    ends = pair.target.generation_config.eos_token_id if given is None else given
    return [ends] if isinstance(ends, int) else sorted(ends or [])


def _replayed(trace: Trace, widths: Sequence[int]) -> Replays:
    """Return (policy, verifier) → K → replay, of the rules and of the two bands."""
    cases = {(own.policy, own.verifier): METERED for own in SAMPLED}
    cases = {case: () if find_verifier(case[1]).looks_ahead else own for case, own in cases.items()}
    for name, verifier in FAMILIES.values():
        cases |= {(f"{name}:price={price:g}", verifier): METERED for price in PRICES}
        cases[("speculative", verifier)] = METERED
    found: Replays = {}
    with Progress("replaying", len(cases)) as progress:
        for (policy, verifier), kinds in cases.items():
            found[policy, verifier] = replay_widths(trace, policy, verifier, widths, kinds)
            progress.advance(policy)
    return found


def _family(found: Replays, name: str, width: int) -> list[Replay]:
    """Return a band at every price, and lossless sampling at its end."""
    policy, verifier = FAMILIES[name]
    specs = ["speculative", *(f"{policy}:price={price:g}" for price in PRICES)]
    return [found[spec, verifier][width] for spec in specs]


def _row(drafts: str, rule: Rule, width: int, found: Replays, looked: Looked) -> Row:
    """Return what a rule pays and what the bands could pay, at temperature 1."""
    own, ahead = found[rule.policy, rule.verifier][width], looked.get((rule.verifier, width))
    kl = ahead.kl if ahead else own.divergence_per_token()
    tv = ahead.tv if ahead else own.divergence_per_token("total_variation")
    lossless = found["speculative", "chain"][width].tokens_per_call
    cycles = ahead.cycles if ahead else int(own.cycles.sum())
    row = _named(1.0, drafts, rule, width) | {"cycles": cycles}
    row |= valued("tokens_per_call", own.tokens_per_call)
    row |= valued("tokens_ratio", own.tokens_per_call / lossless)
    row |= valued("kl_per_token", kl) | valued("tv_per_token", tv)
    for name in FAMILIES:
        family = _family(found, name, width)
        at_kl = reached(family, kl) if kl.value > ROUNDING else family[0].tokens_per_call
        found_at = {"tokens_at_kl": at_kl, "kl_at_tokens": _price_of(family, own.tokens_per_call)}
        for said, estimate in found_at.items():
            row |= {} if estimate is None else valued(f"{name}_{said}", estimate)
    return row


def _named(temperature: float, drafts: str, rule: Rule, width: int) -> Row:
    """Return every column: what the row is about, and nothing yet of the others."""
    row = {"temperature": temperature, "drafts": drafts, "num_draft_tokens": width}
    row |= {name: getattr(rule, name) for name in ("engine", "setting", "policy", "verifier")}
    return (
        row | {"cycles": 0} | dict.fromkeys(own + said for own in COLUMNS for said in ("", "_se"))
    )


def _price_of(family: Sequence[Replay], tokens: Estimate) -> Estimate | None:
    """Return the nats of a family at so many tokens; 0 where lossless sampling has as many."""
    if tokens.value <= family[0].tokens_per_call.value:
        return Estimate(0.0, np.zeros_like(tokens.left_out), tokens.source)
    try:
        return divergence_at(family, tokens)
    except ValueError:
        return None


def _at_zero(
    args: argparse.Namespace, pair: Any, prompts: list[list[int]], ends: list[int],
    widths: Sequence[int],
) -> Iterator[Row]:  # fmt: skip
    """Yield what each greedy rule accepts and changes."""
    own = prompts[: args.greedy_prompts]
    for width in widths:
        drafts = list(cycles(pair, own, width, args.max_new_tokens, ends))
        for rule in AT_ZERO:
            told = counted(rule, drafts, ends, f"greedy texts, K={width}")
            lossless = counted(AT_ZERO[0], drafts, ends, f"greedy texts, K={width}")
            ratio = told["tokens_per_call"] / lossless["tokens_per_call"]
            row = _named(0.0, "greedy", rule, width) | {"cycles": len(drafts)}
            for name, estimate in (told | {"tokens_ratio": ratio}).items():
                row |= valued(name, estimate)
            yield row


def _shown(made: Sequence[Row]) -> str:
    """Return the tables as a terminal shows them."""
    width, parts = width_of_terminal(WIDEST), []
    names = ("tokens_per_call", "kl_per_token", "band_tokens_at_kl", "soft_band_tokens_at_kl",
             "soft_band_kl_at_tokens")  # fmt: skip
    heads = ("rule", "K", "tokens/call", "nats/token", "band*", "soft band*", "its nats**")
    for drafts in DRAFTERS:
        own = [row for row in made if row["temperature"] and row["drafts"] == drafts]
        title = f"temperature 1, {drafts} drafts"
        parts.append(fitted(heads, _cells(own, names), width, title))
    heads = ("rule", "K", "tokens/call", "x exact match", "changed tokens", "changed calls")
    names = ("tokens_per_call", "tokens_ratio", "tv_per_token", "changed_calls")
    own = [row for row in made if not row["temperature"]]
    parts.append(fitted(heads, _cells(own, names), width, "temperature 0, greedy drafts"))
    return "\n\n".join([*parts, "* tokens per call at the rule's nats, ** nats at its tokens"])


def _cells(made: Sequence[Row], names: Sequence[str]) -> list[list[str]]:
    return [
        [f"{row['engine']}, {row['setting']}", str(row["num_draft_tokens"]),
         *("–" if row[name] is None else f"{row[name]:.3f}" for name in names)]
        for row in made
    ]  # fmt: skip
