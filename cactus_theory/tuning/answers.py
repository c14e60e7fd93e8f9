"""What a mean leaves single answers, and what a cap on each of them costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.decoding.ledger import Ledger
from cactus_theory.policies import list_policies
from cactus_theory.policies import policy as find_policy
from cactus_theory.promises import Promise, share
from cactus_theory.traces.estimate import Estimate
from cactus_theory.traces.replays import replay
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import LOSSLESS, OTHERS, USUAL, Family

# a ledger raises prices as credit runs out, so its policy may begin looser than the mean allows;
# at 1, 1.4 and 2 times the looseness that was tuned ledgers made as many tokens a call (± .003)
LOOSER = 1.4
# the share of answers in the upper quantile
UPPER = 0.9
# nats an answer that promise something
TIGHT = 0.1
NO_TREE = "trees (Siblings, LikeliestTree: passes over their nodes are not timed)"
ALWAYS = (
    "other schedules than that ledger (Between, ByPosition)",
    "greedy and n-gram drafts",
    NO_TREE,
    "drafts that stop early (--draft-stop)",
    "other temperatures and cuts than those of the rows",
)


@dataclass(frozen=True, eq=False)
class Answers:
    """How a tuned mean falls on single texts, and the cap on every answer that it may become.

    Attributes
    ----------
    level : nats a token, the mean that was tuned for; also the cap.
    above, upper, worst : share of logged texts whose own mean is above it, and the .9 quantile and
        largest of their means; coins are integrated out, so that single answers vary more.
    policy, verifier, num_draft_tokens : what ``Ledger(policy, level)`` decodes with.
    ratio : its tokens a call over those of the same policy's family at the level without a cap.
    """

    level: float
    above: float
    upper: float
    worst: float
    policy: str
    verifier: str
    num_draft_tokens: int
    ratio: Estimate

    def as_json(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        ratio = {"tokens_ratio": self.ratio.value, "tokens_ratio_se": self.ratio.standard_error}
        return {name: own for name, own in vars(self).items() if name != "ratio"} | ratio

    @property
    def sentence(self) -> str:
        """Return what the mean leaves open, and what to decode with where it must not."""
        lossy, error = 100 * (1 - self.ratio.value), 100 * self.ratio.standard_error
        less = f"{lossy:.1f}" if error != error else f"{lossy:.1f} ± {error:.1f}"
        return (
            f"That is a mean: {share(self.above)} of the texts lie above {self.level:g}, one in "
            f"ten above {self.upper:.3g}, the worst at {self.worst:.3g}. A cap on every answer: "
            f"generate --policy {self.policy} --verifier {self.verifier} --num-draft-tokens "
            f"{self.num_draft_tokens} --cap {self.level:g}, for {less} % fewer tokens a call."
        )

    def promised(self, tokens: int) -> str:
        """Return what that cap promises of an answer of so many tokens, and a tight one."""
        own, tight = (
            Promise(0.9, per_token=nats, tokens=tokens) for nats in (self.level, TIGHT / tokens)
        )
        return (
            f"That cap allows an answer of {tokens} tokens {own.nats:.3g} nats: {own.range}. "
            f"--cap {tight.per_token:.3g} allows {tight.nats:.3g}: {tight.range}."
        )


def answers_of(judged: Trace, family: Family, policy: str, width: int, level: float) -> Answers:
    """Return how a setting that a ledger can follow spends on texts, and what a cap would cost."""
    free = replay(judged, policy, family.verifier, num_draft_tokens=width)
    own = free.spent["kl"] / free.tokens
    price = getattr(find_policy(policy), "price", None)
    looser = policy if price is None else family.spec(LOOSER / price)
    capped = replay(judged, Ledger(looser, level), family.verifier, num_draft_tokens=width)
    return Answers(
        level,
        float((own > level).mean()),
        float(np.quantile(own, UPPER)),
        float(own.max()),
        looser,
        family.verifier,
        width,
        capped.tokens_per_call / free.tokens_per_call,
    )


def not_tried(
    families: Sequence[str],
    widths: Sequence[int],
    batches: Sequence[int],
    siblings: Sequence[int] = (),
) -> list[str]:
    """Return what a choice among families (name@verifier), K and batch sizes leaves out."""
    trees = NO_TREE
    if siblings:
        counts = ", ".join(map(str, siblings))
        trees = f"trees but {counts} siblings a place, which the row knows nothing of"
    tried: dict[str, set[str]] = {}
    for name, verifier in (key.rsplit("@", 1) for key in families):
        tried.setdefault(name, set()).add(verifier)
    names = {name.split(":")[0] for name in tried}
    knobs = [own for own in (*USUAL, *OTHERS) if own not in tried and own.split(":")[0] in names]
    missing = [
        f"{name} with {other}"
        for name, own in tried.items()
        for other in set(USUAL[LOSSLESS]) - own
        if "soft_band" not in name
    ]
    return [
        f"policies {', '.join([*sorted(set(list_policies()) - names), *knobs])}",
        *([f"verifiers {', '.join(missing)}"] if missing else []),
        f"K other than {', '.join(map(str, widths))}",
        f"batch sizes other than {', '.join(map(str, batches))}",
        *(trees if own == NO_TREE else own for own in ALWAYS),
    ]
