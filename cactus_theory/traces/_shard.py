"""Cycles (rounds) of a decode, stored by text as bytes: ragged rows end to end, with offsets.

A shard is a safetensors file with C cycles, their N drafted tokens, N + C target rows and
M ≤ N draft rows. Rows are natural logarithms, −inf where a token has no probability: float16
probabilities would lose most of a large vocabulary. Of drafted trees there are also
``families`` (N, 3), and a draft row for every token that was sampled. Of draft rows that all lack
some tokens a file holds the columns of the others alone, and which these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.tolerances import STORED_SUM_TOLERANCE
from cactus_theory.verify._runs import Descent
from cactus_theory.verify.draft import Draft
from cactus_theory.verify.tree import declared_tree

DTYPES = {"float16": torch.float16, "float32": torch.float32}
LISTS = {
    "position": torch.int32,
    "token_offsets": torch.int64,
    "draft_offsets": torch.int64,
    "draft_token_ids": torch.int32,
}
ROWS = "target_log_probs", "draft_log_probs"
NAMES = (*LISTS, *ROWS)
FAMILIES, COLUMNS = "families", "draft_columns"


@dataclass(frozen=True)
class Cycle:
    """A round of a decode with all its rows, those after the first refusal too.

    Attributes
    ----------
    text : number of the text.
    position : how many new tokens the text had before.
    draft_token_ids : (K,) int64, as drafted; K may be 0.
    target_probs : (K + 1, V) float64; row 0 follows the text, row i + 1 drafted token i.
    draft_probs : (K, V) float64, the rows the tokens were drawn from; None if the drafter was
        deterministic. In a tree (M, V), of the M nodes that a token was sampled after, in order.
    parents, sampled, deterministic : (K,) of a tree, as of a :class:`~cactus_theory.verify.Draft`;
        None for a chain. Node i + 1, which row i + 1 is of, is the text after token i.

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
    draft_probs: Float[Tensor, "M vocab"] | None
    parents: Int[Tensor, "K"] | None = None
    sampled: Bool[Tensor, "K"] | None = None
    deterministic: Bool[Tensor, "K"] | None = None

    def draft(self) -> Draft:
        """Return the draft, as a batch of one."""
        ids, tree = self.draft_token_ids[None], (self.parents, self.sampled, self.deterministic)
        parents, sampled, deterministic = (None if part is None else part[None] for part in tree)
        probs = None if self.draft_probs is None else self.draft_probs[None]
        if probs is not None and parents is not None and sampled is not None:
            rows = probs.new_zeros(1, ids.shape[1], probs.shape[-1])
            rows[:, (parents + 1)[sampled].sort().values] = probs
            probs = rows
        return Draft(ids, [ids.shape[1]], probs, parents, sampled, deterministic)

    @classmethod
    def of(cls, text: int, position: int, target_probs: Tensor, draft: Draft) -> "Cycle":
        """Return the first row of a batch as a cycle.

        Raises
        ------
        ValueError
            A tree that does not declare the law of its nodes.
        """
        count = draft.lengths[0]
        ids, probs = draft.token_ids[0, :count].cpu(), draft.probs
        q = target_probs[0, : count + 1].to("cpu", torch.float64)
        nodes, tree = torch.arange(count, device="cpu"), ()
        if draft.parents is not None:
            if draft.sampled is None:
                raise ValueError(
                    "draft: a tree to be logged must declare which tokens were sampled"
                )
            fixed = ~draft.sampled if draft.deterministic is None else draft.deterministic
            flags = draft.parents, draft.sampled, fixed
            tree = tuple(part[0, :count].cpu() for part in flags)
            nodes = (tree[0] + 1)[tree[1]].sort().values
        p = None if probs is None or not len(nodes) else probs[0].cpu()[nodes].double()
        return cls(text, position, ids, q, p, *tree)


@dataclass(frozen=True)
class Shard:
    """The cycles of one text; ids and positions are int32, offsets int64, rows of DTYPES.

    Cycle c drafted the tokens from ``token_offsets[c]`` on, up to the next, and has one target row
    more than tokens: its rows start at ``token_offsets[c] + c``. ``families`` of trees are the
    drafted token of its cycle that each one follows, −1 for the text; whether it was sampled;
    whether it is deterministic.
    """

    position: Int[Tensor, "cycles"]  # new tokens of the text before each cycle
    token_offsets: Int[Tensor, "cycles1"]
    draft_offsets: Int[Tensor, "cycles1"]  # a cycle has no draft rows if deterministic
    draft_token_ids: Int[Tensor, "tokens"]
    target_log_probs: Float[Tensor, "target_rows vocab"]  # N + C rows
    draft_log_probs: Float[Tensor, "draft_rows vocab"]
    families: Int[Tensor, "tokens 3"] | None = None

    def __len__(self) -> int:
        """Return the number of cycles."""
        return len(self.position)

    @property
    def counts(self) -> list[int]:
        """Return how many tokens each cycle drafted."""
        return self.token_offsets.diff().tolist()

    @property
    def deterministic(self) -> list[bool]:
        """Return whether each cycle has no draft rows."""
        return (self.draft_offsets.diff() == 0).tolist()

    @property
    def nbytes(self) -> int:
        """Return the bytes of its rows in memory."""
        return self.target_log_probs.nbytes + self.draft_log_probs.nbytes


