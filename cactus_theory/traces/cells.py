"""Cut rows: store the likeliest tokens one by one, and all others in cells of similar tokens.

An entry of a cut row is a token with its log q and log p, or a cell: an id −c stands for c tokens,
with the logarithms of their total q and total p. In a cell, max(q, p) varies by at most half an
octave (a factor √2; by an octave below 2^−20), and q/p by half an octave (by an octave beyond a
factor of 16). No cell has tokens with q > p and tokens with q < p, so that masses and the overlap
Σ min(q, p) are exact. A reader gives all tokens of a cell equal probability. Cells are narrow
because entropies and roots depend on the probabilities of single tokens, not only on masses.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tensors import normalised
from cactus_theory.base.tolerances import STORED_SUM_TOLERANCE

# at most ALONE tokens of a row get an entry each, fewer if those leave at most REST of q and of p
ALONE, REST = 512, 0.002
OFFSETS, IDS = "entry_offsets", "entry_ids"
# most entries of the whole rows that one cut file stands for, so that reading takes at most 4 GB
MOST_ENTRIES = 2**30


def cut_row(q: Tensor, p: Tensor, keep: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Cut rows (V,); return ids, q and p of the entries. Tokens in ``keep`` get an entry each."""
    larger = torch.maximum(q, p)
    larger[list(keep)] = 2.0  # above all probabilities, so that these tokens come first
    alone = larger.topk(min(max(ALONE, len(keep)), len(q))).indices
    # left[i]: mass, of q or of p, without the first i + 1 of these tokens; it falls with i
    left = torch.maximum(*(row.sum() - row[alone].cumsum(0) for row in (q, p)))
    alone = alone[: max(int((left > REST).sum()) + 1, len(keep))]
    larger[alone] = 0.0
    rest = larger.nonzero()[:, 0]  # tokens with q = p = 0 have no entry
    _, cell, counts = _cells(q[rest], p[rest]).unique(return_inverse=True, return_counts=True)

    def entries(row: Tensor) -> Tensor:
        sums = row.new_zeros(len(counts)).index_add(0, cell, row[rest])
        return torch.cat([row[alone], sums])

    return torch.cat([alone, -counts]).to(torch.int32), entries(q), entries(p)


def _cells(q: Tensor, p: Tensor) -> Tensor:
    """Return for each token the number of its cell, from its size max(q, p) and its ratio q/p."""
    octaves, ratio = -torch.maximum(q, p).log2(), (q / p).log2()
    # steps of half an octave up to 20 octaves (for the ratio up to 4), then of a whole one
    size = torch.minimum(2 * octaves, octaves + 20).floor().clamp(max=99)
    far = torch.minimum(2 * ratio.abs(), ratio.abs() + 4).floor().clamp(max=49)
    far = torch.where(ratio.isinf(), 50, far)  # one of the two is 0
    return torch.where(ratio >= 0, far, -1 - far) * 100 + size  # size is at most 99


