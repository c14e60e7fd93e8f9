"""Store the cycles (rounds) of one text as the bytes of a safetensors file, a shard.

A shard holds C cycles, their N drafted tokens, N + C target rows and M ≤ N draft rows. The rows of
all cycles are stored end to end, with offsets. Rows are natural logarithms, −inf where a token has
no probability: float16 probabilities would lose most of a large vocabulary. Columns of tokens that
no draft row gives probability are left out of the file. Cut rows: see ``cells``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.tolerances import STORED_SUM_TOLERANCE
from cactus_theory.traces import cells
from cactus_theory.verify.draft import Draft

DTYPES = {"float16": torch.float16, "float32": torch.float32}
LISTS = {
    "position": torch.int32,
    "token_offsets": torch.int64,
    "draft_offsets": torch.int64,
    "draft_token_ids": torch.int32,
}
ROWS = "target_log_probs", "draft_log_probs"
NAMES = (*LISTS, *ROWS)
COLUMNS = "draft_columns"


@dataclass(frozen=True)
class Cycle:
    """A round of a decode with all its rows, also those after the first rejected token.

    Attributes
    ----------
    text : number of the text.
    position : number of new tokens that the text had before this round.
    draft_token_ids : (K,) int64, the drafted tokens; K may be 0.
    target_probs : (K + 1, V) float64; row 0 follows the text, row i + 1 follows drafted token i.
    draft_probs : (K, V) float64, the rows from which the drafted tokens were drawn; None if the
        drafter was deterministic.

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> Cycle(0, 0, torch.tensor([1]), rows, rows[:1]).draft_token_ids
    tensor([1])
    """

    text: int
    position: int
    draft_token_ids: Int[Tensor, "K"]
    target_probs: Float[Tensor, "K1 vocab"]
    draft_probs: Float[Tensor, "K vocab"] | None

    @classmethod
    def of(cls, text: int, position: int, target_probs: Tensor, draft: Draft) -> "Cycle":
        """Return the round of the first text of a batch as a cycle; drafts are chains."""
        count, probs = draft.lengths[0], draft.probs
        q = target_probs[0, : count + 1].to("cpu", torch.float64)
        p = None if probs is None or not count else probs[0, :count].to("cpu", torch.float64)
        return cls(text, position, draft.token_ids[0, :count].cpu(), q, p)


@dataclass(frozen=True)
class Shard:
    """The cycles of one text; ids and positions are int32, offsets int64, rows float16 or float32.

    Cycle c drafted the tokens ``token_offsets[c]`` to ``token_offsets[c + 1]`` (exclusive). A cycle
    has one target row more than tokens, so its target rows start at ``token_offsets[c] + c``.
    """

    position: Int[Tensor, "cycles"]  # number of new tokens of the text before each cycle
    token_offsets: Int[Tensor, "cycles1"]
    draft_offsets: Int[Tensor, "cycles1"]  # a cycle with a deterministic draft has no draft rows
    draft_token_ids: Int[Tensor, "tokens"]
    target_log_probs: Float[Tensor, "target_rows vocab"]  # N + C rows
    draft_log_probs: Float[Tensor, "draft_rows vocab"]

    def __len__(self) -> int:
        """Return the number of cycles."""
        return len(self.position)

    @property
    def counts(self) -> list[int]:
        """Return the number of tokens that each cycle drafted."""
        return self.token_offsets.diff().tolist()

    @property
    def deterministic(self) -> list[bool]:
        """Return for each cycle whether it has no draft rows."""
        return (self.draft_offsets.diff() == 0).tolist()

    @property
    def nbytes(self) -> int:
        """Return how many bytes the rows take in memory."""
        return self.target_log_probs.nbytes + self.draft_log_probs.nbytes


def pack(cycles: Sequence[Cycle], dtype: torch.dtype, vocab: int) -> Shard:
    """Return the cycles of one text as a shard, with rows in ``dtype``.

    Raises ValueError for rows that are not (K + 1, V) and (K, V); TypeError or ValueError for
    draft token ids that are not integers in [0, vocab), and for positions beyond int32.
    """
    counts = [len(cycle.draft_token_ids) for cycle in cycles]
    for cycle, count in zip(cycles, counts, strict=True):
        if not 0 <= cycle.position < 2**31:
            raise ValueError(f"position: must lie in [0, 2^31); got {cycle.position}")
        ids = cycle.draft_token_ids
        tensors.check_tensor("draft_token_ids", ids, "token ids", torch.int64, torch.int32)
        outside = (ids < 0) | (ids >= vocab)
        if bool(outside.any()):
            token = int(ids[outside][0])
            raise ValueError(f"draft_token_ids: must lie in [0, {vocab}); got {token}")
        _check_shape("target_probs", cycle.target_probs, count + 1, vocab)
        if cycle.draft_probs is not None:
            _check_shape("draft_probs", cycle.draft_probs, count, vocab)
    row_counts = [0 if cycle.draft_probs is None else len(cycle.draft_probs) for cycle in cycles]
    no_rows = torch.zeros(0, vocab, dtype=torch.float64, device="cpu")
    target = torch.cat(
        [_doubled("target_probs", cycle.target_probs) for cycle in cycles] or [no_rows]
    )
    draft = torch.cat(
        [_doubled("draft_probs", c.draft_probs) for c in cycles if c.draft_probs is not None]
        + [no_rows]
    )
    ids = [cycle.draft_token_ids.to(torch.int32) for cycle in cycles]
    return Shard(
        position=torch.tensor(
            [cycle.position for cycle in cycles], dtype=torch.int32, device="cpu"
        ),
        token_offsets=torch.tensor([0, *counts], device="cpu").cumsum(0),
        draft_offsets=torch.tensor([0, *row_counts], device="cpu").cumsum(0),
        draft_token_ids=torch.cat([*ids, torch.zeros(0, dtype=torch.int32, device="cpu")]),
        target_log_probs=target.log().to(dtype),
        draft_log_probs=draft.log().to(dtype),
    )


def _doubled(name: str, rows: Tensor) -> Tensor:
    """Return rows in float64; rows of half precision are divided by their sums, which are not 1."""
    if rows.dtype not in (torch.float16, torch.bfloat16):
        return rows.double()
    tensors.check_probabilities(name, rows)
    return tensors.normalised(rows)


def to_bytes(shard: Shard, cut_at_ends: Sequence[int] | None = None) -> bytes:
    """Return the content of a shard's file; equal shards give equal bytes.

    If ``cut_at_ends`` is given, rows are cut (see ``cells``); the tokens in it keep an entry each.
    """
    library = check.optional_module("safetensors.torch", "llm")
    tensors = {name: getattr(shard, name) for name in NAMES}
    if cut_at_ends is not None and len(shard):
        return library.save(cells.cut(tensors, cut_at_ends))
    rows = shard.draft_log_probs
    columns = (rows > -torch.inf).any(0).nonzero()[:, 0]
    if len(rows) and len(columns) < rows.shape[1]:
        tensors |= {COLUMNS: columns.to(torch.int32), "draft_log_probs": rows[:, columns]}
    return library.save({name: values.contiguous() for name, values in tensors.items()})


def from_bytes(where: str, content: bytes, vocab: int, most: int) -> Shard:
    """Return the checked shard that a file's content holds; ValueError for any other content.

    ``where`` begins messages; ``most`` is the largest number of drafted tokens of a cycle.
    """
    library = check.optional_module("safetensors.torch", "llm")
    try:
        tensors = library.load(content)
    except Exception as error:  # safetensors raises its own class and several built-in ones
        raise ValueError(f"{where}: must be a safetensors file; {error}") from None
    if cells.IDS in tensors:
        tensors = cells.spread(where, tensors, vocab)
    columns = tensors.pop(COLUMNS, None)
    # rows too many to be widened stay narrow, and ``_faults`` names their width
    if columns is not None and _bounded(tensors, vocab):
        tensors["draft_log_probs"] = _spread(where, tensors.get("draft_log_probs"), columns, vocab)
    if fault := next(_faults(tensors, vocab, most), None):
        raise ValueError(f"{where}: {fault}")
    return Shard(**tensors)


def _bounded(tensors: Mapping[str, Tensor], vocab: int) -> bool:
    """Return whether draft rows of all V tokens would take no more memory than the target rows."""
    target, rows = (tensors.get(name) for name in ROWS)
    if target is None or rows is None or target.ndim != 2 or target.shape[1] != vocab:
        return False
    return rows.ndim > 0 and len(rows) <= len(target) and rows.dtype in STORED_SUM_TOLERANCE


def _spread(where: str, rows: Tensor | None, columns: Tensor, vocab: int) -> Tensor:
    """Return draft rows with −∞ in the columns that the file left out; ValueError for wrong ids."""
    fits = columns.dtype == torch.int32 and columns.ndim == 1 and len(columns) > 0
    fits = fits and columns[0] >= 0 and columns[-1] < vocab and bool((columns.diff() > 0).all())
    if not fits or rows is None or rows.ndim != 2 or rows.shape[1] != len(columns):
        raise ValueError(
            f"{where}: {COLUMNS} must be ascending ids below {vocab}, int32, one a column of "
            f"draft_log_probs; got {columns.dtype}, shape {tuple(columns.shape)}"
        )
    whole = rows.new_full((len(rows), vocab), -torch.inf)
    whole[:, columns.long()] = rows
    return whole


def checked(where: str, shard: Shard, vocab: int, most: int) -> Shard:
    """Return the shard if it is valid; ``where`` names the file in messages.

    Raises ValueError for shapes that do not fit together, more than ``most`` drafted tokens a
    cycle, ids outside the vocabulary, rows that are not log-probabilities.
    """
    if fault := next(_faults(vars(shard), vocab, most), None):
        raise ValueError(f"{where}: {fault}")
    return shard


def _faults(tensors: Mapping[str, Tensor], vocab: int, most: int) -> Iterator[str]:
    """Yield faults of a shard's tensors; each check assumes that no check before found a fault."""
    if sorted(tensors) != sorted(NAMES):
        yield f"must hold {', '.join(NAMES)}; got {', '.join(sorted(tensors)) or 'nothing'}"
    for name, dtype in LISTS.items():
        values = tensors[name]
        if values.dtype != dtype or values.ndim != 1:
            kind = str(dtype).removeprefix("torch.")
            yield (
                f"{name} must be {kind} numbers, one after another; "
                f"got {values.dtype}, shape {tuple(values.shape)}"
            )
    for name in ROWS:
        rows = tensors[name]
        if rows.dtype not in STORED_SUM_TOLERANCE or rows.ndim != 2 or rows.shape[1] != vocab:
            yield (
                f"{name}: must be float16 or float32 rows of {vocab} tokens; "
                f"got {rows.dtype}, shape {tuple(rows.shape)}"
            )
        sums, tolerance = rows.float().exp().sum(-1), STORED_SUM_TOLERANCE[rows.dtype]
        # the first wrong row, if there is one; NaN is wrong, too
        for row in (~((sums - 1).abs() <= tolerance)).nonzero()[:1, 0].tolist():
            yield (
                f"{name}: rows must be log-probabilities, summing to 1 within {tolerance:g}; "
                f"row {row} sums to {float(sums[row]):.6g}"
            )
    position, ids = tensors["position"], tensors["draft_token_ids"]
    cycles, tokens = len(position), len(ids)
    target_rows, draft_rows = (len(tensors[name]) for name in ROWS)
    for name, last in (("token_offsets", tokens), ("draft_offsets", draft_rows)):
        offsets = tensors[name]
        fits = offsets.shape == (cycles + 1,) and offsets[0] == 0 and offsets[-1] == last
        if not fits or bool((offsets.diff() < 0).any()):
            yield (
                f"{name} must rise from 0 to {last} in {cycles + 1} steps; "
                f"got {offsets[:8].tolist()}"
            )
    if target_rows != tokens + cycles:
        yield (
            "target_log_probs must have a row for every drafted token and cycle, "
            f"{tokens} + {cycles}; got {target_rows}"
        )
    drafted, row_counts = (tensors[name].diff() for name in ("token_offsets", "draft_offsets"))
    if bool(((row_counts != drafted) & (row_counts != 0)).any()):
        yield "a cycle must have a draft row for every token, or none"
    for token in ids[(ids < 0) | (ids >= vocab)][:1].tolist():
        yield f"draft_token_ids must lie in [0, {vocab}); got {token}"
    sampled = ids[(row_counts > 0).repeat_interleave(drafted)].long()
    entries = tensors["draft_log_probs"].gather(1, sampled[:, None])[:, 0]
    for row in (entries == -torch.inf).nonzero()[:1, 0].tolist():
        yield (
            "a drafted token must have a probability in the row it was drawn from; "
            f"got 0 for token {int(sampled[row])} in draft row {row}"
        )
    for first in position[position < 0][:1].tolist():
        yield f"position must be at least 0; got {first}"
    if (longest := max(drafted.tolist(), default=0)) > most:
        yield f"must have drafted at most {most} tokens a cycle; got {longest}"


def _check_shape(name: str, rows: Tensor, count: int, vocab: int) -> None:
    """Raise ValueError unless rows have the shape (count, vocab)."""
    if tuple(rows.shape) != (count, vocab):
        raise ValueError(f"{name}: shape must be {(count, vocab)}; got {tuple(rows.shape)}")
