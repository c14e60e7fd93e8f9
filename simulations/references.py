"""Every rule along answers that people wrote, exact in its laws. Resumes.

At each token of an answer, the target's row q and the draft's row p (of the first drafted token)
are computed after the prompt and the answer's earlier tokens, at temperature 1. Nothing is
sampled: errors are the jackknife's over answers, and differences to lossless sampling are paired.
``acceptance`` and ``gain`` are means over the places with a draft, the other columns over all
tokens; without a draft a policy emits its undrafted row. ``reference_change`` is h(x) − q(x) for
the answer's token x; ``quadratic_change`` and ``log_change`` are the changes of the proper scores
2 h(x) − Σ h² and ln h(x) from h = q; ``chance`` is the product of h(x) over an answer.

A file has JSON lines: a prompt, in any of the usual forms, with the answer's text under ``answer``
(or ``canonical_solution``) and optionally, under ``beginning``, a text before the answer.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base.chunks import in_parts
from cactus_theory.base.copies import called, lawful
from cactus_theory.base.prompts import Prompt, is_utf8, prompts_of
from cactus_theory.base.specs import label
from cactus_theory.commands import models
from cactus_theory.commands.flags import add_chat, add_models, add_policy, rendered_ids, rendering
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.drafters.eagle3 import Eagle3Drafter
from cactus_theory.decoding.drafters.interface import DraftContext
from cactus_theory.decoding.drafters.ngram import NGram
from cactus_theory.decoding.models import CachedModel, longest_text, text_config
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.text import Texts, fitted
from cactus_theory.policies import FixedTarget, Policy, read_policy
from cactus_theory.policies.policy import one_hot
from cactus_theory.policies.tilt import colder, tilt_of, untilted
from cactus_theory.traces.estimate import ratio_of_sums

from .common.inputs import PAIR, ROOT, at_least, digest, settings_of
from .common.journal import Journal, filled
from .common.results import columns, estimates, publish

# keys for an answer's text; a line has exactly one of these keys
ANSWERS = ("answer", "canonical_solution")
RULES, FACTS = ROOT / "simulations/rules.py", ROOT / "simulations/data/facts.jsonl"
LOSSLESS = "speculative"
MORE = "0.6 0.72 0.74 0.9 0.93 1.16 1.2 1.27 1.6 1.66 1.75 2.4 2.6"
# each line: a policy, then the values of the knob. MORE has prices at which bands spend the nats of
# lenience's values, and others
SWEPT = f"""band:price={{}} 0.6 0.75 0.9 1.2 1.6 2.4
band:price={{}},tilt=0.03 {MORE}
band:price={{}},tilt=0.045 {MORE}
band:price={{}},tilt=0.08 0.6 0.74 0.77 0.93 0.97 1.2 1.25 1.6 2.4
band:price={{}},tilt=0.12 0.6 0.75 0.9 1.2 1.6 2.4
band:price={{}},head=0.2 0.5 1 2
lenience:lenience={{}} 0.4 0.5 0.6 0.7 0.8
lenience:lenience={{}},tilt=0.04 0.4 0.5 0.6
cactus:delta={{}} 0.0001 0.001 0.01 0.05
typical:epsilon={{}},recover=target 0.3 0.09 0.03
typical:epsilon={{}} 0.09
mixture:alpha={{}} 0.05 0.1 0.2
cascade_token_3:alpha={{}} 0.5 0.8 0.95
relaxed:delta={{}} 0.2 0.6
relaxed:delta={{}},recover=argmax 0.1 0.4
speculative:tilt={{}} 0.02 0.04 0.08 0.15"""
POLICIES = [f"{RULES}:" * policy.startswith("cascade") + policy.format(value)
            for policy, *values in map(str.split, SWEPT.splitlines())
            for value in values]  # fmt: skip
# columns are sums over an answer's tokens, by policy; the last two are one number an answer
COLUMNS = ("acceptance", "gain", "nats", "surprise", "agreement", "entropy", "reference_change",
           "quadratic_change", "log_change", "chance", "chance_change")  # fmt: skip
OVER = {"drafted": COLUMNS[:2], "tokens": COLUMNS[2:-2], "answers": COLUMNS[-2:]}
Rows = Float[Tensor, "tokens vocab"]
# replaces 0 inside a logarithm that is multiplied by 0
TINY = torch.finfo(torch.float64).tiny


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    text = "JSON lines of a prompt and its answer"
    add("--answers", type=Path, nargs="+", default=[FACTS], metavar="FILE", help=text)
    add_chat(parser)
    add("--num-answers", type=int, default=100, metavar="N", help="of each file, its first ones")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer, its first ones")
    add_policy(parser, "instead of the swept ones", default=POLICIES)
    add("--out", type=Path, default=Path("build/references"), metavar="DIR")
    parser.set_defaults(seed=None, eos_token_ids=None, no_start=False, threads=1)


def run(args: argparse.Namespace) -> int:
    at_least(args, num_answers=2, max_new_tokens=1)
    policies = {spec: read_policy(spec) for spec in dict.fromkeys([LOSSLESS, *args.policy])}
    files = [prompts_of(path, "--answers")[: args.num_answers] for path in args.answers]
    prompts = sum(files, [])
    texts = [_texts(prompt) for prompt in prompts]
    rendering(args).check(prompts)
    if str(args.draft) == "none":
        raise ValueError("--draft: must be a draft, whose tokens are accepted; got none")
    pair = models.loaded(args)
    ids = rendered_ids(args, pair.tokenizer, prompts)
    read = [
        _read(pair, args.max_new_tokens, *each) for each in zip(prompts, ids, texts, strict=True)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    asked = {"answers": digest(repr(texts).encode()), "policies": list(policies)}
    settings = settings_of(args, prompts, "num_answers", methods=args.policy, **asked)
    rows = list[Any]()

    def along(before: list[int], own: list[int], _: bool) -> dict[str, Any]:
        return _summed(*rows_along(pair, before, own), own, policies)

    with Journal(args.out / "journal.jsonl", settings) as journal:
        jobs = {str(number): partial(along, *text) for number, text in enumerate(read, 1)}
        left = iter(filled(jobs, journal, "answers").values())
        for path, own in zip(args.answers, files, strict=True):
            rows += _rows(path.name, list(policies), [next(left) for _ in own])
    cut = f"{sum(cut for *_, cut in read)} of {len(read)} answers are longer than read"
    publish(args, rows, args.out / "references.csv", dtype=pair.dtype, cut=cut)
    shown = ("file", "policy", "gain", "nats", "reference_change", "chance_change", "better")
    print(columns(rows, {name: name.replace("_", " ") for name in shown}, cut))
    return 0


def _texts(prompt: Prompt) -> tuple[str, str]:
    """Return the beginning and the answer of a line; raise ValueError for a line without answer."""
    found = [prompt.columns[name] for name in ANSWERS if name in prompt.columns]
    values: Any = prompt.columns.get("beginning", ""), *found
    if len(found) == 1 and found[0] and all(isinstance(v, str) and is_utf8(v) for v in values):
        return values
    rule = f"must hold a text under one of {', '.join(ANSWERS)}, and under 'beginning', if any"
    raise ValueError(f"{prompt.place} {rule}; got {values[::-1]!r:.80}")


def _read(
    pair: Any, most: int, prompt: Prompt, before: list[int], texts: tuple[str, str]
) -> tuple[list[int], list[int], bool]:
    """Return the ids before an answer, the answer's ids, and whether the answer was cut.

    An answer is cut to ``most`` tokens and to both models' positions. Raises ValueError if the
    prompt leaves no position.
    """
    begun, ids = (pair.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    before = before + begun
    own = pair.target, getattr(as_drafter(pair.draft), "model", pair.target)
    room = min(filter(None, map(longest_text, own)), default=math.inf) - len(before)
    if room < 1:
        rule = "must leave the models a position for the answer"
        raise ValueError(f"{prompt.place} {rule}; got {len(before)} tokens before it")
    return before, ids[: int(min(most, room))], len(ids) > min(most, room)


@torch.inference_mode()
def rows_along(
    pair: Any, before: Sequence[int], ids: Sequence[int]
) -> tuple[Rows, Rows, Bool[Tensor, "tokens"]]:
    """Return target rows (all tokens), draft rows (tokens with a draft), and a mask of these.

    Rows are float64. Each model reads the whole text in one pass, a head with the target's states.
    An n-gram drafter looks up its token after every prefix.
    """
    start, read = len(before), len(before) + len(ids) - 1
    drafter: Any = as_drafter(pair.draft)
    texts = Texts([[*before, *ids]], 1, frozenset(), pair.target.device)
    target = CachedModel(pair.target, read, reads=drafter.reads(pair.target))
    fed = texts.take([0], [read])
    q = target.feed(fed, [read], [len(ids)])[0].double().softmax(-1)
    places = torch.arange(start, read + 1, device=q.device)
    setting = DraftContext(pair.target, texts, Warp(1.0), Stopwatch(), 1, features=target)
    if isinstance(drafter, NGram):
        drafting: Any = drafter.begin(setting)
        seen, found = texts.rows[0].ids, list[int]()
        del seen[start:]
        for token in ids:
            found += drafting.look_up(0, 1) or [-1]
            seen.append(token)
        tokens = torch.tensor(found, device=q.device)
        return q, one_hot(tokens[tokens >= 0], q), tokens >= 0
    if isinstance(drafter, Eagle3Drafter):
        # a head reads the states of the token before the last: places 0 and 1 have no draft
        drafting, drafted = drafter.begin(setting), places >= 2
        logits = drafting.logits(drafting.run(*drafting.fresh([1]))[:, places[drafted] - 2])
    else:
        drafted = places > 0
        model = getattr(drafter, "model", None) or drafter.of(pair.target)
        known = fed.clamp(max=text_config(model).vocab_size - 1)
        logits = CachedModel(model, read, drafts=True).feed(known, [read], [len(ids)])
    return q, fitted(logits, q.shape[-1])[0].double().softmax(-1), drafted


def _summed(
    q: Rows, p: Rows, drafted: Tensor, ids: Sequence[int], policies: Mapping[str, Policy]
) -> dict[str, Any]:
    """Return an answer's sums by policy, its number of tokens, and how many had a draft."""
    sums, tokens = np.zeros((len(policies), len(COLUMNS))), torch.tensor(ids, device=q.device)
    for some, drafts in ((drafted, p), (~drafted, None)):
        rows, of = q[some], tokens[some]
        for at, (own,) in in_parts(rows) if len(rows) else ():
            seen = None if drafts is None else drafts[at]
            sums += _measured(own, seen, of[at], policies.values())
    sums[:, -2] = np.exp(sums[:, -2])
    sums[:, -1] = sums[:, -2] - math.exp(sums[0, -1])
    return {"tokens": len(ids), "drafted": int(drafted.sum()), "sums": sums.tolist()}


