r"""The base class of policies. A policy is a pair (φ, g): acceptance probability, residual law.

A token n is drafted from p and accepted with probability φ(n); if n is rejected, the recovered
token is drawn from g(·|n). The emitted law is
:math:`out(x) = p_x φ(x) + Σ_n p_n (1 − φ(n)) g(x|n)` and the acceptance :math:`A = Σ p_n φ(n)`.
Rows are distributions over a vocabulary of V tokens: q of the target and p of the draft. Methods
do not validate rows (the public functions do).

**Laws are float64**: φ, g and the emitted law are returned in float64 and carry no gradients. Rows
may be float64, float32, float16 or bfloat16, q and p of different precisions, with any strides and
any batch shape (...), and may require gradients. The row p of a deterministic draft is one-hot.
"""

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.copies import called, guard
from cactus_theory.base.specs import spec_of
from cactus_theory.base.tensors import float64_rows
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.optimum.band_row import NodeRow
from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.policies import knob_values
from cactus_theory.policies.claims import Declaration

Rows = Float[Tensor, "*batch vocab"]
Ids = Int[Tensor, "*batch m"]
Id = Int[Tensor, "*batch"]
Entries = Float[Tensor, "*any"]

# most entries of the rows in one call of a policy or a function: 2^22 float64 are 32 MiB
ENTRIES = 2**22
# seconds after which the total time of an enumeration is estimated, and the least total warned of
FIRST_SECONDS, SLOW_SECONDS = 1.0, 5.0
FASTER = (
    "where it does not depend on the rejected token, residual=f(q, p) of ct.rule, or "
    "the base class SharedResidual, is asked once a row; meter=False (--meter off) decodes without"
)
# relative slack of a comparison of a row's sum with a threshold: ties (of uniform rows, say) must
# not be decided by the order of summation
TIE = 1e-12


def accept_probability(raised: Tensor, drafted: Tensor) -> Tensor:
    """Return acceptances min(1, h/p) for h = ``raised``, p = ``drafted``; 0/0 is 0, x/0 is 1."""
    return (raised / drafted).nan_to_num_(nan=0.0).clamp_(max=1.0)  # 0/0 is 0, x/0 is 1


def normalised_or(residual: Tensor, fallback: Tensor) -> Tensor:
    """Return rows (..., V) divided by their sums, ``fallback`` where a sum is 0; NaN stays NaN."""
    total = residual.sum(-1, keepdim=True)
    empty = total <= 0
    if not (residual.is_cuda or bool(empty.any())):
        return residual / total
    return torch.where(empty, fallback, residual / torch.where(empty, 1.0, total))


def one_hot(n: Int[Tensor, "*some"], like: Rows) -> Float[Tensor, "*some vocab"]:
    """Return one-hot rows (..., V) of the tokens ``n`` (...), in the dtype of ``like``."""
    row = torch.zeros((*n.shape, like.shape[-1]), dtype=like.dtype, device=like.device)
    return row.scatter_(-1, n[..., None], 1.0)


@dataclass(frozen=True)
class PathState:
    """Inputs of a policy besides q and p: the alive ratio P, and h_n if later tokens decide it."""

    # alive ratio P, float64 in [0, 1]: the probability, given the tokens before the row, that they
    # are all accepted (averaged over the tokens drafted later)
    alive: Float[Tensor, "*batch"]
    # h_n of the drafted token, float64, where the drafter was deterministic and the policy has
    # looked ahead (LookAhead), else None
    raised: Float[Tensor, "*batch"] | None = None


