"""A setting of a decode as one object: policy, K, verifier, temperature and truncation."""

from dataclasses import dataclass
from typing import Any

from cactus_theory.base import defaults
from cactus_theory.decoding.schedule import read_rule, relaxes_greedy
from cactus_theory.decoding.truncation import WHOLE, Cuts


@dataclass(frozen=True)
class Setting:
    """Setting of a decode: policy, K, verifier, and temperature and truncation of both models.

    Attributes
    ----------
    policy : a spec or a policy; with None the target decodes alone.
    num_draft_tokens : K, the most drafted tokens of a round.
    verifier : a verifier, by name or as an object.
    temperature : of both models.
    cuts : top-k and top-p of the target's and the draft's rows.
    """

    policy: Any = defaults.POLICY
    num_draft_tokens: int = defaults.NUM_DRAFT_TOKENS
    verifier: Any = defaults.VERIFIER
    temperature: float = defaults.TEMPERATURE
    cuts: Cuts = WHOLE

    def __str__(self) -> str:
        return f"{self.policy}, verifier {self.verifier}, K = {self.num_draft_tokens}"

    @property
    def plain(self) -> bool:
        """Return whether to decode without a draft."""
        return self.policy is None

    @property
    def names(self) -> dict[str, Any]:
        """Return policy, verifier and K by name, as lines of tables and files list them."""
        return {name: getattr(self, name) for name in ("policy", "verifier", "num_draft_tokens")}

    @property
    def keywords(self) -> dict[str, Any]:
        """Return keywords for :func:`cactus_theory.generate`; :meth:`drafter` returns the draft."""
        soft = not self.plain and relaxes_greedy([read_rule(self.policy)])
        return self.cuts.options(self.temperature, soft) | ({} if self.plain else self.names)

    def drafter(self, draft_model: Any) -> Any:
        """Return a drafter whose rows have the draft's truncation; None if there is no policy."""
        return None if self.plain else self.cuts.drafter(draft_model, self.temperature)
