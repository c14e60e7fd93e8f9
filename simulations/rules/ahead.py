r"""What FLy emits at a row, given how likely the draft goes on well after each token.

Let v_c(x) be the chance that, after token x at this row, the next c drafted tokens are kept
natively: an average over rows of tokens that were not drafted. With N_c the probability, relative
to that of the drafted text, that the round is here with c more tokens that must be kept so
(N_0: free), and o(x) whether a refusal of x may be overridden, the next token has the law

.. math:: h(x) ∝ N_0 [\min(p,q) + (p−q)_+ o v_W + r\, g](x) + Σ_{c>0} N_c \min(p,q) v_{c−1}(x),

r what is refused and g ∝ (q−p)_+. On Markov models v is exact and so is h. A certain draft has one
token at a row, and v is that of the rows below it: exact, too. For sampled drafts of real models v
is estimated, by drafting on from the likeliest tokens with both models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.policies._base import normalised_or, one_hot
from cactus_theory.traces import Cycle, Estimate, Trace
from cactus_theory.traces.estimate import ratio_of_sums
from cactus_theory.verify import Assignment, Draft, Fly, find_verifier
from cactus_theory.verify.fly import WINDOW

from ..common.progress import Progress

KL = ct.divergence("kl")
# tokens drafted on from at a row: the likeliest ones of the draft, and some for all the others
LIKELIEST, OTHERS = 10, 4
# drafts after each of the likeliest; two halves of them tell the bias of their KL
DRAFTS = 4
Ahead = Float[Tensor, "K vocab depth"]


@dataclass(frozen=True)
class Path:
    """A drafted path with the rows along it, float64.

    Attributes
    ----------
    q, p : (K, V) rows before each drafted token. ``ids`` : (K,).
    ahead : (K, V, W + 1), v_0 = 1 to v_W.
    """

    q: Float[Tensor, "K vocab"]
    p: Float[Tensor, "K vocab"]
    ids: Int[Tensor, "K"]
    ahead: Ahead


def node_laws(path: Path, verifier: Fly) -> Iterator[tuple[float, Float[Tensor, "vocab"]]]:
    """Yield for each row the chance that a round gets there, and the law of the next token.

    The chance is relative to that of drafting the text.
    """
    width = len(path.ids)
    window = min(WINDOW, width - 1) if verifier.window is None else verifier.window
    pending = {0: 1.0}
    for place, token in enumerate(path.ids.tolist()):
        q, p, ahead = path.q[place], path.p[place], path.ahead[place]
        both, over = torch.minimum(p, q), (p - q).clamp(min=0.0)
        able = _unsure(q, verifier) and place + window < width
        deferred = over * (q > 0) * ahead[:, window] if able else torch.zeros_like(q)
        recovered = (over.sum() - deferred.sum()) * normalised_or((q - p).clamp(min=0.0), q)
        free = pending.get(0, 0.0)
        mass = free * (both + deferred + recovered)
        for left, own in pending.items():
            if left:
                mass = mass + own * both * ahead[:, left - 1]
        total = float(mass.sum())
        if total <= 0:
            return
        yield total, mass / total
        kept = float(both[token] / p[token])
        after = {max(left - 1, 0): 0.0 for left in pending} | {window: 0.0}
        for left, own in pending.items():
            after[max(left - 1, 0)] += own * kept
        if able and q[token] > 0:
            after[window] += free * (1 - kept)
        pending = after


def _unsure(q: Float[Tensor, "vocab"], verifier: Fly) -> bool:
    largest = q.topk(min(verifier.k, len(q))).values
    return float(-torch.xlogy(largest, largest).sum()) >= verifier.entropy


def charge(path: Path, verifier: Fly, going: int) -> tuple[float, float]:
    """Return expected KL and total variation over the first ``going`` rows."""
    spent = far = 0.0
    for place, (chance, law) in enumerate(node_laws(path, verifier)):
        if place >= going:
            break
        spent += chance * float(KL.value(law, path.q[place]))
        far += chance * float((law - path.q[place]).abs().sum() / 2)
    return spent, far


@torch.no_grad()
def drafted_on(
    pair: Any, prefix: list[int], row: Float[Tensor, "vocab"], depth: int, source: torch.Generator
) -> tuple[Float[Tensor, "vocab depth"], Float[Tensor, "vocab depth"]]:
    """Return two independent estimates of v_0 … v_depth after every token, from both models.

    ``row`` is the draft's after the prefix. Tokens beyond the likeliest share one estimate.
    """
    best = row.topk(min(LIKELIEST, int((row > 0).sum()))).indices
    rest = row.scatter(0, best, 0.0)
    drawn = rest.multinomial(OTHERS, True, generator=source) if float(rest.sum()) > 0 else best[:0]
    first = torch.cat([best.repeat_interleave(DRAFTS), drawn])
    kept = _kept(pair, prefix, first, depth, source)
    halves = []
    for half in range(2):
        own = kept[: len(best) * DRAFTS].view(len(best), DRAFTS, -1)[:, half::2].mean(1)
        others = kept[len(best) * DRAFTS :][half::2]
        shared = others.mean(0) if len(others) else torch.ones(depth + 1).double()
        found = shared.expand(len(row), -1).clone()
        found[best] = own
        halves.append(found)
    return halves[0], halves[1]


def _kept(
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
    chosen = torch.stack(tokens[1:], 1)[..., None]
    ratio = (q.gather(-1, chosen) / torch.stack(rows, 1).gather(-1, chosen))[..., 0].clamp(max=1.0)
    return torch.cat([torch.ones_like(ratio[:, :1]), ratio.cumprod(-1)], -1)


@dataclass(frozen=True)
class Spent:
    """Nats and total variation per emitted token, on so many cycles."""

    kl: Estimate
    tv: Estimate
    cycles: int


# a verifier's spec and K
Case = tuple[str, int]
Looked = dict[Case, Spent]


def looked_ahead(
    pair: Any,
    prompts: list[list[int]],
    trace: Trace,
    cases: Sequence[Case],
    *,
    cycles: int,
    seed: int,
) -> Looked:
    """Return what FLy spends: on all cycles of certain drafts, on about so many of sampled ones."""
    certain = not trace.manifest.total("draft_rows")
    stride = 1 if certain else max(1, len(trace) // cycles)
    chosen = [cycle for number, cycle in enumerate(trace) if number % stride == 0]
    source, texts = torch.Generator().manual_seed(seed), dict[int, list[int]]()
    sums = {case: np.zeros((3, trace.texts)) for case in cases}
    with Progress("drafting on", len(chosen)) as progress:
        for cycle in chosen:
            if certain:
                halves = [_known_ahead(cycle)]
            else:
                prompt = prompts[cycle.text % len(prompts)]
                if cycle.text not in texts:
                    texts[cycle.text] = _written(pair, prompt, trace, cycle.text)
                before = texts[cycle.text][: len(prompt) + cycle.position]
                halves = _ahead_of(pair, cycle, before, max(width for _, width in cases), source)
            ended = torch.isin(cycle.draft_token_ids, torch.tensor(trace.header.eos_token_ids))
            going = int((ended.cumsum(-1) == 0).sum()) + 1
            for spec, width in cases:
                own = _of_call(cycle, halves, find_verifier(spec), width, going)
                sums[spec, width][:, cycle.text] += own
            progress.advance(f"text {cycle.text}")
    name = trace.fingerprint
    return {
        case: Spent(ratio_of_sums(kl, tokens, name), ratio_of_sums(tv, tokens, name), len(chosen))
        for case, (kl, tv, tokens) in sums.items()
    }


def _known_ahead(cycle: Cycle) -> Ahead:
    """Return how likely a certain draft goes on well after its token at each row; exact."""
    ids, q = cycle.draft_token_ids, cycle.target_probs
    kept = q[:-1].gather(-1, ids[:, None])[:, 0]
    width = len(ids)
    found = torch.zeros(width, q.shape[-1], WINDOW + 1, dtype=torch.float64)
    for place, token in enumerate(ids.tolist()):
        run = torch.cat([torch.ones(1).double(), kept[place + 1 :].cumprod(-1)])[: WINDOW + 1]
        found[place, token, : len(run)] = run
    return found


def _written(pair: Any, prompt: list[int], trace: Trace, text: int) -> list[int]:
    """Return the ids of a logged text: a trace keeps rows, and the same seed writes it again."""
    header = trace.header
    room = header.details["max_new_tokens"] + header.num_draft_tokens
    options = {"num_draft_tokens": header.num_draft_tokens, "max_new_tokens": room}
    found = generate(
        pair.target, pair.draft, torch.tensor([prompt]), eos_token_ids=header.eos_token_ids,
        policy="speculative", seed=header.seed + text, meter=False, **options,
    )  # fmt: skip
    return [*prompt, *found.output_token_ids[0].tolist()]


def _ahead_of(
    pair: Any, cycle: Cycle, before: list[int], width: int, source: torch.Generator
) -> list[Ahead]:
    """Return two estimates of how likely the draft goes on well after each token of each row."""
    assert cycle.draft_probs is not None
    ids, depth = cycle.draft_token_ids.tolist(), min(WINDOW, width - 1)
    each = [
        drafted_on(pair, [*before, *ids[:place]], cycle.draft_probs[place], depth, source)
        for place in range(min(width, len(ids)))
    ]
    return [torch.stack(half) for half in zip(*each, strict=True)]


def _of_call(
    cycle: Cycle, halves: list[Ahead], verifier: Any, width: int, going: int
) -> np.ndarray:
    """Return expected KL, total variation and tokens of one call.

    Of each divergence twice what both halves say together, less the mean of what each says:
    divergences are convex, and one of an average over few drafts is too large by about 1/drafts.
    """
    q, ids = cycle.target_probs[: width + 1], cycle.draft_token_ids[:width]
    rows = one_hot(cycle.draft_token_ids, q) if cycle.draft_probs is None else cycle.draft_probs
    p, both = rows[:width], torch.stack(halves)[:, :width]
    told = [charge(Path(q[:-1], p, ids, own), verifier, going) for own in (both.mean(0), *both)]
    spent = 2 * np.array(told[0]) - np.array(told[1:]).mean(0)
    lossless = Assignment((ct.policy("speculative"),))
    law = verifier.law(lossless, q[None], Draft(ids[None], [len(ids)], p[None]))
    return np.array([*spent, float(law.alive[0, :going].sum())])
