"""What holds of a drafted tree beside what holds of a path, and of the pass that scores it."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies._path import Path
from cactus_theory.testing._drafter import (
    AGREES,
    DRAFTER_PROPERTIES,
    THIN,
    Bench,
    compared,
    decoded,
    middles,
)
from cactus_theory.testing._property import Bounds

# of tokens after caught ones so many are looked at
FEW = 3
# what a token loses that its text holds already
PENALTY = 1.5


@DRAFTER_PROPERTIES.enter(hint="a sibling chosen knowing the drawn token is not certain")
def what_is_certain_is_fixed_before_the_draw(seen: Bench) -> Iterator[Bounds]:
    """Other coins from a drawn token on leave what is certain beside it as it was."""
    source = seen.source()
    coins = seen.coins(source)
    for offset in range(seen.most):
        one = seen.anew(coins)
        if one.draft.sampled is None:
            return
        others = coins.clone()
        others[:, offset:] = seen.coins(source)[:, offset:]
        both = [one, seen.anew(others)]
        for row in range(len(seen.prompts)):
            if any(len(own.drawn[row]) <= offset for own in both):
                continue
            nodes = [own.draft.node(row, own.drawn[row][offset]) for own in both]
            fixed = [own.draft.fixed(row)[node] for own, node in zip(both, nodes, strict=True)]
            flags = torch.tensor([[n in own for n in range(seen.vocab)] for own in fixed]).float()
            about = (
                f"propose: what is certain beside drawn token {offset} after {one.before[row]} "
                "must not depend on its coin; token {0}"
            )
            yield Bounds(flags[:1], flags[1:], flags[1:], about, 0.0)


def lowered(ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores in which the tokens of a text so far have lost PENALTY."""
    return scores.scatter_add(1, ids, torch.full_like(scores, -PENALTY).gather(1, ids))


@DRAFTER_PROPERTIES.enter(hint="positions by index, a mask or a processor that sees cousins")
def target_rows_are_those_of_their_own_texts(seen: Bench) -> Iterator[Bounds]:
    """Rows of the target by node are those of their ancestors alone, under processors too."""
    if seen.drafter.nodes(1) == 1:
        return
    for prompt in seen.prompts:
        for processors in ((), (lowered,)):
            numbers = torch.rand(512, generator=seen.source(), dtype=torch.float64).tolist()
            _, shown = decoded(seen, prompt, [numbers], seen.most, processors)
            assert shown.q is not None and shown.draft is not None
            for node in range(shown.draft.lengths[0] + 1):
                path = shown.draft.path(0, node - 1) if node else []
                text = prompt + shown.draft.token_ids[0, path].tolist()
                due = _row(seen, text, bool(processors))
                about = (
                    f"feed: the target's row of node {node} must be that of its own text {text}"
                    f"{' under a processor' if processors else ''}; token {{0}}"
                )
                yield Bounds(shown.q[:1, node].double(), due, due, about, AGREES)


def _row(seen: Bench, text: list[int], processed: bool = False) -> Float[Tensor, "1 vocab"]:
    """Return the target's row after a text, computed without a cache."""
    ids = torch.tensor([text])
    logits = seen.target_model(input_ids=ids, use_cache=False).logits[:, -1].double()
    return ((lowered(ids, logits) if processed else logits) / seen.temperature).softmax(-1)


@DRAFTER_PROPERTIES.enter(hint="a number that drew one token draws the next one too")
def tokens_after_a_caught_one_have_a_number_of_their_own(seen: Bench) -> Iterator[Bounds]:
    """Tokens that follow a sibling that was caught are drawn with a number of their own.

    One round with a drawn token and siblings is decoded with every combination of coins: the
    numbers draw the token, accept or refuse it, draw what replaces it, and what follows that.
    """
    coins = seen.accepting(1)
    for prompt in seen.prompts if seen.drafter.nodes(1) > 1 else ():
        _, shown = decoded(seen, prompt, [[0.5] * (coins + 3)])
        draft, q = shown.draft, shown.q
        assert draft is not None and q is not None
        if draft.sampled is None or draft.probs is None or not bool(draft.sampled.any()):
            continue
        one = Path(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
        h = seen.policy.target_in_block(q[:1, 0].double(), draft.offers(0, [0], q[0, :1]), one)
        if h is None:
            return
        h, r = h[0].double(), draft.probs[0, 0].double()
        numbers, due, drawn = [], [], middles(r)
        _, shown = decoded(seen, prompt, [[coin, *[0.5] * (coins + 2)] for _, coin in drawn])
        assert shown.draft is not None
        for row, (token, coin) in enumerate(drawn):
            beside = shown.draft.token_ids[row, shown.draft.children(row)[0]].tolist()
            keep = min(1.0, float(h[token] / r[token]))
            if keep > THIN:
                for last, draw in middles(_row(seen, [*prompt, token])[0])[:FEW]:
                    numbers.append([coin, *[keep / 2] * coins, draw, 0.5])
                    due.append([token, last])
            for following, draw in middles((h - r).clamp(min=0.0)) if 1 - keep > THIN else ():
                after = [([], 0.5)]
                if following in beside:
                    rows = middles(_row(seen, [*prompt, following])[0])[:FEW]
                    after = [([last], more) for last, more in rows]
                for last, more in after:
                    numbers.append([coin, *[(1 + keep) / 2] * coins, draw, more])
                    due.append([following, *last])
        yield from compared(seen, prompt, due, numbers)