def pack(cycles: Sequence[Cycle], dtype: torch.dtype, vocab: int, trees: bool = False) -> Shard:
    """Return the cycles of one text as a shard; chains among trees as trees of one path.

    Raises ValueError for rows that are not (K + 1, V) and (K, V), and trees among chains.
    """
    counts = [len(cycle.draft_token_ids) for cycle in cycles]
    for cycle, count in zip(cycles, counts, strict=True):
        if not 0 <= cycle.position < 2**31:
            raise ValueError(f"position: must lie in [0, 2^31); got {cycle.position}")
        _check_shape("target_probs", cycle.target_probs, count + 1, vocab)
        if cycle.draft_probs is not None:
            drawn = count if cycle.sampled is None else int(cycle.sampled.sum())
            _check_shape("draft_probs", cycle.draft_probs, drawn, vocab)
        if cycle.parents is not None and not trees:
            raise ValueError("parents: a trace of trees must say how many nodes they may have")
    row_counts = [0 if cycle.draft_probs is None else len(cycle.draft_probs) for cycle in cycles]
    no_rows = torch.zeros(0, vocab, dtype=torch.float64, device="cpu")
    target = torch.cat([cycle.target_probs.double() for cycle in cycles] or [no_rows])
    draft = torch.cat(
        [c.draft_probs.double() for c in cycles if c.draft_probs is not None] + [no_rows]
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
        families=_families(cycles) if trees else None,
    )


def _families(cycles: Sequence[Cycle]) -> Tensor:
    tables = [torch.zeros(0, 3, device="cpu")]
    for cycle in cycles:
        tree = cycle.parents, cycle.sampled, cycle.deterministic
        if cycle.parents is None:
            path = torch.arange(-1, len(cycle.draft_token_ids) - 1, device="cpu")
            drawn = torch.full_like(path, cycle.draft_probs is not None)
            tree = path, drawn, 1 - drawn
        tables.append(torch.stack([part.int() for part in tree], 1))  # type: ignore[union-attr]
    return torch.cat(tables).int()


def to_bytes(shard: Shard) -> bytes:
    """Return the file's content; the same shard always gives the same bytes."""
    library = check.optional_module("safetensors.torch", "llm")
    names = NAMES if shard.families is None else (*NAMES, FAMILIES)
    tensors = {name: getattr(shard, name) for name in names}
    rows = shard.draft_log_probs
    columns = (rows > -torch.inf).any(0).nonzero()[:, 0]
    if len(rows) and len(columns) < rows.shape[1]:
        tensors |= {COLUMNS: columns.to(torch.int32), "draft_log_probs": rows[:, columns]}
    return library.save({name: values.contiguous() for name, values in tensors.items()})


def from_bytes(
    where: str, content: bytes, vocab: int, most: int, depth: int | None = None
) -> Shard:
    """Return the shard that a file holds, checked; ValueError for another file or tensors."""
    library = check.optional_module("safetensors.torch", "llm")
    try:
        tensors = library.load(content)
    except Exception as error:  # the library raises its own class and several built-in ones
        raise ValueError(f"{where}: must be a safetensors file; {error}") from None
    if (columns := tensors.pop(COLUMNS, None)) is not None:
        tensors["draft_log_probs"] = _spread(where, tensors.get("draft_log_probs"), columns, vocab)
    names = NAMES if depth is None else (*NAMES, FAMILIES)
    if sorted(tensors) != sorted(names):
        raise ValueError(
            f"{where}: must hold {', '.join(names)}; got {', '.join(sorted(tensors)) or 'nothing'}"
        )
    for name, dtype in LISTS.items():
        values = tensors[name]
        if values.dtype != dtype or values.ndim != 1:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"{where}: {name} must be {kind} numbers, one after another; "
                f"got {values.dtype}, shape {tuple(values.shape)}"
            )
    for name in ROWS:
        _check_kind(f"{where}: {name}", tensors[name], vocab)
    return checked(where, Shard(**tensors), vocab, most, depth)


def _spread(where: str, rows: Tensor | None, columns: Tensor, vocab: int) -> Tensor:
    """Return rows with −∞ in all other columns; ValueError for columns that are not theirs."""
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


