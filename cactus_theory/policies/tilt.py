r"""The knob ``tilt``: a policy that verifies against a colder, or hotter, target (Theorem 28).

.. math:: q^\theta \propto q^{1+\theta}

is the target at a temperature 1/(1 + θ) of its own. Where a nat shall not be spent on unlikely
text, the best row is the plain one about q^θ, so that a tilted policy is the policy without a tilt
about other rows. Verifiers make these rows once a round
(:meth:`cactus_theory.verify.draft.Assignment.seen`); D(h‖q) is charged against q.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import scaled
from cactus_theory.base.tensors import ungraphed
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.policies.claims import Declaration
from cactus_theory.policies.policy import Policy, Rows

Tilt = Annotated[float, partial(check.number, low=-1, high=1e6, open_low=True)]
# claims that a tilt leaves
KEPT = "direction", "continuous", "support", "floored", "held"
# methods whose first argument is a whole row of the target
ABOUT_ROWS = ("acceptance", "residual", "target", "emitted")


def colder(q: Rows, tilt: float) -> Rows:
    """Return rows q^θ ∝ q^(1+θ), of half precision float32; where q = 0 they are 0."""
    if not tilt:
        return q
    rows = ungraphed(q) if q.dtype in DECIDED else ungraphed(q).float()
    about, empty = scaled(rows.log(), 1 / (1 + tilt)).softmax(-1), rows.amax(-1, keepdim=True) == 0
    return torch.where(empty, 0.0, about) if empty.is_cuda or bool(empty.any()) else about


def tilt_of(policy: Policy) -> float:
    """Return θ of the rows that a policy is to be asked about, 0 of one without the knob."""
    return policy.tilt_of_rows if isinstance(policy, Tilted) else 0.0


def untilted(policy: Policy) -> Policy:
    """Return a policy without its tilt."""
    return policy.about if isinstance(policy, Tilted) and policy.tilt_of_rows else policy


def worth_of_rows(q: Rows, tilt: float) -> Float[Tensor, "*batch"]:
    """Return ln Σ q e^{θ r̃}, float64, of r̃ = ln q + H(q): what a tilt makes a row worth.

    A row without mass, which nobody draws from, is worth 0.
    """
    logs = q.double().log()
    entropy = torch.special.entr(q.double()).sum(-1)
    worth = ((1 + tilt) * logs).logsumexp(-1) + tilt * entropy
    return torch.where(worth > -torch.inf, worth, 0.0)


@dataclass(frozen=True)
class Tilted(Policy):
    """Policies with the knob ``tilt``, θ above −1: 0 is the policy about the target itself.

    ``about`` is the policy without its tilt, which verifiers ask about rows q^θ: what a class says
    of its entries (``Entrywise``, ``bounds``, ``highest``, ``between``, ``row``) is said of it.
    """

    tilt: Tilt = field(default=0.0, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ABOUT_ROWS:
            if not hasattr(method := getattr(cls, name), "is_about_tilted"):
                setattr(cls, name, _about_tilted(method))
        if isinstance(declares := vars(cls).get("declares"), property):
            cls.declares = property(_without_budget(declares))  # type: ignore[assignment]

    @property
    def tilt_of_rows(self) -> float:
        """Return the tilt, 0 where the policy reads the target's rows themselves."""
        return self.tilt

    @cached_property
    def about(self) -> Policy:
        """Return the policy without its tilt."""
        return replace(self, tilt=0.0) if self.tilt else self

    @property
    def moves_undrafted(self) -> bool:
        """Return whether there is a tilt, or a row of one's own."""
        return bool(self.tilt) or type(self).undrafted is not Tilted.undrafted

    def undrafted(self, q: Rows) -> Rows:
        """Return q^θ, within the policy's boxes."""
        return self.tilted(q) if self.tilt else q

    def tilted(self, q: Rows) -> Rows:
        """Return the row that is best where nothing was drafted."""
        return colder(q, self.tilt)


def _about_tilted(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def asked(self: Tilted, q: Rows, *rest: Any, **named: Any) -> Any:
        if not self.tilt_of_rows:
            return method(self, q, *rest, **named)
        q = q if method.__name__ == "target" else q.double()
        return getattr(self.about, method.__name__)(colder(q, self.tilt), *rest, **named)

    asked.is_about_tilted = True  # type: ignore[attr-defined]
    return asked


def _without_budget(declares: property) -> Callable[[Tilted], Declaration]:
    """Return claims of a policy, of which those about q itself fall with a tilt."""

    def claimed(self: Tilted) -> Declaration:
        claims = declares.fget(self)  # type: ignore[misc]
        if not self.tilt:
            return claims
        kept = {name: getattr(claims, name) for name in KEPT}
        return Declaration(**kept)

    claimed.__doc__ = declares.__doc__
    return claimed
