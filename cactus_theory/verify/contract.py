"""The interface of verifiers: draft, target rows and coins in, verdict out; and their registry.

The decode loop, its caches and its meter depend on this file and on
:mod:`~cactus_theory.verify.draft`, and on no particular verifier. A new verifier is one file with
one :func:`register_verifier`.

A verifier may rely on this:

* The verifier may read target rows and draft until :meth:`Verifier.verify` returns, but must not
  write into them. Rows need not be distributions: see ``last`` of
  :class:`~cactus_theory.verify.draft.Verdict`.
* Coins are independent and uniform on [0, 1). Each text has :meth:`Verifier.coins` coins that
  accept tokens and :meth:`Verifier.draws` coins that draw tokens.
* Policies have no tilt, because target rows arrive tilted (:meth:`Assignment.seen`).
* Of a policy, a verifier may use φ, the residual and the emitted law; what the base class promises
  (``Entrywise``, ``FixedTarget``, ``SharedResidual``); and ``bounds``, ``highest``, ``between`` and
  ``row``. All these have tests. No verifier reads what a policy ``declares``: it is only a claim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import ClassVar, TypeVar

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.specs import Registry, names_a_file, parse_spec, spec_of
from cactus_theory.policies import Policy
from cactus_theory.policies.policy import PathState
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.node import Node, Nodes

Rows = Float[Tensor, "rows vocab"]


@dataclass(frozen=True)
class VerdictLaw:
    """The exact distribution of a verdict over all coins, given the drafted tokens; float64.

    Attributes
    ----------
    stop : (B, K + 1), probability that exactly i drafted tokens are accepted.
    last : (B, K + 1, V), the law of the recovered or bonus token after i accepted tokens.
    alive : (B, K + 1), probability that at least i tokens are accepted, given the first i drafted
        tokens and averaged over the later ones; ``alive[:, 0]`` is 1. If a separate coin decides
        each token, as in a chain, ``alive`` is the tail sum of ``stop``.
    emitted : (B, K, V), the law of the next token at node i given that at least i tokens are
        accepted. The meter charges the divergence of this law from q.

    Entries beyond a text's drafted tokens are 0.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    >>> p = torch.tensor([[[0.75, 0.25]]], dtype=torch.float64)
    >>> draft = Draft(torch.tensor([[0]]), [1], p)
    >>> law = find_verifier("chain").law(Assignment((ct.policy("speculative"),)), q, draft)
    >>> law.stop, law.last[0, 0]
    (tensor([[0.3333, 0.6667]], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """

    stop: Float[Tensor, "batch K1"]
    last: Float[Tensor, "batch K1 vocab"]
    alive: Float[Tensor, "batch K1"]
    emitted: Float[Tensor, "batch K vocab"]


class Verifier(ABC):
    """A way to verify drafts; instances hold options and no state.

    Attributes
    ----------
    reaches_all_it_can : class attribute, whether each node is reached as often as any verifier of
        one drafted path can reach the node for the same rows h.
    by_path : class attribute, whether the emitted law at a node may depend on the alive ratio with
        which the node was reached, as in blocks.
    drafts : class attribute, the shapes of drafts that are verified: ``chain``, ``tree``.

    Examples
    --------
    >>> chain = find_verifier("chain")
    >>> chain.spec, chain.drafts, chain.coins(3)
    ('chain', ('chain',), 3)
    """

    name: ClassVar[str]
    reaches_all_it_can: ClassVar[bool] = False
    by_path: ClassVar[bool] = False
    drafts: ClassVar[tuple[str, ...]] = ("chain",)

    @property
    def spec(self) -> str:
        """Return the string that :func:`find_verifier` takes: ``name:option=value,…``."""
        return spec_of(self.name, self)

    def coins(self, drafted: int) -> int:
        """Return the number of acceptance coins of a text with ``drafted`` tokens."""
        return drafted

    def draws(self, depth: int) -> int:
        """Return the number of coins that draw tokens, for drafted paths of up to ``depth`` tokens.

        If the number exceeds 1, ``draw`` of :meth:`verify` has the shape (B, number).
        """
        return 1

    @abstractmethod
    def verify(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict on drafts, from coins and target rows by node, all unvalidated."""

    def check(self, policy: Policy) -> None:  # noqa: B027  (not abstract: chain needs no check)
        """Raise ValueError for a policy that this verifier cannot verify; a chain verifies all."""

    def emitted(
        self, policy: Policy, target_probs: Rows, draft_probs: Rows, path: PathState
    ) -> Float[Tensor, "rows vocab"]:
        """Return the exact laws of the next token at nodes, float64, from rows that sum to 1.

        ``path`` has the alive ratio of each node; only verifiers with ``by_path`` read it.
        """
        if self.by_path:
            h = policy.target(target_probs, draft_probs, path)
            assert h is not None  # check() has seen the policy
            return h
        return policy.emitted(target_probs, draft_probs)

    @property
    def emits_policy_rows(self) -> bool:
        """Return whether the law at a node is the policy's row there, unchanged by the verifier."""
        return type(self).emitted is Verifier.emitted

    def decide(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Apply tilts, verify, and return the verdict with the nodes where tokens were emitted.

        The meter, the schedule ``Ledger`` and replays read these nodes.
        """
        assigned, target_probs = assigned.seen(target_probs)
        verdict = self.verify(assigned, target_probs, draft, accept, draw)
        return self.followed(verdict, assigned, target_probs, draft)

    def followed(
        self, verdict: Verdict, assigned: Assignment, target_probs: Targets, draft: Draft
    ) -> Verdict:
        """Return the verdict with ``paths``; paths that are added build their nodes when read."""
        if verdict.paths is not None:
            return verdict
        nodes = Nodes(self, assigned, target_probs, draft)
        paths = [Followed(nodes, verdict, row) for row in range(len(verdict.last))]
        return replace(verdict, paths=paths)

    def law(self, assigned: Assignment, target_probs: Targets, draft: Draft) -> VerdictLaw:
        """Return the exact law of the verdict, float64, from rows that sum to 1.

        Raises
        ------
        NotImplementedError
            The verdicts of this verifier cannot be enumerated.
        """
        raise NotImplementedError(f"verifier: {self.name} has no enumerated law")


@dataclass(frozen=True)
class Followed:
    """The path of the text ``row`` if the verifier built no nodes; :meth:`nodes` builds them."""

    round: Nodes
    verdict: Verdict
    row: int

    def nodes(self) -> list[Node]:
        """Return the nodes where the tokens were emitted, in order."""
        # ``raised`` comes from the verdict, so that the nodes do not compute it again
        accepted, path, alive, self.round.raised = self.verdict.on_host
        count = accepted[self.row]
        places = range(count) if path is None else path[self.row][:count]
        nodes = [0, *(place + 1 for place in places)]  # token i leads to node i + 1
        ratios = list[float]() if alive is None else alive[self.row]  # of nodes 0 … K − 1
        return [  # no token was accepted at the last node, whose place is None
            self.round.at(self.row, node, ratios[node] if node < len(ratios) else 1.0, place)
            for node, place in zip_longest(nodes, places)
        ]


VERIFIERS: Registry[Verifier] = Registry("verifier", Verifier, "a Verifier", "verifier")
Kind = TypeVar("Kind", bound=Verifier)


def register_verifier(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Make a verifier available under a name, wherever a verifier is chosen by name.

    Raises
    ------
    ValueError
        The name is taken.

    Examples
    --------
    >>> from cactus_theory.verify.chain import Chain
    >>> @register_verifier("mine")
    ... class Mine(Chain):
    ...     pass
    >>> find_verifier("mine").spec
    'mine'
    """

    def add(kind: type[Kind]) -> type[Kind]:
        VERIFIERS.add(name, kind())
        return kind

    return add


def verifiers() -> tuple[str, ...]:
    """Return the names of the registered verifiers."""
    return VERIFIERS.names()


def find_verifier(verifier: str | Verifier) -> Verifier:
    """Return the verifier of a name, or the verifier itself.

    ``name:option=value,…`` sets fields of a verifier that is a dataclass; the package's verifiers
    have no options. ``my_file.py:Mine`` is read from that file.

    Raises
    ------
    ValueError
        A name that is not registered, an option that the verifier does not have or that is
        given twice.
    OSError, TypeError
        No such file; the file's object of that name is no verifier.

    Examples
    --------
    >>> find_verifier("block").spec
    'block'
    """
    if isinstance(verifier, Verifier):
        return verifier
    if not names_a_file(str(verifier)):
        return registered_verifier(verifier)
    entry, _ = VERIFIERS.read(verifier)
    return _with_options(entry() if isinstance(entry, type) else entry, verifier)


def registered_verifier(verifier: str) -> Verifier:
    """Return the registered verifier of a spec from a data file, without reading a code file."""
    name, _ = parse_spec(str(verifier))
    return _with_options(VERIFIERS.find(name), verifier)


def _with_options(verifier: Verifier, spec: str) -> Verifier:
    _, options = parse_spec(str(spec))
    names = [field.name for field in fields(verifier)] if is_dataclass(verifier) else []
    for option in options:
        if option not in names:
            has = f"the options {', '.join(names)}" if names else "no options"
            raise ValueError(f"verifier: {verifier.name} takes {has}; got {option!r}")
    return replace(verifier, **options) if options else verifier  # type: ignore[type-var]
