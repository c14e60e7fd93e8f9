"""Policies that change along a text: what they may depend on; by position, and in a section."""

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
    """Chooses among a few policies for every drafted token, from the tokens before it.

    Attributes
    ----------
    policies : those chosen from.

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
        """Return a line that tells the schedule from others where results name it."""
        return f"{type(self).__name__}({', '.join(policy.spec for policy in self.policies)})"

    def check(self, verifier: Verifier) -> None:
        """Raise ValueError for a verifier that cannot follow the schedule's policies.

        A subclass may also refuse those under which its guarantee would not hold.
        """
        for policy in self.policies:
            verifier.check(policy)

    def at_ends(self, token_ids: Iterable[int]) -> "Schedule":
        """Return the schedule of the policies for texts that these ids end."""
        policies = tuple(policy.at_ends(token_ids) for policy in self.policies)
        if policies == self.policies:
            return self
        own = copy.copy(self)
        own.policies = policies
        return own

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """Return the state after a prompt; every text begins with its own."""

    @abstractmethod
    def advance(self, state: Any, new_ids: Sequence[int]) -> Any:
        """Return the state after more tokens have become part of the text."""

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
        """Return the policies' indices, given the rows that the tokens are verified on.

        Called instead of :meth:`choose` where a subclass overrides it. The policy of token i may
        depend on ``drafted[:i]`` and on the rows up to and including number i: these are known
        before the token is drawn. Use it for a policy with a state along a block; choices after
        a rejected token are never used.
        """
        return self.choose(state, drafted)

    def choose_by_nodes(
        self,
        state: Any,
        target_probs: Float[Tensor, "1 K1 vocab"],
        draft: Draft,
        verifier: Verifier,
    ) -> tuple[Int[Tensor, "nodes"], dict[int, Node]]:
        """Return the policies chosen along every path of one text's draft, by node.

        With them the nodes, by number, whose laws they were chosen by, for the verifier to follow.
        A class of another package is asked with copies.
        """
        choice, count = draft.token_ids.new_zeros(draft.token_ids.shape[1] + 1), draft.lengths[0]
        ends = any(policy.moves_undrafted for policy in self.policies)
        if len(self.policies) == 1 or not (count or ends):
            return choice, {}
        own = Assignment(tuple(map(untilted, self.policies)))
        nodes = Nodes(verifier, own, target_probs, draft)
        if draft.parents is None:
            choice[: count + ends] = self._along(state, list(range(count)), nodes, ends)
            return choice, {}
        for place in range(count):  # the last choice does not know its own token
            path = draft.path(0, place)
            node = draft.node(0, place)
            choice[node] = self._along(state, path, nodes)[-1]
            if ends:
                choice[place + 1] = self._along(state, path, nodes, True)[-1]
        return choice, {}

    def _along(
        self, state: Any, path: list[int], rows: Nodes, ends: bool = False
    ) -> Int[Tensor, "count"]:
        """Return the choices for a path's tokens, and with ``ends`` for one that is not drafted."""
        draft, ids = rows.draft, rows.draft.token_ids[0, path]
        shown = (torch.cat([ids, ids.new_zeros(int(ends))]),)
        by_rows = type(self).choose_by_rows is not Schedule.choose_by_rows
        if by_rows:
            places = [(draft.node(0, place), place) for place in path]
            places += [(path[-1] + 1 if path else 0, None)] * ends
            nodes = [rows.at(0, node, accepted=own) for node, own in places]
            shown += tuple(stacked(nodes, name) for name in ("q", "offers"))
        if not is_own(type(self)):
            shown = copied(shown)
        return self.choose_by_rows(state, *shown) if by_rows else self.choose(state, *shown)

    def shown(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return nodes to be observed: copies, for a class of another package."""
        return nodes if is_own(type(self)) else [node.copy() for node in nodes]

    def observe(self, state: Any, nodes: Sequence[Node]) -> Any:
        """Return the state after a round, given the nodes where its tokens were emitted.

        Called before :meth:`advance` where a subclass overrides it, for example to add up what
        was spent: a node says its ``policy``, the ``token`` that was drafted there, and what it is
        charged, ``node.charge().spent`` in nats.
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
        """Return no state."""

    def advance(self, state: None, new_ids: Sequence[int]) -> None:
        """Return no state."""

    def choose(self, state: None, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        return torch.zeros_like(drafted)


class ByPosition(Schedule):
    """A sequence of policies, each from a number of new tokens on.

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
    """Return the policy that a spec names, or the schedule that ``FILE.py:NAME`` names.

    Parameters of a schedule's class are its knobs; raises as :func:`cactus_theory.policy`.
    """
    if isinstance(spec, Schedule) and not knobs:
        return spec
    if isinstance(spec, str) and names_a_file(spec):
        return policy_in_file(spec, knobs, Schedule)
    return read_policy(spec, **knobs)  # type: ignore[arg-type]


def relaxes_greedy(rules: Iterable[Policy | Schedule]) -> bool:
    """Return whether policies are charged in regret, and so are for temperature 0 alone.

    Raises ValueError where others stand beside them: these would draw from soft rows.
    """
    each = [rule.policies if isinstance(rule, Schedule) else (rule,) for rule in rules]
    own = {policy.unit == REGRET: policy.spec for policies in each for policy in policies}
    if len(own) > 1:
        raise ValueError(
            f"policy: {own[True]} is charged in regret, and may stand beside policies like it "
            f"alone (regret:price=inf is strict greedy decoding); got {own[False]}"
        )
    return True in own


def check_rule(policy: Policy | Schedule, verifier: Verifier) -> None:
    """Raise ValueError for a policy or a schedule that the verifier cannot follow."""
    policy.check(verifier) if isinstance(policy, Schedule) else verifier.check(policy)


def followers(policy: Policy | Schedule, names: Iterable[str]) -> tuple[list[str], str]:
    """Return the verifiers among ``names`` that can follow, and why the last other one cannot."""
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
    """Whether a section is open, and the last ids, of which a marker may be half written."""

    open: bool
    tail: tuple[int, ...]


class Between(Schedule):
    """A schedule with one policy between an opening and a closing marker, another elsewhere.

    For example a thinking section decoded faster than the answer after it:
    ``Between("cactus:delta=1", opening=5, closing=6)`` is lossless outside. A marker is a token
    or a sequence of tokens (how the tokenizer writes ``<think>``), and there may be several:
    ``opening=[5, (7, 8)]`` are two. A token is inside if an opening marker ends before it in the
    text and no closing one ends after that; so the policy starts with the token after an opening
    marker and ends with the last token of a closing one. Where both end together, the closing
    one counts. Markers in the prompt count; those inside a draft count for the tokens after
    them.

    Guarantee: with ``outside="speculative"`` every token outside the section is drawn from the
    target's row, and the meter charges exactly 0 for it, whatever is drafted and however the
    draft is verified: the policy of a token is chosen from the tokens before it, drafted ones
    included, and where a token is reached its law is that of its own policy (THEORY.md,
    Theorem 18). Markers are looked for as token ids, and tokenizers join a marker with what stands
    around it in several ways: only one that is a special token cannot be missed.

    Raises
    ------
    ValueError
        A marker without tokens, one that both opens and closes, an unknown policy.

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
        ids = (*state.tail, *new_ids)
        tail = ids[len(ids) - min(len(ids), self.memory) :]
        if not len(new_ids):
            return state
        return Section(bool(self._after(state, torch.tensor(new_ids, device="cpu"))[-1]), tail)

    def choose(self, state: Section, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        if not len(drafted):
            return drafted
        before = torch.full_like(drafted[:1], state.open, dtype=torch.bool)
        return torch.cat([before, self._after(state, drafted[:-1])]).long()

    def _after(self, state: Section, ids: Int[Tensor, "count"]) -> Bool[Tensor, "count"]:
        """Return whether a section is open after each of some tokens."""
        text = torch.cat([ids.new_tensor(state.tail), ids])
        closed, opened = (
            _ends(text, markers)[len(state.tail) :] for markers in (self.closing, self.opening)
        )
        count = torch.arange(1, len(ids) + 1, device=ids.device)
        # place of the latest marker up to each token, 0 for none
        latest = torch.where(opened | closed, count, 0).cummax(0).values
        changed = (opened & ~closed)[(latest - 1).clamp(min=0)] if len(ids) else opened
        return torch.where(latest > 0, changed, torch.full_like(changed, state.open))


def _ends(text: Int[Tensor, "T"], markers: Sequence[Sequence[int]]) -> Bool[Tensor, "T"]:
    ends = torch.zeros_like(text, dtype=torch.bool)
    for marker in markers:
        size = len(marker)
        if len(text) >= size:
            written = text.unfold(0, size, 1) == text.new_tensor(marker)
            ends[size - 1 :] |= written.all(-1)
    return ends


def _markers(name: str, value: int | Iterable[Marker]) -> tuple[tuple[int, ...], ...]:
    each = [value] if isinstance(value, int) else list(value)
    markers = [(marker,) if isinstance(marker, int) else tuple(marker) for marker in each]
    if not markers or not all(markers):
        problem = "an empty marker" if markers else "none"
        raise ValueError(f"{name}: must name at least one token; got {problem}")
    for token in (token for marker in markers for token in marker):
        whole_number(name, token, 0)
    return tuple(markers)
