"""Schedules: choose the policy along a text by position, by section, or by a class of yours.

:func:`generate` takes a :class:`Schedule` in place of a policy; ``assignment`` runs the schedules.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.arguments import whole_number
from cactus_theory.base.copies import copied, is_own
from cactus_theory.base.specs import names_a_file
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.registry import policy_in_file
from cactus_theory.policies.tilt import untilted
from cactus_theory.verify.contract import Verifier, find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.node import Node, Nodes, stacked

Spec = str | Policy


class Schedule(ABC):
    """Base class of schedules: choose a policy for every drafted token from the tokens before it.

    Attributes
    ----------
    policies : the policies to choose from.

    Examples
    --------
    >>> class Alternating(Schedule):
    ...     policies = (ct.policy("speculative"), ct.policy("band:price=1"))
    ...     def begin(self, prompt):
    ...         return 0
    ...     def advance(self, state, new_ids):
    ...         return state + len(new_ids)
    ...     def choose(self, state, drafted):
    ...         return (state + torch.arange(len(drafted))) % 2
    >>> Alternating().choose(3, torch.tensor([7, 7]))
    tensor([1, 0])
    """

    policies: tuple[Policy, ...]

    @property
    def spec(self) -> str:
        """Return one line that names the schedule in results."""
        return f"{type(self).__name__}({', '.join(policy.spec for policy in self.policies)})"

    def check(self, verifier: Verifier) -> None:
        """Raise ValueError for a verifier that does not support the schedule's policies.

        A subclass may also raise for verifiers under which the schedule's guarantee fails.
        """
        for policy in self.policies:
            verifier.check(policy)

    def at_ends(self, token_ids: Iterable[int]) -> "Schedule":
        """Return the schedule, with ``eos`` in its policies replaced by these end-of-text ids."""
        policies = tuple(policy.at_ends(token_ids) for policy in self.policies)
        if policies == self.policies:
            return self
        changed = copy.copy(self)
        changed.policies = policies
        return changed

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """Return the state after a prompt; called once per text."""

    @abstractmethod
    def advance(self, state: Any, new_ids: Sequence[int]) -> Any:
        """Return the state after ``new_ids`` have been appended to the text."""

    @abstractmethod
    def choose(self, state: Any, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Return the index of the policy that judges each drafted token.

        The policy of token i may depend on ``drafted[:i]``, not on token i or later ones.
        """

    def choose_by_rows(
        self,
        state: Any,
        drafted: Int[Tensor, "K"],
        target_probs: Float[Tensor, "K vocab"],
        draft_probs: Float[Tensor, "K vocab"],
    ) -> Int[Tensor, "K"]:
        """Return the index of the policy of each drafted token, from tokens and rows.

        If a subclass overrides this method, :meth:`choose` is not called. The policy of token i may
        depend on ``drafted[:i]`` and on rows 0 to i, which are known before token i is drawn.
        Override this method if the choices depend on rows. Choices after a rejected token are never
        used.
        """
        return self.choose(state, drafted)

    def choose_by_nodes(
        self,
        state: Any,
        target_probs: Float[Tensor, "1 K1 vocab"],
        draft: Draft,
        verifier: Verifier,
    ) -> tuple[Int[Tensor, "nodes"], dict[int, Node]]:
        """Return the index of the policy at every node of one text's draft, and solved nodes.

        Paths of the draft are passed to :meth:`choose` or :meth:`choose_by_rows`; a class of
        another package gets copies. The solved nodes, by number, are those whose emitted laws a
        subclass computed in order to choose; the verifier uses these laws. By default there are no
        solved nodes.
        """
        count = draft.lengths[0]
        choice = draft.token_ids.new_zeros(draft.token_ids.shape[1] + 1)
        # whether a policy is also needed where nothing was drafted: at the ends of paths
        ends = any(policy.moves_undrafted for policy in self.policies)
        if len(self.policies) == 1 or not (count or ends):
            return choice, {}
        bare = Assignment(tuple(map(untilted, self.policies)))  # schedules read rows without tilt
        nodes = Nodes(verifier, bare, target_probs, draft)
        if draft.parents is None or not count:
            choice[: count + ends] = self._along(state, list(range(count)), nodes, ends)
            return choice, {}
        for place in range(count):
            path = draft.path(0, place)
            node = draft.node(0, place)  # the node that the token follows
            # the path of any token after the node will do: no choice depends on the token it judges
            choice[node] = self._along(state, path, nodes)[-1]
            if ends:  # for leaves; where tokens follow, they write a choice later in this loop
                choice[place + 1] = self._along(state, path, nodes, ends=True)[-1]
        return choice, {}

    def _along(
        self, state: Any, path: list[int], nodes: Nodes, ends: bool = False
    ) -> Int[Tensor, "count"]:
        """Return the policy index of each path token and, if ``ends``, of the next token."""
        draft, ids = nodes.draft, nodes.draft.token_ids[0, path]
        if ends:
            # id 0 stands for the token after the path, as no policy depends on the token it judges
            ids = torch.cat([ids, ids.new_zeros(1)])
        read = (ids,)
        by_rows = type(self).choose_by_rows is not Schedule.choose_by_rows
        if by_rows:
            along = [nodes.at(0, draft.node(0, place), place=place) for place in path]
            if ends:  # node i + 1 stands after drafted token i, node 0 after the settled text
                along.append(nodes.at(0, path[-1] + 1 if path else 0))
            # ``offers`` is the draft row that policies read; it is q where nothing was drafted
            read += tuple(stacked(along, name) for name in ("q", "offers"))
        if not is_own(type(self)):  # a single node's rows are the round's memory
            read = copied(read)
        return self.choose_by_rows(state, *read) if by_rows else self.choose(state, *read)

    def shown(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes for :meth:`observe`: copies, if this schedule is of another package."""
        return nodes if is_own(type(self)) else [node.copy() for node in nodes]

    def observe(self, state: Any, nodes: Sequence[Node]) -> Any:
        """Return the state after a round, from the nodes where the round's tokens were emitted.

        Called before :meth:`advance` if a subclass overrides this method, for example to add up
        nats. A node has its ``policy``, the drafted ``token``, and the charge in nats,
        ``node.charge().spent``.
        """
        return state


class OnePolicy(Schedule):
    """A schedule with one policy for every token."""

    def __init__(self, policy: Spec) -> None:
        self.policies = (read_policy(policy),)

    @property
    def spec(self) -> str:
        return self.policies[0].spec

    def begin(self, prompt: Sequence[int]) -> None:
        """Return None: one policy needs no state."""

    def advance(self, state: None, new_ids: Sequence[int]) -> None:
        """Return None: one policy needs no state."""

    def choose(self, state: None, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        return torch.zeros_like(drafted)


class ByPosition(Schedule):
    """A schedule with a list of (start, policy): each policy begins at new token ``start``.

    ``ByPosition([(0, "speculative"), (32, "band:price=2")])`` is lossless for the first 32
    tokens of the answer.

    Raises
    ------
    ValueError
        Positions that do not start at 0 and rise, an unknown policy.

    Examples
    --------
    >>> later = ByPosition([(0, "speculative"), (32, "band:price=2")])
    >>> later.choose(31, torch.tensor([7, 7])).tolist()
    [0, 1]
    """

    def __init__(self, steps: Sequence[tuple[int, Spec]]) -> None:
        self.starts = tuple(whole_number("steps", start, 0) for start, _ in steps)
        if self.starts[:1] != (0,) or list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"steps: positions must start at 0 and rise; got {self.starts}")
        self.policies = tuple(read_policy(spec) for _, spec in steps)

    def begin(self, prompt: Sequence[int]) -> int:
        return 0

    def advance(self, state: int, new_ids: Sequence[int]) -> int:
        return state + len(new_ids)

    def choose(self, state: int, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        position = torch.arange(state, state + len(drafted), device=drafted.device)
        return torch.searchsorted(position.new_tensor(self.starts), position, right=True) - 1


def read_rule(spec: Spec | Schedule, **knobs: Any) -> Policy | Schedule:
    """Return the policy that a spec names, or the policy or schedule that ``FILE.py:NAME`` names.

    Knobs of a schedule are the parameters of its class. Raises as :func:`cactus_theory.policy`.
    """
    if isinstance(spec, Schedule) and not knobs:
        return spec
    if isinstance(spec, str) and names_a_file(spec):
        return policy_in_file(spec, knobs, Schedule)
    return read_policy(spec, **knobs)  # type: ignore[arg-type]


def relaxes_greedy(rules: Iterable[Policy | Schedule]) -> bool:
    """Return whether policies are charged in regret, which makes them policies of temperature 0.

    Raises ValueError if only some policies are charged in regret. A policy of regret needs the rows
    of temperature 1 instead of one-hot rows, and from these rows the other policies would sample.
    """
    each = [rule.policies if isinstance(rule, Schedule) else (rule,) for rule in rules]
    # whether charged in regret → the spec of one such policy
    spec_by_regret = {one.unit == REGRET: one.spec for policies in each for one in policies}
    if len(spec_by_regret) > 1:
        raise ValueError(
            f"policy: {spec_by_regret[True]} is charged in regret, and all policies must be then "
            f"(regret:price=inf is strict greedy decoding); got {spec_by_regret[False]}"
        )
    return True in spec_by_regret


def check_rule(policy: Policy | Schedule, verifier: Verifier) -> None:
    """Raise ValueError for a policy or a schedule that the verifier does not support."""
    policy.check(verifier) if isinstance(policy, Schedule) else verifier.check(policy)


def followers(policy: Policy | Schedule, names: Iterable[str]) -> tuple[list[str], str]:
    """Return the verifiers among ``names`` that support a policy or schedule, and an error text.

    The text is the error of the last verifier that does not support the policy, or empty.
    """
    able, refused = [], ""
    for name in dict.fromkeys(names):
        verifier = find_verifier(name)
        try:
            check_rule(policy, verifier)
            able.append(name)
        except ValueError as error:
            refused = str(error)
    return able, refused


Marker = int | Sequence[int]


class Section(NamedTuple):
    """State of :class:`Between`: whether a section is open, and the last ids of the text.

    The last ids may be the beginning of a marker that the next tokens complete.
    """

    open: bool
    tail: tuple[int, ...]


class Between(Schedule):
    """A schedule with one policy between an opening and a closing marker, and another outside.

    For example, ``Between("cactus:delta=1", opening=5, closing=6)`` decodes a thinking section
    with ``cactus`` and is lossless outside. A marker is a token or a sequence of tokens (the
    tokenizer's ids of ``<think>``). Several markers are allowed: ``opening=[5, (7, 8)]`` are two.
    The inside policy starts with the token after an opening marker and ends with the last token of
    a closing marker. Where an opening and a closing marker end at the same token, the closing
    marker counts. Markers in the prompt count, too. A marker inside a draft counts for the tokens
    after the marker.

    Guarantee: with ``outside="speculative"`` every token outside the section is drawn from the
    target's row, and the meter charges exactly 0 for the token, whatever is drafted and however
    the draft is verified. Why: a token's policy is chosen from the tokens before it, drafted
    tokens included, and a token that is reached has the emitted law of its policy (THEORY.md,
    Theorem 18). Markers are compared as token ids. A tokenizer may join a marker with the text
    around it, and the ids then differ; only a marker that is a special token is always found.

    Raises
    ------
    ValueError
        A marker without tokens, a marker that both opens and closes, an unknown policy.

    Examples
    --------
    >>> thinking = Between("band:price=1", opening=5, closing=6)
    >>> state = thinking.begin([1, 5])  # the prompt opens the section
    >>> thinking.choose(state, torch.tensor([3, 6, 3])).tolist()
    [1, 1, 0]
    """

    def __init__(
        self,
        inside: Spec,
        *,
        outside: Spec = "speculative",
        opening: int | Iterable[Marker],
        closing: int | Iterable[Marker],
    ) -> None:
        self.policies = (read_policy(outside), read_policy(inside))
        self.opening = _markers("opening", opening)
        self.closing = _markers("closing", closing)
        if shared := sorted(set(self.opening) & set(self.closing)):
            raise ValueError(f"closing: must differ from opening; got {list(shared[0])} in both")
        self.memory = max(map(len, self.opening + self.closing)) - 1

    @property
    def spec(self) -> str:
        outside, inside = (policy.spec for policy in self.policies)
        return f"{inside} between {list(self.opening)} and {list(self.closing)}, else {outside}"

    def begin(self, prompt: Sequence[int]) -> Section:
        return self.advance(Section(False, ()), prompt)

    def advance(self, state: Section, new_ids: Sequence[int]) -> Section:
        if not len(new_ids):
            return state
        ids = (*state.tail, *new_ids)
        tail = ids[len(ids) - min(len(ids), self.memory) :]  # ids[-0:] would be all ids
        return Section(bool(self._after(state, torch.tensor(new_ids, device="cpu"))[-1]), tail)

    def choose(self, state: Section, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        if not len(drafted):
            return drafted
        before = torch.full_like(drafted[:1], state.open, dtype=torch.bool)
        return torch.cat([before, self._after(state, drafted[:-1])]).long()

    def _after(self, state: Section, ids: Int[Tensor, "count"]) -> Bool[Tensor, "count"]:
        """Return for each of ``ids``, appended to the text, whether a section is open after it."""
        text = torch.cat([ids.new_tensor(state.tail), ids])
        closed, opened = (
            _ends(text, markers)[len(state.tail) :] for markers in (self.closing, self.opening)
        )
        count = torch.arange(1, len(ids) + 1, device=ids.device)
        # place of the latest marker up to each token, 0 for none
        latest = torch.where(opened | closed, count, 0).cummax(0).values
        # a marker that only opens; where both kinds end at one token, the closing marker counts
        opens = (opened & ~closed)[(latest - 1).clamp(min=0)] if len(ids) else opened
        return torch.where(latest > 0, opens, torch.full_like(opens, state.open))


def _ends(text: Int[Tensor, "T"], markers: Sequence[Sequence[int]]) -> Bool[Tensor, "T"]:
    """Return for each token whether one of the markers ends there."""
    ends = torch.zeros_like(text, dtype=torch.bool)
    for marker in markers:
        size = len(marker)
        if len(text) >= size:
            written = text.unfold(0, size, 1) == text.new_tensor(marker)
            ends[size - 1 :] |= written.all(-1)
    return ends


def _markers(name: str, value: int | Iterable[Marker]) -> tuple[tuple[int, ...], ...]:
    """Return markers as tuples of ids; ValueError for an empty marker or no marker."""
    each = [value] if isinstance(value, int) else list(value)
    markers = [(marker,) if isinstance(marker, int) else tuple(marker) for marker in each]
    if not markers or not all(markers):
        problem = "an empty marker" if markers else "none"
        raise ValueError(f"{name}: must name at least one token; got {problem}")
    for token in (token for marker in markers for token in marker):
        whole_number(name, token, 0)
    return tuple(markers)
