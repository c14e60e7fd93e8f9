"""Cut rows: the likeliest tokens one by one, all others in cells of alike probabilities.

An entry of a cut row is a token with its log q and log p, or, where its id is −c, c tokens with the
logarithms of what they have together. Those of a cell differ in size by half an octave (below 2^−20
by a whole one), and in q/p by half (beyond 16 by a whole one). No cell has both q > p and q < p, so
that the masses of the rest and its overlap Σ min(q, p) are exact. A reader gives every token of a
cell the same share. Sizes matter, not only masses: entropies and roots do not add up.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tensors import normalised
from cactus_theory.base.tolerances import STORED_SUM_TOLERANCE

# tokens of a row that stand alone at most, and the mass of q and of p below which no more do
ALONE, REST = 512, 0.002
OFFSETS, IDS = "entry_offsets", "entry_ids"
# entries of whole rows that one cut file, of a few texts, may stand for: 4 GB are spread at most
MOST_ENTRIES = 2**30


def cut_row(q: Tensor, p: Tensor, keep: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and masses of the entries of a row (V,); the tokens ``keep`` stand alone."""
    larger = torch.maximum(q, p)
    larger[list(keep)] = 2.0
    alone = larger.topk(min(max(ALONE, len(keep)), len(q))).indices
    left = torch.maximum(*(row.sum() - row[alone].cumsum(0) for row in (q, p)))
    alone = alone[: max(int((left > REST).sum()) + 1, len(keep))]
    larger[alone] = 0.0
    rest = larger.nonzero()[:, 0]
    _, cell, counts = _cells(q[rest], p[rest]).unique(return_inverse=True, return_counts=True)
    none = q.new_zeros(len(counts))
    ids = torch.cat([alone, -counts]).to(torch.int32)
    masses = [torch.cat([row[alone], none.index_add(0, cell, row[rest])]) for row in (q, p)]
    return ids, masses[0], masses[1]


def _cells(q: Tensor, p: Tensor) -> Tensor:
    size, ratio = -torch.maximum(q, p).log2(), (q / p).log2()
    size = torch.minimum(2 * size, size + 20).floor().clamp(max=99)
    far = torch.minimum(2 * ratio.abs(), ratio.abs() + 4).floor().clamp(max=49)
    far = torch.where(ratio.isinf(), 50, far)  # one of the two is 0
    return torch.where(ratio >= 0, far, -1 - far) * 100 + size


