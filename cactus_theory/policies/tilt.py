r"""The knob ``tilt``, θ: verify against the target's row at another temperature (Theorem 28).

.. math:: q^\theta \propto q^{1+\theta}

is the target's row q at the temperature 1/(1 + θ): colder for θ > 0, hotter for θ < 0. Among the
rows that keep a limit on nats and a limit on surprise, the best is the row that the untilted policy
emits with q^θ in place of q. So a tilted policy is the untilted policy on rows q^θ. Verifiers
compute these rows once a round (:meth:`cactus_theory.verify.draft.Assignment.seen`). The divergence
that is charged is D(h‖q), from q itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Annotated, Any, cast

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
# claims of a policy that still hold with a tilt
KEPT = "direction", "continuous", "support", "floored", "held"
# methods whose first argument is a whole row of the target
ABOUT_ROWS = ("acceptance", "residual", "target", "emitted")


def colder(q: Rows, tilt: float) -> Rows:
    """Return rows ∝ q^(1 + tilt), with 0 where q = 0; half precision becomes float32."""
    if not tilt:
        return q
    rows = ungraphed(q) if q.dtype in DECIDED else ungraphed(q).float()
    about = scaled(rows.log(), 1 / (1 + tilt)).softmax(-1)
    empty = rows.amax(-1, keepdim=True) == 0  # softmax gives NaN there
    return torch.where(empty, 0.0, about) if empty.is_cuda or bool(empty.any()) else about


def tilt_of(policy: Policy) -> float:
    """Return the tilt θ of a policy that verifies against rows q^θ ∝ q^(1+θ); 0 for all others."""
    return policy.tilt_of_rows if isinstance(policy, Tilted) else 0.0


def untilted(policy: Policy) -> Policy:
    """Return the policy to apply to rows q^θ: without its tilt; unchanged if ``tilt_of`` is 0."""
    return policy.about if isinstance(policy, Tilted) and policy.tilt_of_rows else policy


def worth_of_rows(q: Rows, tilt: float) -> Float[Tensor, "*batch"]:
    """Return ln Σ q e^{θ r̃} of each row in float64, where θ is ``tilt`` and r̃ = ln q + H(q).

    H is the entropy, so that r̃ has mean 0 under q. The result is the largest value of
    θ Σ h r̃ − KL(h‖q) over all rows h, attained by q^θ. Times the price ν, this is the most that a
    row where nothing was drafted can add to the objective of Theorem 29. The result is 0 for a row
    without mass, from which no token is drawn.
    """
    logs = q.double().log()
    entropy = cast(Any, torch.special).entr(q.double()).sum(-1)
    worth = ((1 + tilt) * logs).logsumexp(-1) + tilt * entropy
    return torch.where(worth > -torch.inf, worth, 0.0)


@dataclass(frozen=True)
class Tilted(Policy):
    """Policies with the knob ``tilt``, θ above −1; with 0 they verify against the target itself.

    ``about`` is the policy without its tilt, which verifiers apply to rows q^θ ∝ q^(1+θ). The
    attributes and methods about single entries (those of ``Entrywise``, ``bounds``, ``highest``,
    ``between``, ``row``) ignore the tilt: they equal those of ``about``, for entries of q^θ.
    """

    tilt: Tilt = field(default=0.0, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ABOUT_ROWS:
            method = getattr(cls, name)
            if not hasattr(method, "is_about_tilted"):  # an inherited method is wrapped already
                setattr(cls, name, _about_tilted(method))
        if isinstance(declares := vars(cls).get("declares"), property):
            cls.declares = property(_without_budget(declares))  # type: ignore[assignment]

    @property
    def tilt_of_rows(self) -> float:
        """Return the tilt of the rows to verify against; 0 if the policy reads q itself."""
        return self.tilt

    @cached_property
    def about(self) -> Policy:
        """Return the policy without its tilt."""
        return replace(self, tilt=0.0) if self.tilt else self

    @property
    def moves_undrafted(self) -> bool:
        """Return whether :meth:`undrafted` may return another row than q."""
        return bool(self.tilt) or type(self).undrafted is not Tilted.undrafted

    def undrafted(self, q: Rows) -> Rows:
        """Return the row to draw from where nothing was drafted: q, or ``tilted`` with a tilt."""
        return self.tilted(q) if self.tilt else q

    def tilted(self, q: Rows) -> Rows:
        """Return q^θ ∝ q^(1+θ), the best row to emit where nothing was drafted (Theorem 28)."""
        return colder(q, self.tilt)


def _about_tilted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that, with a tilt, calls the untilted policy's method with q^θ for q.

    ``target`` returns rows in the precision of q, other methods in float64.
    """

    @wraps(method)
    def about_tilted(self: Tilted, q: Rows, *rest: Any, **named: Any) -> Any:
        if not self.tilt_of_rows:
            return method(self, q, *rest, **named)
        q = q if method.__name__ == "target" else q.double()
        return getattr(self.about, method.__name__)(colder(q, self.tilt), *rest, **named)

    # __init_subclass__ reads this: an inherited method must not be tilted twice
    about_tilted.is_about_tilted = True  # type: ignore[attr-defined]
    return about_tilted


def _without_budget(declares: property) -> Callable[[Tilted], Declaration]:
    """Return a ``declares`` that, with a tilt, keeps only the claims that still hold."""

    def claimed(self: Tilted) -> Declaration:
        claims = declares.fget(self)  # type: ignore[misc]
        if not self.tilt:
            return claims
        kept = {name: getattr(claims, name) for name in KEPT}
        return Declaration(**kept)

    claimed.__doc__ = declares.__doc__
    return claimed
