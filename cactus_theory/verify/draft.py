"""A round of verification as data: drafts in, verdicts out.

Nine words are used everywhere:

target : the model whose answers are wanted. The target distribution of the next token is the row q.
draft : the model, or another source, that proposes tokens from the row p; also the drafted tokens.
accepted : a drafted token that the verifier keeps. The first token that is not kept is rejected.
recovered : the token that is drawn, from a residual distribution, in place of the rejected token.
bonus : the token that is drawn after all drafted tokens were accepted, from the target row, or from
    the row that the policy puts in its place, such as a tilted row.
emitted : any token that the text gets: accepted, recovered or bonus. The emitted law h is the
    distribution of the token emitted at a node.
node : a place in a draft: the text before the draft, or the text after a drafted token.
coin : a uniform random number on [0, 1). It decides whether a token is accepted, or draws a token.
alive ratio P : in a block, the probability of reaching a node given the drafted tokens before it,
    averaged over the tokens drafted later; 1 in a chain.

:mod:`~cactus_theory.verify.contract` defines what verifiers do with drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.tensors import as_list
from cactus_theory.policies import Policy
from cactus_theory.policies.tilt import colder, tilt_of, untilted

# target rows of a round: K for the drafted tokens, and one for the bonus token
Targets = Float[Tensor, "batch K1 vocab"]
# acceptance coins of a round; coins that draw the token ending it, several for a walk of a tree
Accept = Float[Tensor, "batch coins"]
Draws = Float[Tensor, "batch *draws"]


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of a batch of texts, and the distribution that each was drawn from.

    A row of the batch is one text. Node 0 is the text before the draft; node i + 1 is the text that
    ends with drafted token i, after the tokens that token i follows. Each target row, emitted law
    and charge belongs to a node. In a chain token i follows node i.

    After a drafter has returned a draft, the drafter must not write into the draft's lists and
    tensors until the decode loop calls for the next draft.

    Attributes
    ----------
    token_ids : (B, K) int64; entries after the first ``counts`` of a text are ignored.
    counts : number of drafted tokens of each text, at most K; a list, or a tensor on the device.
    probs : (B, K, V) by node, the row that the token after node i was drawn from, or None if the
        drafter is deterministic; arbitrary where no token follows.
    parents : (B, K) int64, the earlier drafted token that each token follows, −1 if it follows
        node 0; None for a chain, where each token follows the token before it.
    sampled, deterministic : (B, K) bool, which tokens were sampled, and which are deterministic
        (:func:`cactus_theory.verify_tree`). A tree with ``sampled`` is called a declared tree.

    Examples
    --------
    >>> draft = Draft(torch.tensor([[3, 1], [2, 0]]), [2, 1], None)  # of two texts
    >>> draft.lengths
    [2, 1]
    >>> tree = Draft(torch.tensor([[3, 1, 4]]), [3], None, torch.tensor([[-1, -1, 1]]))
    >>> tree.node(0, 2), tree.path(0, 2)  # token 2 follows token 1, which is node 2
    (2, [1, 2])
    """

    token_ids: Int[Tensor, "batch K"]
    counts: list[int] | Int[Tensor, "batch"]
    probs: Float[Tensor, "batch rows vocab"] | None
    parents: Int[Tensor, "batch K"] | None = None
    sampled: Bool[Tensor, "batch K"] | None = None
    deterministic: Bool[Tensor, "batch K"] | None = None

    @property
    def is_chain(self) -> bool:
        """Return whether the draft is a chain and declares no sampled or deterministic tokens."""
        return self.sampled is None and self.parents is None

    def node(self, row: int, place: int) -> int:
        """Return the node that the drafted token at ``place`` of text ``row`` follows."""
        return place if self.parents is None else int(self.parents[row, place]) + 1

    def path(self, row: int, place: int) -> list[int]:
        """Return the places of the drafted tokens on the path that ends at ``place``, in order."""
        path = [place]
        while node := self.node(row, path[0]):  # 0 is the settled text
            path.insert(0, node - 1)  # node i + 1 is the text with token i
        return path

    @cached_property
    def above(self) -> list[Sequence[int]]:
        """Return for each text the nodes that its drafted tokens follow."""
        if self.parents is None:
            return [range(count) for count in self.lengths]
        pairs = zip(as_list(self.parents + 1), self.lengths, strict=True)
        return [nodes[:count] for nodes, count in pairs]

    @cached_property
    def ids(self) -> list[list[int]]:
        """Return ``token_ids`` as lists."""
        return as_list(self.token_ids)

    @cached_property
    def depths(self) -> list[list[int]]:
        """Return for each text the depth of each node: the number of drafted tokens up to it."""
        depths: list[list[int]] = []
        for above in self.above:
            row_depths = [0]
            for node in above:
                row_depths.append(row_depths[node] + 1)
            depths.append(row_depths)
        return depths

    @property
    def longest(self) -> list[int]:
        """Return the length in tokens of the longest drafted path of each text."""
        return self.lengths if self.parents is None else list(map(max, self.depths))

    @cached_property
    def fixed(self) -> list[list[list[int]]]:
        """Return for each text the deterministic ids after each node; only for declared trees."""
        assert self.sampled is not None
        flags = ~self.sampled if self.deterministic is None else self.deterministic
        fixed = [[list[int]() for _ in range(count + 1)] for count in self.lengths]
        for row, (above, is_fixed) in enumerate(zip(self.above, as_list(flags), strict=True)):
            # ids and flags are padded, ``above`` is not
            for node, token in compress(zip(above, self.ids[row], strict=False), is_fixed):
                fixed[row][node].append(token)
        return fixed

    def judged(self, row: int, node: int) -> int | None:
        """Return the place of the drafted token that is verified after a node, None if none is.

        In a declared tree this is the first sampled token after the node, in other drafts the
        first token.
        """
        if self.is_chain:
            return node if node < self.lengths[row] else None
        return self.first_after[row].get(node)

    @cached_property
    def first_after(self) -> list[dict[int, int]]:
        """Return for each text the place of the first token after each node, by node.

        In declared trees only sampled tokens count.
        """
        judgeable = torch.ones_like(self.token_ids) if self.sampled is None else self.sampled
        rows = zip(self.above, as_list(judgeable), strict=True)
        placed = [[*compress(enumerate(above), flags)] for above, flags in rows]
        # in reverse, so that the first place after a node is written last and stays
        return [{node: place for place, node in reversed(pairs)} for pairs in placed]

    def of_text(self, row: int) -> "Draft":
        """Return the draft of one text as a batch of 1."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        of_row = {name: part[row : row + 1] for name, part in parts.items() if part is not None}
        return replace(self, **of_row)

    @property
    def lengths(self) -> list[int]:
        """Return ``counts`` as a list."""
        return self.counts if isinstance(self.counts, list) else as_list(self.counts)


@dataclass(frozen=True)
class Assignment:
    """The policies of a batch, and the policy that judges each drafted token.

    Attributes
    ----------
    policies : the different policies.
    choice : (B, K + 1) by node, index into ``policies`` of the policy that judges the tokens after
        the node (in a chain: token i), and whose ``undrafted`` law is drawn from if no token
        follows; None if one policy judges every token. The last entry also holds for later nodes.
    nodes : by (text, node) the Node that a schedule has solved to choose the policy there. Verifier
        and meter use this Node, and do not solve the row again. None if no schedule solved any.
    tilts, target : the tilts that were taken off the policies, and the target's rows without tilt.

    Examples
    --------
    >>> policies = ct.policy("speculative"), ct.policy("band:price=1")
    >>> first_lossless = Assignment(policies, torch.tensor([[0, 1, 1]]))
    >>> first_lossless.policies[first_lossless.choice[0, 2]].spec
    'band:price=1.0'
    """

    policies: tuple[Policy, ...]
    choice: Int[Tensor, "batch nodes"] | None = None
    nodes: Mapping[tuple[int, int], Any] | None = None
    tilts: tuple[float, ...] = ()
    target: Targets | None = None

    @cached_property
    def _numbers(self) -> list[list[int]]:
        return [] if self.choice is None else as_list(self.choice)

    def number(self, row: int, node: int) -> int:
        """Return the index of the policy that judges the tokens after a node of a text."""
        if self.choice is None:
            return 0
        numbers = self._numbers[row]
        return numbers[min(node, len(numbers) - 1)]

    def policy(self, row: int, node: int) -> Policy:
        """Return the policy that judges the tokens after a node of a text."""
        return self.policies[self.number(row, node)]

    def seen(self, target_probs: Targets) -> "tuple[Assignment, Targets]":
        """Return the assignment with untilted policies, and the tilted rows q^θ to apply them to.

        If there is no tilt, or the tilts are off already, return assignment and rows unchanged.
        """
        tilts = tuple(map(tilt_of, self.policies))
        if self.target is not None or not any(tilts):
            return self, target_probs
        policies = tuple(map(untilted, self.policies))
        rows = {tilt: colder(target_probs, tilt) for tilt in tilts}
        without_tilts = replace(self, policies=policies, tilts=tilts, target=target_probs)
        return without_tilts, self.by_node([rows[tilt] for tilt in tilts])

    def by_node(self, values: Sequence[Tensor]) -> Tensor:
        """Return at every node the entry of ``values`` for the policy chosen there.

        ``values`` has one tensor (B, nodes, …) for each policy.
        """
        if self.choice is None:
            return values[0]
        nodes = torch.arange(values[0].shape[1], device=self.choice.device)
        return self.chosen(values, slice(None), nodes.clamp(max=self.choice.shape[1] - 1))

    def chosen(self, values: Sequence[Tensor], *at: Any) -> Tensor:
        """Return at the indices ``at`` the entries of ``values`` for the policy chosen there.

        ``at`` indexes ``choice``. ``values`` has one tensor for each policy, with a number or a row
        at each index.
        """
        if self.choice is None:
            return values[0]
        choice, chosen = self.choice[at], values[0]
        entry_axes = [1] * (chosen.ndim - choice.ndim)  # one more if the values are rows
        for number, value in enumerate(values[1:], 1):
            is_chosen = (choice == number).reshape(*choice.shape, *entry_axes)
            chosen = torch.where(is_chosen, value, chosen)
        return chosen


@dataclass(frozen=True)
class Verdict:
    """The result of one verification step, for a batch of texts.

    Attributes
    ----------
    draft_token_ids : (B, K), as drafted.
    num_accepted : (B,) int64, without the recovered or bonus token.
    last : (B,) int64, the recovered or bonus token after the accepted tokens; −1 where a row that
        decides the token is no distribution (no mass, NaN or ∞).
    path : (B, K) int64, the places in the draft of the accepted tokens, in order, then −1; None if
        the accepted tokens are the first drafted ones.
    alive : (B, K) float64, the alive ratio at each target row (:class:`VerdictLaw`), only valid at
        rows that are charged; None for verifiers under which h may not depend on P.
    raised : (B, K) float64, h_n of drafted tokens where h depends on later tokens of a
        deterministic draft, NaN elsewhere; None if h never depends on later tokens.
    paths : the path of each text through its draft; ``nodes()`` of a path are the nodes where the
        text's tokens were emitted, in order. None if the verifier leaves ``paths`` to
        :meth:`~cactus_theory.verify.contract.Verifier.decide`.

    Examples
    --------
    >>> drafted = torch.tensor([[3, 1], [2, 0]])
    >>> step = Verdict(drafted, torch.tensor([1, 0]), torch.tensor([4, 4]))
    >>> step.output_token_ids
    tensor([[ 3,  4, -1],
            [ 4, -1, -1]])
    >>> step.rows()
    [[3, 4], [4]]
    """

    draft_token_ids: Int[Tensor, "batch K"]
    num_accepted: Int[Tensor, "batch"]
    last: Int[Tensor, "batch"]
    path: Int[Tensor, "batch K"] | None = None
    alive: Float[Tensor, "batch K"] | None = None
    raised: Float[Tensor, "batch K"] | None = None
    paths: Sequence[Any] | None = None

    @cached_property
    def accepted_token_ids(self) -> Int[Tensor, "batch K"]:
        """Return the accepted tokens of each text, padded with arbitrary ids."""
        if self.path is None:
            return self.draft_token_ids
        return self.draft_token_ids.gather(1, self.path.clamp(min=0))

    @cached_property
    def output_token_ids(self) -> Int[Tensor, "batch width"]:
        """Return (B, K + 1): the accepted tokens, one recovered or bonus token, then −1."""
        ids, accepted = self.accepted_token_ids, self.num_accepted[:, None]
        place = torch.arange(ids.shape[1], device=ids.device)
        output = ids.new_full((len(ids), ids.shape[1] + 1), -1)
        output[:, :-1] = torch.where(place < accepted, ids, -1)
        return output.scatter_(1, accepted, self.last[:, None])

    def rows(self) -> list[list[int]]:
        """Return the emitted ids of each text, as lists."""
        columns = self.num_accepted[:, None], self.last[:, None]
        table = as_list(torch.cat([self.accepted_token_ids, *columns], 1))  # one transfer
        return [[*ids[:count], token] for *ids, count, token in table]

    @cached_property
    def on_host(self) -> list[Any]:
        """Return ``num_accepted``, ``path``, ``alive``, ``raised``, each as a list if not None."""
        values = self.num_accepted, self.path, self.alive, self.raised
        return [None if value is None else as_list(value) for value in values]

    def nodes(self, row: int) -> list[Any]:
        """Return the nodes where a text's tokens were emitted, in order."""
        assert self.paths is not None  # ``decide`` has filled them in
        return self.paths[row].nodes()