def _measured(q: Rows, p: Rows | None, ids: Tensor, policies: Iterable[Policy]) -> Any:
    """Return the sums (policies, COLUMNS) over rows; the last two are of ln h(x) and ln q(x)."""
    zero, q_x = q == 0, q.gather(1, ids[:, None])[:, 0]
    logs, lawless = torch.where(zero, 0.0, q.log()), bool(zero.any())
    entropy, squares = -(q * logs).sum(-1), (q * q).sum(-1)
    lossless = torch.zeros_like(q_x) if p is None else torch.minimum(q, p).sum(-1)
    tilted, found = dict[float, Tensor](), []
    for policy in policies:
        if (tilt := tilt_of(policy)) not in tilted:
            tilted[tilt] = colder(q, tilt)
        h, accepted = _law(policy, q, p, tilted[tilt])
        h_x, moved = h.gather(1, ids[:, None])[:, 0], h - q
        own = -(h * h.clamp(min=TINY).log()).sum(-1)
        surprise = -(moved * logs).sum(-1)
        if lawless:
            surprise = torch.where((h * zero).sum(-1) > 0, torch.inf, surprise)
        nats = (surprise + entropy - own).clamp(min=0.0)
        cells = accepted, accepted - lossless, nats, surprise, (moved * q).sum(-1), own, h_x - q_x
        quadratic = 2 * (h_x - q_x) - (h * h).sum(-1) + squares
        cells += quadratic, h_x.log() - q_x.log(), h_x.log(), q_x.log()
        found.append([float(cell.sum()) for cell in cells])
    return np.array(found)


