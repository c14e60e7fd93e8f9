"""A setting of a decode: what decides the law of its texts, and how its rounds draft and judge."""

from dataclasses import dataclass
from typing import Any

from cactus_theory.base import defaults
from cactus_theory.decoding.schedule import read_rule, relaxes_greedy
from cactus_theory.decoding.truncation import WHOLE, Cuts


@dataclass(frozen=True)
class Setting:
    """Policy, K, verifier, and the temperature and cuts of the rows that both models give.

    Attributes
    ----------
    policy : a spec or a policy; None: the target decodes alone.
    num_draft_tokens : K, the most drafted tokens of a round.
    verifier : what judges drafts, by name or as an object.
    temperature, cuts : of both models' rows.
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
        """Return policy, verifier and K, as a line of a table or a file has them."""
        return {name: getattr(self, name) for name in ("policy", "verifier", "num_draft_tokens")}

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the keywords of :func:`cactus_theory.generate`; :meth:`drafter` has the draft."""
        soft = not self.plain and relaxes_greedy([read_rule(self.policy)])
        return self.cuts.options(self.temperature, soft) | ({} if self.plain else self.names)

    def drafter(self, draft_model: Any) -> Any:
        """Return the drafter, whose rows are cut in their own way; None to decode without one."""
        return None if self.plain else self.cuts.drafter(draft_model, self.temperature)
