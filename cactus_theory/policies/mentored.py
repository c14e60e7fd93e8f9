"""Mentored decoding: the band of the reverse KL under the name it was published by."""

from dataclasses import dataclass, field

from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._registry import register
from cactus_theory.policies.band import Band


@register("mentored")
@dataclass(frozen=True)
class Mentored(Band):
    r"""Verify against the row that accepts most within KL(q‖h) ≤ δ, at a budget or a price.

    .. math:: \max_h \sum_i \min(p_i, h_i) \;\text{ s.t. }\; \mathrm{KL}(q\|h) \le δ

    The same as ``band:divergence=reverse_kl``, to the last bit; in blocks, as published, every
    row by itself. Source: Tran-Thien 2023;
    Tran-Thien & Nock, arXiv 2609.30474. (Some published code calls lenience by this name.)
    """

    divergence: str = field(default="reverse_kl", init=False)
    per_row: bool = field(default=True, init=False)
    head: float = field(default=0.0, init=False)
    floor: str = field(default="", init=False)
    hold: str = field(default="", init=False)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted reverse KL within delta, or no bound when priced."""
        return super().declares