def paired(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the number of the target row that each draft row belongs to."""
    offsets = tensors["token_offsets"]
    token = torch.arange(int(offsets[-1]), device="cpu")
    # each cycle has one target row more than tokens, so token i of cycle c has target row i + c
    cycle = torch.searchsorted(offsets[1:], token, right=True)
    has_draft_row = (tensors["draft_offsets"].diff() > 0).repeat_interleave(offsets.diff())
    return (token + cycle)[has_draft_row]


def cut(whole: Mapping[str, Tensor], ends: Sequence[int]) -> dict[str, Tensor]:
    """Return a shard's tensors with cut rows; drafted tokens and ``ends`` keep an entry each."""
    target, pairs = whole["target_log_probs"], paired(whole)
    offsets, ids = whole["token_offsets"], whole["draft_token_ids"]
    # the last row of each cycle is that of the bonus token, so it has no drafted token to keep
    last = set((offsets[1:] + torch.arange(len(offsets) - 1, device="cpu")).tolist())
    draft_rows = dict(zip(pairs.tolist(), whole["draft_log_probs"], strict=True))
    parts, sizes, drafted = [], [0], iter(ids)
    for number, row in enumerate(target):
        keep = {*ends} if number in last else {*ends, int(next(drafted))}
        q = row.double().exp()
        p = draft_rows[number].double().exp() if number in draft_rows else torch.zeros_like(q)
        parts.append(cut_row(q / q.sum(), p / p.sum().clamp(min=1e-300), sorted(keep)))
        sizes.append(len(parts[-1][0]))
    ids, q, p = (torch.cat(column) for column in zip(*parts, strict=True))
    return dict(whole) | {
        "target_log_probs": q.log().to(target.dtype),
        "draft_log_probs": p.log().to(target.dtype),
        IDS: ids,
        OFFSETS: torch.tensor(sizes, device="cpu").cumsum(0),
    }


def spread(where: str, tensors: dict[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """Return a shard's tensors with whole float32 rows in place of cut rows.

    The tokens of cells take the ids that no entry of the row names, in ascending order. Raises
    ValueError for tensors that are not valid cut rows.
    """
    if fault := _fault(tensors, vocab):
        raise ValueError(f"{where}: {fault}")
    tensors = dict(tensors)
    ids, offsets = tensors.pop(IDS).long(), tensors.pop(OFFSETS)
    pairs, sizes = paired(tensors), (-ids).clamp(min=1)  # how many tokens each entry stands for
    tolerance = STORED_SUM_TOLERANCE[tensors["target_log_probs"].dtype]
    rows_of = {"target_log_probs": range(len(offsets) - 1), "draft_log_probs": pairs.tolist()}
    for name, numbers in rows_of.items():
        all_logs = tensors[name].float() - sizes.log()  # ln of the probability of one token
        rows = tensors[name] = torch.full((len(numbers), vocab), -torch.inf, device="cpu")
        for row, number in zip(rows, numbers, strict=True):
            entries = slice(int(offsets[number]), int(offsets[number + 1]))
            tokens, logs = ids[entries], all_logs[entries]
            alone, free = tokens >= 0, torch.ones(vocab, dtype=torch.bool, device="cpu")
            free[tokens[alone]] = False
            in_cells = logs[~alone].repeat_interleave(sizes[entries][~alone])
            row[tokens[alone]] = logs[alone]
            row[free.nonzero()[: len(in_cells), 0]] = in_cells
            # rows whose sum is further from 1 are rejected with an error later
            if abs(float(total := row.exp().sum()) - 1) <= tolerance:
                row -= total.log()
    return tensors


def _fault(tensors: Mapping[str, Tensor], vocab: int) -> str:
    """Return the first fault of cut rows in words, empty if whole rows can be made from them."""
    lists = "token_offsets", "draft_offsets", OFFSETS, "draft_token_ids", IDS
    if missing := [name for name in (*lists, "target_log_probs") if name not in tensors]:
        return f"cut rows need {', '.join(missing)}"
    tokens, drafts, entries, drafted, ids = (tensors[name] for name in lists)
    lasts = len(drafted), None, len(ids)  # last entries of the offsets, the first three ``lists``
    for name, offsets, last in zip(lists, (tokens, drafts, entries), lasts, strict=False):
        starts = offsets.dtype == torch.int64 and offsets.ndim == 1 and len(offsets) > 0
        starts = starts and offsets[0] == 0
        if not starts or (offsets.diff() < 0).any() or last not in (None, int(offsets[-1])):
            return f"{name} must rise from 0 to {last}; got {offsets.flatten()[:8].tolist()}"
    if len(drafts) != len(tokens) or ((drafts.diff() > 0) & (drafts.diff() != tokens.diff())).any():
        return "a cycle must have a draft row for every token, or none"
    rows = int(tokens[-1]) + len(tokens) - 1
    if len(entries) != rows + 1 or rows * vocab > MOST_ENTRIES:
        return f"{OFFSETS} must be of {rows} rows, at most 2^30 entries; got {len(entries) - 1}"
    if ids.dtype != torch.int32 or ids.ndim != 1 or (ids >= vocab).any() or (ids < -vocab).any():
        return f"{IDS} must be int32 ids below {vocab}, or −c for c tokens; got {ids.dtype}"
    for name in ("target_log_probs", "draft_log_probs"):
        logs = tensors.get(name)
        if logs is None or logs.dtype not in STORED_SUM_TOLERANCE or logs.shape != ids.shape:
            return f"{name} must be float16 or float32, one an entry"
    of_row = torch.arange(rows, device="cpu").repeat_interleave(entries.diff())
    alone = ids >= 0
    held = of_row[alone] * vocab + ids[alone]  # one number for row and token
    counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
    counts.index_add_(0, of_row, torch.where(alone, 1, -ids.long()))
    if len(held.unique()) != len(held) or (counts > vocab).any():
        return f"{IDS} must be of {vocab} tokens at most, each in one entry of a row"
    place = torch.arange(len(drafted), device="cpu")
    row = place + torch.searchsorted(tokens[1:], place, right=True)  # as in ``paired``
    if not torch.isin(row * vocab + drafted, held).all():
        return "a drafted token must have an entry of its own in its row"
    return ""


def merged(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (N, W) in which tokens with equal q and equal p, as in a cell, are one entry.

    Divergences and overlaps of the merged rows (N, W) and of the given rows (N, V) are equal,
    because at a given p/q a token's term is linear in its mass. Quantities that depend on single
    tokens, such as the entropy, are not preserved.
    """
    parts = []
    for q, p in zip(target.numpy(), draft.numpy(), strict=True):
        pairs, counts = np.unique(q + 1j * p, return_counts=True)  # complex numbers are pairs
        parts.append(torch.from_numpy(pairs * counts))
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return normalised(rows.real.contiguous()), normalised(rows.imag.contiguous())
