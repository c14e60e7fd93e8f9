"""The same step in torch, for policies without a kernel and for machines without Triton."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.kernels import _streams
from cactus_theory.kernels._layout import Layout
from cactus_theory.policies import Policy
from cactus_theory.verify import Assignment, Draft, find_verifier


def verify_in_torch(
    rule: Policy,
    verifier: str,
    layout: Layout,
    target: Float[Tensor, "..."],
    draft: Float[Tensor, "..."] | None,
    ids: Int[Tensor, "..."],
    temperature: float | Tensor,
    seeds: Int[Tensor, "batch"],
    positions: Int[Tensor, "batch"],
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch"]]:
    """Return the emitted ids and the accepted counts; rows are softmax in float64.

    A draft ends before the first token outside the vocabulary or row that is no distribution;
    −1 follows where that row is the target's.

    Raises
    ------
    ValueError
        An unknown verifier, one that takes other rows, or a policy that it cannot follow.
    """
    judge = find_verifier(verifier)
    judge.check(rule)
    if judge.needs_next_draft_row:
        raise ValueError(f"verifier: must not read the draft's next row; got {verifier!r}")
    ids, lengths, target, draft = _padded(layout, target, draft, ids)
    width, vocab = layout.width, layout.vocab
    heat = torch.as_tensor(temperature, dtype=torch.float64, device=target.device)
    heat = heat.expand(layout.batch)[:, None, None]
    lawful = target.amax(-1).isfinite()
    sound = lawful[:, :-1] & (ids >= 0) & (ids < vocab)
    if draft is not None:
        drawable = draft.amax(-1).isfinite()
        sound = sound & (drawable | (heat[..., 0] == 0))
        draft = torch.where(drawable[..., None], draft, 0.0)
    lengths = torch.minimum(lengths, sound.long().cumprod(-1).sum(-1))
    target = torch.where(lawful[..., None], target, 0.0)
    known = torch.arange(width, device=ids.device) < lengths[:, None]
    tokens = torch.where(known, ids, 0)
    q, p = _probabilities(target, heat), None
    if draft is not None:
        likely = torch.nn.functional.one_hot(tokens, vocab).double()
        p = torch.where(heat > 0, _probabilities(draft, heat), likely)
    places = torch.arange(width + 1, device=ids.device).expand(layout.batch, -1)
    accept = _streams.coins(seeds, positions, places[:, :width], _streams.ACCEPT)
    draw = _streams.coins(seeds, positions, places[:, :1], _streams.DRAW)[:, 0]
    verdict = judge.verify(Assignment((rule,)), q, Draft(tokens, lengths, p), accept, draw)
    counts, own = verdict.num_accepted, verdict.output_token_ids
    place = places == counts[:, None]
    return torch.where(place & ~lawful, -1, own), counts


def draw_in_torch(
    logits: Float[Tensor, "batch vocab"],
    temperature: float | Tensor,
    seeds: Int[Tensor, "batch"],
    positions: Int[Tensor, "batch"],
    place: int,
) -> Int[Tensor, "batch"]:
    """Return one token a row, by the kernel's noise; −1 where a row is no distribution."""
    rows = logits.double()
    heat = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    heat = heat.expand(len(rows))[:, None]
    at = torch.full_like(positions, place)
    noise = _streams.noise(seeds, positions, at, _streams.DRAFT, rows.shape[-1])
    keys = torch.where(heat > 0, rows / torch.where(heat > 0, heat, 1.0) - noise.log(), rows)
    best, token = keys.max(-1)
    return torch.where(best.isfinite(), token, -1)


def _probabilities(logits: Tensor, heat: Tensor) -> Tensor:
    """Return softmax(l/T), one-hot at the first largest logit where T = 0."""
    rows = logits.double()
    likely = torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1]).double()
    return torch.where(heat > 0, (rows / torch.where(heat > 0, heat, 1.0)).softmax(-1), likely)


def _padded(
    layout: Layout, target: Tensor, draft: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ids, lengths, target and draft in the padded layout."""
    place = torch.arange(layout.width + 1, device=ids.device)
    if not layout.flat:
        ended = torch.where(ids < 0, place[:-1], layout.width)
        lengths = ended.amin(-1) if layout.width else ids.new_zeros(layout.batch)
        if layout.lengths is not None:
            lengths = torch.minimum(lengths, layout.lengths)
        return ids, lengths, target, draft
    assert layout.lengths is not None
    ends = layout.lengths.long()
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    lengths = (ends - starts).clamp(max=layout.width)
    inner = (starts[:, None] + place).clamp(max=max(len(ids) - 1, 0))[:, :-1]
    bonus = torch.arange(layout.batch, device=ids.device)
    outer = (starts + bonus)[:, None] + torch.minimum(place, lengths[:, None])
    if not len(ids):
        return ids.new_zeros(inner.shape), lengths, target[outer], None
    return ids[inner], lengths, target[outer], None if draft is None else draft[inner]