def paired(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the number of the target row that each draft row belongs to."""
    tokens = tensors["token_offsets"]
    place = torch.arange(int(tokens[-1]), device="cpu")
    before = torch.searchsorted(tokens[1:], place, right=True)  # cycles, with a row more each
    drawn = (tensors["draft_offsets"].diff() > 0).repeat_interleave(tokens.diff())
    return (place + before)[drawn]


def cut(whole: Mapping[str, Tensor], ends: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of a shard with cut rows: drafted tokens and ``ends`` stand alone."""
    target, pairs = whole["target_log_probs"], paired(whole)
    offsets, ids = whole["token_offsets"], whole["draft_token_ids"]
    last = set((offsets[1:] + torch.arange(len(offsets) - 1, device="cpu")).tolist())
    drafts, drafted = dict(zip(pairs.tolist(), whole["draft_log_probs"], strict=True)), iter(ids)
    parts, sizes = [], [0]
    for number, row in enumerate(target):
        own = () if number in last else (int(next(drafted)),)
        q = row.double().exp()
        p = drafts[number].double().exp() if number in drafts else torch.zeros_like(q)
        parts.append(cut_row(q / q.sum(), p / p.sum().clamp(min=1e-300), sorted({*ends, *own})))
        sizes.append(len(parts[-1][0]))
    ids, q, p = (torch.cat(own) for own in zip(*parts, strict=True))
    return dict(whole) | {
        "target_log_probs": q.log().to(target.dtype),
        "draft_log_probs": p.log().to(target.dtype),
        IDS: ids, OFFSETS: torch.tensor(sizes, device="cpu").cumsum(0),
    }  # fmt: skip


def spread(where: str, tensors: dict[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """Return whole rows, float32, in place of cut ones; ValueError for what cannot be cut rows.

    Tokens of a cell take the ids that no other entry of their row has, in ascending order.
    """
    if fault := _fault(tensors, vocab):
        raise ValueError(f"{where}: {fault}")
    tensors = dict(tensors)
    ids, offsets = tensors.pop(IDS).long(), tensors.pop(OFFSETS)
    pairs, shares = paired(tensors), (-ids).clamp(min=1)
    tolerance = STORED_SUM_TOLERANCE[tensors["target_log_probs"].dtype]
    for name, numbers in (("target_log_probs", range(len(offsets) - 1)),
                          ("draft_log_probs", pairs.tolist())):  # fmt: skip
        logs = tensors[name].float() - shares.log()
        rows = tensors[name] = torch.full((len(numbers), vocab), -torch.inf, device="cpu")
        for row, number in zip(rows, numbers, strict=True):
            own = slice(int(offsets[number]), int(offsets[number + 1]))
            alone, free = ids[own] >= 0, torch.ones(vocab, dtype=torch.bool, device="cpu")
            free[ids[own][alone]] = False
            fill = logs[own][~alone].repeat_interleave(shares[own][~alone])
            row[ids[own][alone]] = logs[own][alone]
            row[free.nonzero()[: len(fill), 0]] = fill
            if abs(float(total := row.exp().sum()) - 1) <= tolerance:  # others are refused later
                row -= total.log()
    return tensors


def _fault(tensors: Mapping[str, Tensor], vocab: int) -> str:
    """Return the fault of entries of cut rows, nothing if they can be spread."""
    lists = "token_offsets", "draft_offsets", OFFSETS, "draft_token_ids", IDS
    if missing := [name for name in (*lists, "target_log_probs") if name not in tensors]:
        return f"cut rows need {', '.join(missing)}"
    tokens, drafts, entries, drafted, ids = (tensors[name] for name in lists)
    lasts = len(drafted), None, len(ids)
    for name, own, last in zip(lists, (tokens, drafts, entries), lasts, strict=False):
        rises = own.dtype == torch.int64 and own.ndim == 1 and len(own) > 0 and own[0] == 0
        if not rises or (own.diff() < 0).any() or last not in (None, int(own[-1])):
            return f"{name} must rise from 0 to {last}; got {own.flatten()[:8].tolist()}"
    if len(drafts) != len(tokens) or ((drafts.diff() > 0) & (drafts.diff() != tokens.diff())).any():
        return "a cycle must have a draft row for every token, or none"
    rows = int(tokens[-1]) + len(tokens) - 1
    if len(entries) != rows + 1 or rows * vocab > MOST_ENTRIES:
        return f"{OFFSETS} must be of {rows} rows, at most 2^30 entries; got {len(entries) - 1}"
    if ids.dtype != torch.int32 or ids.ndim != 1 or (ids >= vocab).any() or (ids < -vocab).any():
        return f"{IDS} must be int32 ids below {vocab}, or −c for c tokens; got {ids.dtype}"
    for name in ("target_log_probs", "draft_log_probs"):
        own = tensors.get(name)
        if own is None or own.dtype not in STORED_SUM_TOLERANCE or own.shape != ids.shape:
            return f"{name} must be float16 or float32, one an entry"
    of_row = torch.arange(rows, device="cpu").repeat_interleave(entries.diff())
    alone = ids >= 0
    held = of_row[alone] * vocab + ids[alone]
    counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
    counts.index_add_(0, of_row, torch.where(alone, 1, -ids.long()))
    if len(held.unique()) != len(held) or (counts > vocab).any():
        return f"{IDS} must be of {vocab} tokens at most, each in one entry of a row"
    place = torch.arange(len(drafted), device="cpu")
    drawn = place + torch.searchsorted(tokens[1:], place, right=True)
    if not torch.isin(drawn * vocab + drafted, held).all():
        return "a drafted token must have an entry of its own in its row"
    return ""


def merged(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (N, V) with tokens of equal q and equal p, as those of a cell, as one entry.

    Divergences and overlaps of (N, W) stay those of (N, V): terms of a token are linear in its mass
    at given p/q. What counts single tokens does not stay.
    """
    parts = []
    for q, p in zip(target.numpy(), draft.numpy(), strict=True):
        pairs, counts = np.unique(q + 1j * p, return_counts=True)
        parts.append(torch.from_numpy(pairs * counts))
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return normalised(rows.real.contiguous()), normalised(rows.imag.contiguous())
