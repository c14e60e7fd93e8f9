r"""FLy's emitted law at a row, given how likely the draft goes on well after each token.

Let v_c(x) be the chance that, after token x at this row, the next c drafted tokens are accepted
natively: an average over rows of tokens that were not drafted. With N_c the probability, relative
to that of the drafted text, that the round is here with c more tokens that must be accepted so
(N_0: free), and o(x) whether a refusal of x may be overridden, the next token has the law

.. math:: h(x) ∝ N_0 [\min(p,q) + (p−q)_+ o v_W + r\, g](x) + Σ_{c>0} N_c \min(p,q) v_{c−1}(x),

r what is refused and g ∝ (q−p)_+. On Markov models v is exact and so is h. A deterministic draft
has one token at a row, so that rows below others do not count and the verdict's law says all. For
sampled drafts of real models v is estimated, by drafting on from the likeliest tokens with both
models.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding import generate
from cactus_theory.policies._policy import normalised_or
from cactus_theory.traces import Cycle, Estimate, Trace
from cactus_theory.traces.estimate import ratio_of_sums
from cactus_theory.verify import Assignment, Draft, Fly, find_verifier
from cactus_theory.verify.fly import WINDOW

SPENT = {"kl_per_token": ct.divergence("kl"), "tv_per_token": ct.divergence("total_variation")}
# tokens of a row from which drafting goes on: the draft's likeliest, and some for all the others
LIKELIEST, OTHERS = 10, 4
# drafts after each of the likeliest tokens; two halves of them tell the bias of their KL
DRAFTS = 4
# a path's target rows, draft rows and tokens
Path = tuple[Float[Tensor, "K vocab"], Float[Tensor, "K vocab"], Int[Tensor, "K"]]
# v_0 = 1 to v_W or further after each token of each row
Ahead = Float[Tensor, "K vocab depth"]


def node_laws(
    path: Path, ahead: Ahead, verifier: Fly
) -> Iterator[tuple[float, Float[Tensor, "vocab"]]]:
    """Yield for each row the chance that a round gets there, and the law of the next token.

    The chance is relative to that of drafting the text.
    """
    ids = path[2].tolist()
    window = int(verifier.windows(torch.tensor(len(ids))))
    chances = torch.zeros(window + 1, dtype=torch.float64)  # N_0 to N_W
    chances[0] = 1.0
    for place, (q, p, token, goes_on) in enumerate(zip(*path[:2], ids, ahead, strict=True)):
        overlap, excess = torch.minimum(p, q), (p - q).clamp(min=0.0)
        overrides = place + window < len(ids) and bool(verifier.unsure(q))
        deferred = excess * (q > 0) * goes_on[:, window] if overrides else torch.zeros_like(q)
        recovered = (excess.sum() - deferred.sum()) * normalised_or((q - p).clamp(min=0.0), q)
        mass = chances[0] * (overlap + deferred + recovered)
        mass = mass + overlap * (goes_on[:, :window] @ chances[1:])
        total = float(mass.sum())
        if total <= 0:
            return
        yield total, mass / total
        acceptance = overlap[token] / p[token]
        overridden = chances[0] * (1 - acceptance) * float(overrides and q[token] > 0)
        chances = acceptance * torch.cat(
            [chances[:2].sum(0, True), chances[2:], chances.new_zeros(1)]
        )
        chances[window] += overridden


@torch.no_grad()
def drafted_on(
    pair: Any, prefix: list[int], row: Float[Tensor, "vocab"], depth: int, source: torch.Generator
) -> Float[Tensor, "2 vocab depth"]:
    """Return two independent estimates of v_0 … v_depth after every token, from both models.

    ``row`` is the draft's after the prefix. Tokens beyond the likeliest share one estimate.
    """
    best = row.topk(min(LIKELIEST, int((row > 0).sum()))).indices
    rest = row.scatter(0, best, 0.0)
    drawn = rest.multinomial(OTHERS, True, generator=source) if float(rest.sum()) > 0 else best[:0]
    first = torch.cat([best.repeat_interleave(DRAFTS), drawn])
    chances = _chances(pair, prefix, first, depth, source)
    of_likeliest, of_others = chances.tensor_split([len(best) * DRAFTS])
    halves = torch.ones(2, len(row), depth + 1, dtype=torch.float64)
    for half, table in enumerate(halves):
        if len(of_others):
            table[:] = of_others[half::2].mean(0)
        table[best] = of_likeliest.view(len(best), DRAFTS, -1)[:, half::2].mean(1)
    return halves


def _chances(
    pair: Any, prefix: list[int], first: Tensor, depth: int, source: torch.Generator
) -> Float[Tensor, "drafts depth"]:
    """Return the products of acceptance chances along drafts that begin with these tokens."""
    caches = []
    for model in (pair.target, pair.draft):
        cache = model(torch.tensor([prefix]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(first))
        caches.append(cache)
    tokens, rows = [first], []
    for _ in range(depth):
        logits = pair.draft(tokens[-1][:, None], past_key_values=caches[1], use_cache=True).logits
        rows.append(logits[:, -1].double().softmax(-1))
        tokens.append(rows[-1].multinomial(1, generator=source)[:, 0])
    wide = torch.stack(tokens[:-1], 1)
    q = pair.target(wide, past_key_values=caches[0], use_cache=True).logits.double().softmax(-1)
    ids = torch.stack(tokens[1:], 1)[..., None]
    ratio = (q.gather(-1, ids) / torch.stack(rows, 1).gather(-1, ids))[..., 0].clamp(max=1.0)
    return torch.cat([torch.ones_like(ratio[:, :1]), ratio.cumprod(-1)], -1)


def deferred_nats(
    pair: Any,
    prompts: list[list[int]],
    trace: Trace,
    cases: Sequence[tuple[str, int]],
    *,
    cycles: int,
    seed: int,
) -> tuple[dict[tuple[str, int], dict[str, Estimate]], int]:
    """Return the divergence a token of each verifier at each K by ``SPENT``, and the cycles.

    Those are about ``cycles`` of a trace of sampled drafts.
    """
    sample = list(islice(trace, 0, None, max(1, len(trace) // cycles)))
    source, ends = torch.Generator().manual_seed(seed), torch.tensor(trace.header.eos_token_ids)
    depth = min(WINDOW, max(width for _, width in cases) - 1)

    @cache
    def text(number: int) -> list[int]:
        return written(pair, prompts[number % len(prompts)], trace, number)

    sums = {case: np.zeros((3, trace.texts)) for case in cases}
    with Progress("drafting on", len(sample)) as progress:
        for cycle in sample:
            assert cycle.draft_probs is not None
            start = len(prompts[cycle.text % len(prompts)]) + cycle.position
            line = [*text(cycle.text)[:start], *cycle.draft_token_ids.tolist()]
            rows = enumerate(cycle.draft_probs, start)
            halves = torch.stack(
                [drafted_on(pair, line[:at], row, depth, source) for at, row in rows], 1
            )
            going = int((torch.isin(cycle.draft_token_ids, ends).cumsum(-1) == 0).sum()) + 1
            for spec, width in cases:
                verifier = find_verifier(spec)
                sums[spec, width][:, cycle.text] += _of_call(cycle, halves, verifier, width, going)
            progress.advance(f"text {cycle.text}")
    estimates = {
        case: {name: ratio_of_sums(values, tokens, trace.fingerprint)
               for name, values in zip(SPENT, divergences, strict=True)}
        for case, (*divergences, tokens) in sums.items()
    }  # fmt: skip
    return estimates, len(sample)


def written(pair: Any, prompt: list[int], trace: Trace, text: int) -> list[int]:
    """Return the ids of a logged text: a trace keeps rows, and the same seed writes it again."""
    header = trace.header
    room = header.details["max_new_tokens"] + header.num_draft_tokens
    result = generate(
        pair.target, pair.draft, torch.tensor([prompt]), eos_token_ids=header.eos_token_ids,
        policy="speculative", seed=header.seed + text, meter=False, max_new_tokens=room,
        num_draft_tokens=header.num_draft_tokens,
    )  # fmt: skip
    return [*prompt, *result.output_token_ids[0].tolist()]


def _of_call(
    cycle: Cycle, halves: Float[Tensor, "halves K vocab depth"], verifier: Any, width: int,
    going: int,
) -> np.ndarray:  # fmt: skip
    """Return the expected divergences of ``SPENT`` and tokens of one call.

    Of each divergence twice what both halves say together, less the mean of what each says:
    divergences are convex, and one of an average over few drafts is too large by about 1/drafts.
    """
    assert cycle.draft_probs is not None
    q, p = cycle.target_probs[: width + 1], cycle.draft_probs[:width]
    ids = cycle.draft_token_ids[:width]
    sums = np.zeros((1 + len(halves), len(SPENT)))
    for number, ahead in enumerate([halves.mean(0), *halves]):
        laws = islice(node_laws((q[:-1], p, ids), ahead[:width], verifier), going)
        for (chance, law), row in zip(laws, q, strict=False):
            sums[number] += [chance * float(kind.value(law, row)) for kind in SPENT.values()]
    lossless = Assignment((ct.policy("speculative"),))
    law = verifier.law(lossless, q[None], Draft(ids[None], [len(ids)], p[None]))
    return np.array([*2 * sums[0] - sums[1:].mean(0), float(law.alive[0, :going].sum())])
