"""Check a drafter, and a round of decoding with it, for all that acceptance relies on.

Its tokens are drawn from the rows that it reports, and every uniform number is used once. If the
token that replaces a refused one is drawn with the number that drew the refused one, or with the
one that refused it, every single row still looks right: only the joint law of what is drafted and
what is emitted is wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cactus_theory.decoding import coins
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.text import Texts
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.policy import PathState
from cactus_theory.testing.definition import Bounds, Properties, broken
from cactus_theory.verify import Assignment, Verifier, find_verifier
from cactus_theory.verify.draw import pick
from cactus_theory.verify.node import Nodes, stacked
from tests.kits.drafter_bench import (
    THIN,
    Bench,
    RecordedDraft,
    compared,
    decoded,
    lowered,
    middles,
    stream,
)

DRAFTER_PROPERTIES = Properties("drafter_property")
# tolerance of the sum of a float32 row
SUMS = 1e-4
# tolerance between float32 rows of a model with its cache and without
AGREES = 1e-4
# draft lengths of the batch in which the use of random numbers is counted
LENGTHS = (3, 1, 2)
# number of tokens after caught siblings that are checked
FEW = 3


def assert_drafter_properties(
    drafter: Any,
    target_model: Any,
    *,
    model: Any = None,
    verifier: str | Verifier = "chain",
    policy: str | Policy = "speculative",
    num_draft_tokens: int = 6,
    temperature: float = 0.8,
    rounds: int = 20,
    seed: int = 0,
) -> int:
    """Check a drafter with two small models; raise AssertionError with the first fault found.

    * Every drafted token is the one that its reported row and its coin give; rows sum to 1 and
      stand for what is written into the texts.
    * A draft without rows does not depend on the coins.
    * With ``model``, the rows are its own, softmax(logits / temperature), or deterministic.
    * In a round of decoding with ``verifier``, no uniform number is used twice: the token that
      follows a refused one does not depend on how that one was drawn.
    * In a tree (``verifier="tree"``) deterministic tokens beside a drawn one are fixed before it is
      drawn. The target's row at every node is that of its own text, under processors too.

    A drafter that samples from other rows than it reports breaks every acceptance rule, by so
    little that tests of frequencies may let it pass. Returns how many tokens were checked.
    """
    drafter, judge = as_drafter(drafter), find_verifier(verifier)
    parts = drafter, target_model, model, judge, read_policy(policy)
    seen = Bench(*parts, temperature, num_draft_tokens, rounds, seed)
    with torch.inference_mode():
        fault = broken(type(drafter).__name__, [seen], DRAFTER_PROPERTIES.values())
    if fault:
        raise AssertionError(fault)
    return sum(sum(one.draft.lengths) for one in seen.turns)


@DRAFTER_PROPERTIES.register(hint="rows of another place, temperature or model than the draws")
def tokens_are_drawn_from_the_reported_rows(seen: Bench) -> Iterator[Bounds]:
    """Every drafted token is the one that its reported row and its coin give.

    Rows sum to 1, and stand for what is written into the texts.
    """
    for one in seen.turns:
        yield from _drawn(seen, one)


def _drawn(seen: Bench, one: RecordedDraft) -> Iterator[Bounds]:
    draft, drafted = one.draft, one.drafted
    most = torch.tensor([seen.drafter.nodes(count) for count in one.most])
    about = "propose: must draft so many tokens"
    yield Bounds(torch.tensor(draft.lengths), None, most, about, 0.0)
    if not bool(drafted.any()):
        return
    ids, about = draft.token_ids[drafted], "propose: must write its tokens into the texts"
    yield Bounds(one.written[drafted], ids, ids, about, 0.0)
    drawn = [(row, *pair) for row, places in enumerate(one.drawn) for pair in enumerate(places)]
    if draft.probs is None or not drawn:
        return

    def name(text: str) -> Callable[[tuple[int, ...]], str]:
        def about(index: tuple[int, ...]) -> str:
            row, number, place = drawn[index[0]]
            ids, coin = draft.token_ids[row].tolist(), float(one.coins[row, number])
            return f"propose: {text}; token {place} of {ids}, coin {coin!r}"

        return about

    rows = torch.stack([draft.probs[row, draft.node(row, place)] for row, _, place in drawn])
    must = "rows must be distributions"
    yield Bounds(rows, 0, None, name(must), 0.0)
    yield Bounds(rows.double().sum(-1), 1, 1, name(must), SUMS)
    due = pick(rows, torch.stack([one.coins[row, number] for row, number, _ in drawn]))
    ids = torch.stack([draft.token_ids[row, place] for row, _, place in drawn])
    must = "tokens must be drawn from the reported rows, by their coins"
    yield Bounds(ids, due, due, name(must), 0.0)


@DRAFTER_PROPERTIES.register(hint="another temperature, or a cache that is not rolled back")
def rows_are_the_models_own(seen: Bench) -> Iterator[Bounds]:
    """Rows are softmax(logits / temperature) of the model without a cache, or deterministic."""
    if seen.model is None:
        return
    for one in seen.turns:
        for row, places in enumerate(one.drawn):
            if one.draft.probs is None or not places:
                continue
            path = one.draft.path(row, places[-1])  # what else was drawn lies on other paths
            text = torch.tensor([one.before[row] + one.draft.token_ids[row, path].tolist()])
            logits = seen.model(input_ids=text, use_cache=False).logits[0, -len(path) - 1 : -1]
            due = (logits.double() / seen.temperature).softmax(-1)
            rows = one.draft.probs[row, [one.draft.node(row, place) for place in path]].double()
            judged = (rows.amax(-1, keepdim=True) != 1.0).expand(rows.shape)
            apart = float(torch.where(judged, (rows - due).abs(), 0.0).amax())
            about = f"propose: rows must be the model's own after {one.before[row]}"
            about = f"{about}; they differ by {apart:.3g}, in row {{0}} at token {{1}}"
            yield Bounds(rows[None], due[None], due[None], about, AGREES, judged[None])


@DRAFTER_PROPERTIES.register(hint="a draft that is sampled needs the rows it was sampled from")
def deterministic_drafts_do_not_depend_on_the_coins(seen: Bench) -> Iterator[Bounds]:
    """A draft without rows is the same with other coins."""
    source = seen.source()
    first, second = (seen.anew(seen.coins(source)) for _ in range(2))
    if first.draft.probs is None:
        about = "propose: a draft without rows must not depend on the coins; "
        due, other = (torch.tensor(one.draft.lengths) for one in (first, second))
        yield Bounds(other, due, due, f"{about}how many tokens", 0.0)
        due, other = (torch.where(one.drafted, one.draft.token_ids, -1) for one in (first, second))
        yield Bounds(other, due, due, f"{about}token {{0}}", 0.0)


@DRAFTER_PROPERTIES.register(hint="a stream that is begun anew, or cut at the wrong place")
def every_number_is_used_once(seen: Bench) -> Iterator[Bounds]:
    """In a round of decoding no uniform number of a stream is used twice."""
    for lengths in (LENGTHS, LENGTHS[:1]):
        texts = Texts([[0] for _ in lengths], 1, frozenset(), torch.device("cpu"))
        for text in texts.rows:
            text.stream = stream(1 + torch.arange(64.0).double())
        draft, accept, draw = coins.toss(texts, lengths, seen.accepting)
        draw = coins.more_draws(texts, draw, lengths, seen.verifier.draws)
        draw = draw.reshape(len(lengths), -1)
        for row, length in enumerate(lengths):
            parts = draft[row, :length], accept[row, : seen.accepting(length)]
            used = torch.cat([*parts, draw[row, : seen.verifier.draws(length)]])
            missing = len(used) - len(used[used != 0].unique())
            about = (
                "coins: a uniform number must be used once; a row used numbers "
                f"{used.tolist()} of its stream, for drafts, acceptance and draw: how many too few"
            )
            yield Bounds(torch.tensor([missing]), 0, 0, about, 0.0)


@DRAFTER_PROPERTIES.register(hint="the number that drew or refused a token draws the next one too")
def each_choice_has_a_number_of_its_own(seen: Bench) -> Iterator[Bounds]:
    """The token that follows a refused one does not depend on how that one was drawn.

    One round of one drafted token is decoded with every combination of coins. The first number
    of a row's stream draws the drafted token n, the second accepts or refuses it, the third
    draws the token after it: the combinations are cells of mass p_n × Pr(accepted or not | n) ×
    its law of the next token, so this is the joint law of (drafted, accepted, next), enumerated.
    """
    if seen.accepting(1) == 1:
        for prompt in seen.prompts:
            yield from _one_round(seen, prompt)


def _one_round(bench: Bench, prompt: list[int]) -> Iterator[Bounds]:
    _, shown = decoded(bench, prompt, [[0.5, 0.5, 0.5]])
    if shown.draft is None or not shown.draft.lengths[0]:
        return
    probs, drafted = shown.draft.probs, [(int(shown.draft.token_ids[0, 0]), 0.5)]
    if probs is not None:
        drafted = middles(probs[0, 0])
    _, shown = decoded(bench, prompt, [[u, 0.5, 0.5] for _, u in drafted])
    assert shown.q is not None and shown.draft is not None
    law = bench.verifier.law(Assignment((bench.policy,)), shown.q.double(), shown.draft)
    numbers, due = [], []
    for row, (token, u) in enumerate(drafted):
        accepted = float(law.stop[row, 1])
        for count, v, share in ((0, (1 + accepted) / 2, 1 - accepted), (1, accepted / 2, accepted)):
            if share > THIN:
                for following, w in middles(law.last[row, count]):
                    numbers.append([u, v, w])
                    due.append([token][:count] + [following])
    yield from compared(bench, prompt, due, numbers)


@DRAFTER_PROPERTIES.register(hint="a sibling chosen knowing the drawn token is not deterministic")
def what_is_deterministic_is_fixed_before_the_draw(seen: Bench) -> Iterator[Bounds]:
    """Other coins from a drawn token on leave what is deterministic beside it as it was."""
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
            if any(len(one.drawn[row]) <= offset for one in both):
                continue
            nodes = [one.draft.node(row, one.drawn[row][offset]) for one in both]
            fixed = [one.draft.fixed[row][node] for one, node in zip(both, nodes, strict=True)]
            flags = torch.tensor([[n in ids for n in range(seen.vocab)] for ids in fixed]).float()
            about = (
                f"propose: what is deterministic beside drawn token {offset} "
                f"after {one.before[row]} "
                "must not depend on its coin; token {0}"
            )
            yield Bounds(flags[:1], flags[1:], flags[1:], about, 0.0)


@DRAFTER_PROPERTIES.register(hint="positions by index, a mask or a processor that sees cousins")
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
                due = seen.row_after(text, bool(processors))
                about = (
                    f"feed: the target's row of node {node} must be that of its own text {text}"
                    f"{' under a processor' if processors else ''}; token {{0}}"
                )
                yield Bounds(shown.q[:1, node].double(), due, due, about, AGREES)


@DRAFTER_PROPERTIES.register(hint="a number that drew one token draws the next one too")
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
        one = PathState(torch.ones(1, dtype=torch.float64))
        nodes = Nodes(seen.verifier, Assignment((seen.policy,)), q[:1].double(), draft)
        node = nodes.at(0, 0)
        h = seen.policy.target(*(stacked([node], name) for name in ("q", "offers")), one)
        if h is None:
            return
        h, r = h[0].double(), draft.probs[0, 0].double()
        numbers, due, drawn = [], [], middles(r)
        _, shown = decoded(seen, prompt, [[coin, *[0.5] * (coins + 2)] for _, coin in drawn])
        assert shown.draft is not None
        for row, (token, coin) in enumerate(drawn):
            ids, above = shown.draft.token_ids[row].tolist(), shown.draft.above[row]
            beside = [other for other, node in zip(ids, above, strict=False) if not node]
            phi = min(1.0, float(h[token] / r[token]))
            if phi > THIN:
                for last, draw in middles(seen.row_after([*prompt, token])[0])[:FEW]:
                    numbers.append([coin, *[phi / 2] * coins, draw, 0.5])
                    due.append([token, last])
            for following, draw in middles((h - r).clamp(min=0.0)) if 1 - phi > THIN else ():
                after = [([], 0.5)]
                if following in beside:
                    rows = middles(seen.row_after([*prompt, following])[0])[:FEW]
                    after = [([last], more) for last, more in rows]
                for last, more in after:
                    numbers.append([coin, *[(1 + phi) / 2] * coins, draw, more])
                    due.append([following, *last])
        yield from compared(seen, prompt, due, numbers)