def checked(where: str, shard: Shard, vocab: int, most: int, depth: int | None = None) -> Shard:
    """Return the shard if it can be that of a trace; ``where`` names the file.

    Raises ValueError for shapes that do not fit together, more than ``most`` drafted tokens a
    cycle, ids that are no tokens, rows that are no log-probabilities, what is no tree, or one of
    paths of more than ``depth`` tokens.
    """
    for name in ROWS:
        _check_rows(f"{where}: {name}", getattr(shard, name), vocab)
    _check_offsets(where, shard)
    _check_ids(where, shard, vocab)
    if bool((shard.position < 0).any()):
        first = shard.position[shard.position < 0][0].item()
        raise ValueError(f"{where}: position must be at least 0; got {first}")
    if depth is not None:
        _check_trees(where, shard, depth)
    if (longest := max(shard.counts, default=0)) > most:
        raise ValueError(f"{where}: must have drafted at most {most} tokens a cycle; got {longest}")
    return shard


def _check_shape(name: str, rows: Tensor, count: int, vocab: int) -> None:
    if tuple(rows.shape) != (count, vocab):
        raise ValueError(f"{name}: shape must be {(count, vocab)}; got {tuple(rows.shape)}")


def _check_offsets(where: str, shard: Shard) -> None:
    cycles, tokens = len(shard), len(shard.draft_token_ids)
    ends = (
        ("token_offsets", shard.token_offsets, tokens),
        ("draft_offsets", shard.draft_offsets, len(shard.draft_log_probs)),
    )
    for name, offsets, last in ends:
        fits = offsets.shape == (cycles + 1,) and offsets[0] == 0 and offsets[-1] == last
        if not fits or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"{where}: {name} must rise from 0 to {last} in {cycles + 1} steps; "
                f"got {offsets.flatten()[:8].tolist()}"
            )
    if len(shard.target_log_probs) != tokens + cycles:
        raise ValueError(
            f"{where}: target_log_probs must have a row for every drafted token and cycle, "
            f"{tokens} + {cycles}; got {len(shard.target_log_probs)}"
        )
    drafted, row_counts = shard.token_offsets.diff(), shard.draft_offsets.diff()
    if shard.families is None and bool(((row_counts != drafted) & (row_counts != 0)).any()):
        raise ValueError(f"{where}: a cycle must have a draft row for every token, or none")


def _check_ids(where: str, shard: Shard, vocab: int) -> None:
    ids = shard.draft_token_ids
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise ValueError(
            f"{where}: draft_token_ids must lie in [0, {vocab}); got {wrong[0].item()}"
        )
    if shard.families is None:
        has_row = shard.draft_offsets.diff() > 0
        sampled = ids[has_row.repeat_interleave(shard.token_offsets.diff())]
        excluded = shard.draft_log_probs.gather(1, sampled.long()[:, None])[:, 0] == -torch.inf
        if bool(excluded.any()):
            row = int(excluded.nonzero()[0])
            raise ValueError(
                f"{where}: a drafted token must have a probability in the row it was drawn from; "
                f"got 0 for token {sampled[row].item()} in draft row {row}"
            )


def _check_trees(where: str, shard: Shard, depth: int) -> None:
    families, shape = shard.families, (len(shard.draft_token_ids), 3)
    if families is None or families.dtype != torch.int32 or families.shape != shape:
        raise ValueError(f"{where}: families must be int32 of shape {shape}")
    for number, rows in enumerate(shard.draft_offsets.diff().tolist()):
        ids, parents, sampled, deterministic = (column[None] for column in family(shard, number))
        try:
            tree = declared_tree(ids, parents, (), sampled, deterministic, validate=True)
            Descent(tree, 0, ids[0].tolist())  # refuses two sampled tokens after a node
        except ValueError as error:
            raise ValueError(f"{where}: cycle {number} must be a tree; {error}") from None
        if int(sampled.sum()) != rows or max(tree.depths[0]) > depth:
            raise ValueError(
                f"{where}: cycle {number} must have a draft row for every sampled token and paths "
                f"of at most {depth} tokens; got {rows} rows and {max(tree.depths[0])} tokens"
            )


def family(shard: Shard, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, parents and both flags of the tokens of a cycle that drafted a tree."""
    assert shard.families is not None
    tokens = slice(*shard.token_offsets[number : number + 2].tolist())
    parents, sampled, deterministic = shard.families[tokens].long().unbind(1)
    return shard.draft_token_ids[tokens].long(), parents, sampled > 0, deterministic > 0


def _check_kind(where: str, rows: Tensor, vocab: int) -> None:
    if rows.dtype not in STORED_SUM_TOLERANCE or rows.ndim != 2 or rows.shape[1] != vocab:
        raise ValueError(
            f"{where}: must be float16 or float32 rows of {vocab} tokens; "
            f"got {rows.dtype}, shape {tuple(rows.shape)}"
        )


def _check_rows(where: str, rows: Tensor, vocab: int) -> None:
    _check_kind(where, rows, vocab)
    misses = (rows.float().exp().sum(-1) - 1).abs()
    tolerance = STORED_SUM_TOLERANCE[rows.dtype]
    if not bool((misses <= tolerance).all()):  # NaN is not
        row = int((~(misses <= tolerance)).nonzero()[0])
        raise ValueError(
            f"{where}: rows must be log-probabilities, summing to 1 within {tolerance:g}; "
            f"row {row} sums to {rows[row].float().exp().sum().item():.6g}"
        )