class Policy(ABC):
    """A rule that accepts drafted tokens and replaces rejected tokens; the base class of policies.

    Subclasses are frozen dataclasses whose fields are the knobs, the policy's parameters. φ, g and
    the emitted law are float64 whatever the precision of the rows. Methods of a class from outside
    the package get copies of the rows, and ValueError is raised if a method writes into a copy.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.8]), torch.tensor([0.8, 0.2])
    >>> lossless = ct.policy("speculative")
    >>> lossless.acceptance(q, p, torch.tensor([0, 1]))
    tensor([0.2500, 1.0000], dtype=torch.float64)
    >>> lossless.residual(q, p, torch.tensor(0))
    tensor([0., 1.], dtype=torch.float64)
    """

    name: ClassVar[str]
    knob: ClassVar[str | None] = None
    # an upper bound on h_n/q_n of all tokens of all rows
    highest: float = math.inf
    # whether h is between q and p, so that (P h − p)₊ ≤ (P q − p)₊
    between: bool = False
    # the unit of charges: nats of KL, or nats of regret for a policy of temperature 0
    unit: ClassVar[Divergence] = read_divergence("kl")
    # the solver of the best law for blocks of deterministic drafts, if h is that law
    look_ahead: LookAhead | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard(cls)

    def __post_init__(self) -> None:
        """Convert each knob to its annotated type; ValueError for a value outside its range."""
        given = {name: getattr(self, name) for name in knob_values.of(type(self))}
        for name, value in knob_values.read(type(self), given).items():
            object.__setattr__(self, name, value)

    @property
    def spec(self) -> str:
        """Return the string that rebuilds this policy: ``name:knob=value,…``."""
        return spec_of(called(self), self)

    @property
    def declares(self) -> Declaration:
        """Return the claims of this policy."""
        return Declaration()

    def at_ends(self, token_ids: Iterable[int]) -> "Policy":
        """Return this policy with ``eos`` in its knobs replaced by the ids that end a text."""
        return self

    @abstractmethod
    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n), the probability of accepting each drafted token, float64 (..., m)."""

    @abstractmethod
    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return g(·|n), the law of the recovered token after rejecting n; unused if φ(n) = 1."""

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows | None:
        """Return the row h that is emitted instead of q; None for a policy without such a row.

        h may depend on the text before the drafted token, not on the drafted token itself. At the
        nodes of a block h may also depend on the ``path`` to each row; elsewhere ``path`` is None.
        h is computed in the precision of the rows.
        """
        return None

    def undrafted(self, q: Rows) -> Rows:
        """Return the row that a token is drawn from where nothing was drafted: q by default.

        Such a token is a bonus token, or the token of a round without a draft. The divergence of
        this row from q is charged, as at any other token.
        """
        return q

    @property
    def moves_undrafted(self) -> bool:
        """Return whether :meth:`undrafted` is overridden, so that its row may differ from q."""
        return type(self).undrafted is not Policy.undrafted

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact law of the next token, float64, by enumerating drafted tokens: O(V²)."""
        q, p = float64_rows(q, p)
        phi = self.acceptance_row(q, p)
        rejected = p * (1 - phi)
        vocab = q.shape[-1]
        flat = [rows.reshape(-1, vocab) for rows in (q, p, rejected)]
        out = (p * phi).reshape(-1, vocab).clone()
        start, done, total = time.monotonic(), 0, int(rejected.count_nonzero())
        for row, (q_row, p_row, lost) in enumerate(zip(*flat, strict=True)):
            for chunk in lost.nonzero()[:, 0].split(max(1, ENTRIES // vocab)):
                out[row] += lost[chunk] @ self._recovered(q_row, p_row, chunk)
                done, taken = done + len(chunk), time.monotonic() - start
                if taken < FIRST_SECONDS:
                    continue
                # the time of the whole enumeration, from its first part
                if (ahead := taken * total / max(1, done)) > SLOW_SECONDS:
                    warnings.warn(
                        f"{self.spec}: the residual is asked for each of {total:,} tokens that may "
                        f"be rejected (V = {vocab:,}), about {ahead:.0f} s; {FASTER}",
                        stacklevel=3,
                    )
                start = math.inf  # warn once
        return out.reshape(q.shape)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return lower and upper bounds on φ(n), from entries q_n, p_n of drafted tokens.

        Entries are float64. If the entries determine φ(n), both bounds are the same tensor. For a
        policy with a row h the bounds are on h_n/p_n, also at the nodes of blocks; where h_n/p_n
        exceeds 1, a bound may be 1.
        """
        return torch.zeros_like(q_n), torch.full_like(q_n, torch.inf)

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> NodeRow | None:
        """Return an object that computes h at one node on a CPU; None if the policy has none.

        The object reads the rows (V,) only as far as the decision of one coin (a uniform random
        number) requires. Both rows have the same precision. p is the draft's row, or the selection
        law of several tokens drafted at the node. ``alive`` is the alive ratio P of the node. If
        the result is None, the verifier calls :meth:`target`, or else the methods for φ and g.
        """
        return None

    def acceptance_row(self, q: Rows, p: Rows) -> Rows:
        """Return the acceptance φ(n) of every token n of the vocabulary, (..., V)."""
        q, p = float64_rows(q, p)
        return self.acceptance(q, p, torch.arange(q.shape[-1], device=q.device).expand(q.shape))

    def _recovered(
        self, q: Float[Tensor, "vocab"], p: Float[Tensor, "vocab"], n: Int[Tensor, "m"]
    ) -> Float[Tensor, "m vocab"]:
        shape = (len(n), len(q))
        return self.residual(q.expand(shape), p.expand(shape), n)