def _law(policy: Policy, q: Rows, p: Rows | None, tilted: Rows) -> tuple[Rows, Tensor]:
    """Return a policy's emitted law and acceptance; ``tilted`` are q's rows after the tilt."""
    if p is None:
        return (tilted if tilt_of(policy) else policy.undrafted(q)), torch.zeros_like(q[:, 0])
    about = untilted(policy)
    law = lawful(called(policy), about.emitted(tilted, p))
    if isinstance(about, FixedTarget):
        return law, torch.minimum(law, p).sum(-1)
    return law, (p * about.acceptance_row(tilted, p)).sum(-1)


def _rows(name: str, policies: Sequence[str], results: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the table's rows for a file, with jackknife errors over the answers.

    ``unforetold`` is ``reference_change`` − ``agreement``. Agreement is Σ q (h − q), the expected
    ``reference_change`` if the target had written the answers, so ``unforetold`` is then 0 on
    average. ``better`` names the policy with most acceptance among the policies that accept more
    than this policy, spend no more nats, and have no smaller ``reference_change``; ``better_gain``
    is the difference in acceptance.
    """
    sums = np.array([own["sums"] for own in results])
    counts = {key: np.array([float(own[key]) for own in results]) for key in ("tokens", "drafted")}
    about = {"answers": len(results)} | {key: int(own.sum()) for key, own in counts.items()}
    counts["answers"] = np.ones(len(results))
    below = {column: counts[key] for key, columns in OVER.items() for column in columns}
    every = [{column: ratio_of_sums(above, below[column], name)
              for column, above in zip(COLUMNS, own, strict=True)}
             for own in sums.transpose(1, 2, 0)]  # fmt: skip
    shown, rows = [":".join(filter(None, label(policy))) for policy in policies], []
    for policy, own in zip(shown, every, strict=True):
        row: dict[str, Any] = {"file": name, "policy": policy} | about | estimates(**own)
        gain, nats, reference = (own[key].value for key in ("gain", "nats", "reference_change"))
        others = [(other["gain"].value, at) for at, other in enumerate(every)
                  if other["nats"].value <= nats and other["gain"].value > gain
                  and other["reference_change"].value >= reference]  # fmt: skip
        at = max(others)[1] if others else None
        row |= estimates(unforetold=own["reference_change"] - own["agreement"])
        row["better"] = None if at is None else shown[at]
        more = None if at is None else every[at]["gain"] - own["gain"]
        rows.append(row | estimates(better_gain=more))
    return rows
