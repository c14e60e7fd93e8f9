"""Properties of the law that a verifier states, and of batches.

Laws are summed over all drafts and coins. In a batch, a row has the verdict that it has alone, a
deterministic draft has the verdict of one-hot draft rows, and each token is judged by the policy
that is assigned to it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cactus_theory.policies import read_policy
from cactus_theory.policies.policy import PathState, one_hot
from cactus_theory.testing.definition import EXACT, Bounds
from cactus_theory.testing.verifiers._enumeration import (
    Enumeration,
    aim,
    some_paths,
    verifier_property,
)
from cactus_theory.verify import Assignment, Draft

# rounding error of a difference of masses at a node, relative to the probability of its text
ROUNDING = 1e-14
# largest change of a law when rows are rounded to float32 (each entry by 6e-8, relative)
SINGLE = 1e-6
# number of rows of a ragged batch, and of coin trials for each deterministic draft
BATCH, TRIALS = 6, 4
# policies that share a batch with the checked policy: the first that differs from it is taken
OTHERS = ("speculative", "mixture:alpha=0.5")


def _rounding(value: Tensor, reached: Tensor) -> Tensor:
    """Return the tolerance of the mass ``value`` at nodes drafted with probability ``reached``."""
    return EXACT * value.abs() + ROUNDING * reached


@verifier_property(hint="a sum over accepted counts that misses one, or a division of 0 by 0")
def counts_have_a_law(seen: Enumeration) -> Iterator[Bounds]:
    """On every path the probabilities of 0 … K accepted tokens are ≥ 0, and their sum is 1."""
    drafted = seen.weight > 0
    each = drafted[..., None].expand(seen.law.stop.shape)
    yield Bounds(seen.law.stop, 0, 1, "path {0}: chance of {1} accepted tokens", EXACT, each)
    yield Bounds(seen.law.stop.sum(-1), 1, 1, "path {0}: sum over accepted counts", EXACT, drafted)


@verifier_property(
    hint="a residual of another row or without its alive ratio, or another value for the coins",
)
def next_token_has_the_law(seen: Enumeration) -> Iterator[Bounds]:
    """At every node the next token, given that all tokens before it are accepted, has the law h.

    The token is drafted and accepted, or recovered. Averaged over all drafts, its law is exactly
    the policy's row h at the node; after K tokens, the row that the bonus token is drawn from.
    """
    bonus = seen.policy.undrafted(seen.trees.q[-1])
    for depth, joint in enumerate(seen.following):
        row = seen.target[depth] if depth < seen.trees.depth else bonus
        expected = seen.passed[depth][..., None] * row
        allowed = _rounding(seen.passed[depth], seen.trees.reached[depth])[..., None]
        about = f"depth {depth}, node {{0}}: chance of being there and going on with token {{1}}"
        yield Bounds(joint, expected, expected, about, allowed.expand(joint.shape))


@verifier_property(hint="what was found for rows is known by the memory that they lay in")
def laws_are_exact_while_p_changes_between_rounds(seen: Enumeration) -> Iterator[Bounds]:
    """A round has the law and verdicts of its own draft rows, whatever rows earlier rounds had.

    An online drafter changes its weights between rounds, and writes its rows into the same memory.
    Here the memory holds each tree's p, then p with its tokens shifted, then p again.
    """
    count, verifier = len(seen.weight), seen.verifier
    ids, q = seen.trees.paths.repeat(count, 1), seen.q.flatten(0, 1)
    tree = torch.arange(count).repeat_interleave(len(ids) // count)
    source = torch.Generator().manual_seed(seen.seed)
    coins = torch.rand(len(ids), verifier.coins(ids.shape[1]) + 1, generator=source).double()
    memory = seen.p.flatten(0, 1).clone()
    moved = {step: memory.roll(step, -1) for step in (0, 1)}
    for step in (0, 1, 0):
        memory.copy_(moved[step])
        draftable = (memory.gather(-1, ids[..., None]) > 0).all((-1, -2))[:, None]
        laws, emitted = [], []
        for p in (memory, moved[step]):  # found, and expected: rows in memory of their own
            draft = Draft(ids, [ids.shape[1]] * len(ids), p)
            laws.append(verifier.law(seen.assigned, q, draft))
            verdict = verifier.verify(seen.assigned, q, draft, coins[:, :-1], coins[:, -1])
            emitted.append(verdict.output_token_ids)
        found, expected = (law.stop for law in laws)
        about = f"p moved by {step} tokens: chance of {{0}} accepted tokens"
        yield Bounds(found, expected, expected, about, 0.0, draftable.expand(found.shape), tree)
        found, expected = emitted
        about = f"p moved by {step} tokens: token at place {{0}}"
        yield Bounds(found, expected, expected, about, 0.0, draftable.expand(found.shape), tree)


@verifier_property(hint="alive counts from the wrong row, or not given the tokens before it")
def alive_is_the_chance_of_passing(seen: Enumeration) -> Iterator[Bounds]:
    """Probability × alive ratio of a text is the chance that it is drafted and accepted.

    This chance is at most the text's probability, and at most the chance of the node before times
    h of the last token. Its sum over all texts is the expected number of accepted tokens.
    """
    reached, passed = seen.trees.reached, seen.passed
    expected = torch.zeros(len(reached[0]), dtype=torch.float64)
    for depth, chances in enumerate(passed):
        stated = seen.drafted(seen.law.alive[..., depth])
        # of each path: the chance of passing its node here, times that of drafting the path's rest
        chance = chances[:, seen.trees.node(depth)]
        share = torch.where(chance > 0, seen.weight / reached[depth][:, seen.trees.node(depth)], 0)
        about = f"path {{0}}: chance of drafting it with its first {depth} tokens accepted"
        yield Bounds(stated, share * chance, share * chance, about, _rounding(stated, seen.weight))
        about = f"depth {depth}, node {{0}}: chance of being there"
        # rows h and φ may be solved in different batches
        allowed = 4 * _rounding(chances, reached[depth])
        yield Bounds(chances, 0, _highest(seen, depth), about, allowed)
        if depth:  # every passed node but the root is one accepted token
            expected += (reached[depth] * seen.alive[depth]).sum(-1)
    counted = (seen.stopped * torch.arange(len(passed))).sum((-1, -2))
    yield Bounds(counted, expected, expected, "expected accepted tokens", EXACT)


def _highest(seen: Enumeration, depth: int) -> Tensor:
    """Return for each node the largest probability with which a verifier of one path passes it."""
    if depth == 0:
        return seen.trees.reached[0]
    let_through = seen.passed[depth - 1][..., None] * seen.target[depth - 1]
    return torch.minimum(seen.trees.reached[depth], let_through.flatten(1))


@verifier_property(hint="the meter is given another row than the one that is emitted")
def charged_rows_are_emitted(seen: Enumeration) -> Iterator[Bounds]:
    """The law that the meter charges at each node is the law h that is emitted there."""
    assert seen.law.emitted is not None
    for depth, target in enumerate(seen.target):
        reached = (seen.trees.reached[depth] > 0)[..., None].expand(target.shape)
        q, p = (rows[depth].flatten(0, 1) for rows in (seen.trees.q, seen.trees.p))
        path = PathState(seen.alive[depth].flatten())
        charged = seen.verifier.emitted(seen.policy, q, p, path)
        about = f"depth {depth}, node {{0}}: charged probability of token {{1}}"
        yield Bounds(charged.reshape(target.shape), target, target, about, EXACT, reached)
        along = target[:, seen.trees.node(depth)]
        about = f"path {{0}}, row {depth}: stated probability of token {{1}}"
        drafted = (seen.weight > 0)[..., None].expand(along.shape)
        yield Bounds(seen.law.emitted[:, :, depth], along, along, about, EXACT, drafted)


@verifier_property(hint="sums or thresholds in single precision")
def single_precision_agrees(seen: Enumeration) -> Iterator[Bounds]:
    """Rows rounded to float32 change the joint law of draft, count and token by at most 1e-6."""
    if not seen.policy.declares.continuous:
        return
    about = "path {0}: chance of {1} accepted tokens"
    both = seen.law_of(seen.q.float(), seen.p.float()), seen.law
    found, expected = (seen.drafted(law.stop) for law in both)
    yield Bounds(found, expected, expected, about, SINGLE)
    found, expected = (seen.drafted(law.stop[..., None] * law.last) for law in both)
    yield Bounds(found, expected, expected, f"{about} and token {{2}}", SINGLE)


@verifier_property(
    lambda verifier: verifier.reaches_all_it_can, hint="each token decided by its own coin"
)
def reaches_every_node_as_often_as_possible(seen: Enumeration) -> Iterator[Bounds]:
    """Every node is passed as often as any verifier of one path can; no chain accepts more.

    The largest chance is the text's probability, or the chance of the node before times h of the
    last token, whichever is smaller.
    """
    # in a chain, which keeps each token by itself: the chance of passing each node, and their sum
    chain_passed = torch.ones_like(seen.passed[0])
    token_by_token = torch.zeros(len(chain_passed), dtype=torch.float64)
    for depth, chances in enumerate(seen.passed):
        most = _highest(seen, depth)
        about = f"depth {depth}, node {{0}}: chance of being there"
        yield Bounds(chances, most, None, about, _rounding(most, seen.trees.reached[depth]))
        if depth:
            p, h = seen.trees.p[depth - 1].double(), seen.target[depth - 1]
            chain_passed = (chain_passed[..., None] * torch.minimum(p, h)).flatten(1)
            token_by_token += chain_passed.sum(-1)
    counted = sum(chances.sum(-1) for chances in seen.passed[1:])
    about = "expected accepted tokens, against token by token"
    yield Bounds(torch.as_tensor(counted), token_by_token, None, about, EXACT)


@verifier_property(hint="a quantity that is not reset for each row, or rows after a draft's end")
def a_row_alone_equals_the_batch(seen: Enumeration) -> Iterator[Bounds]:
    """In a ragged batch each row has the verdict and the law that it has alone.

    The padding after a row's tokens does not matter; here it holds tokens and rows of other drafts.
    """
    verifier, assigned, length = seen.verifier, seen.assigned, seen.trees.depth
    # one drawn path of each of a few trees, cut to a drawn number of tokens
    source = torch.Generator().manual_seed(seen.seed + 1)
    trees = len(seen.trees.kinds)
    tree = torch.arange(BATCH) * max(1, trees // BATCH) % trees
    path = seen.weight[tree].multinomial(1, generator=source)[:, 0]
    counts = (torch.arange(BATCH) % (length + 1))[torch.randperm(BATCH, generator=source)]
    # tokens and rows beyond that number are those of another draft in the batch
    beyond = torch.arange(length) >= counts[:, None]
    ids, q, p = seen.trees.paths[path], seen.q[tree, path], seen.p[tree, path]
    ids = torch.where(beyond, ids.roll(1, 0), ids)
    p, after = (torch.where(beyond[..., None], rows.roll(1, 0), rows) for rows in (p, q[:, 1:]))
    q = torch.cat([q[:, :1], after], 1)
    width = verifier.coins(length) + 1
    coins = torch.rand(BATCH, width, generator=source, dtype=torch.float64)
    accept, draw = coins[:, :-1], coins[:, -1]
    draft = Draft(ids, counts.tolist(), p)
    together = verifier.verify(assigned, q, draft, accept, draw).output_token_ids
    law = verifier.law(assigned, q, draft).stop
    alone, laws = torch.full_like(together, -1), torch.zeros_like(law)
    for row, count in enumerate(counts.tolist()):
        part, rows = slice(row, row + 1), q[row : row + 1, : count + 1]
        cut = Draft(ids[part, :count], [count], p[part, :count])
        tossed = accept[part, : verifier.coins(count)], draw[part]
        single = verifier.verify(assigned, rows, cut, *tossed)
        alone[row, : count + 1] = single.output_token_ids[0]
        laws[row, : count + 1] = verifier.law(assigned, rows, cut).stop[0] if count else 1.0
    about = "row of this tree in a ragged batch: token at place {0}"
    yield Bounds(together, alone, alone, about, 0.0, rows=tree)
    about = "row of this tree in a ragged batch: chance of {0} accepted tokens"
    yield Bounds(law, laws, laws, about, EXACT, rows=tree)


@verifier_property(hint="a deterministic draft that is not treated as a one-hot row")
def deterministic_drafts_are_one_hot_rows(seen: Enumeration) -> Iterator[Bounds]:
    """A draft without rows has the verdicts and the law of a draft with one-hot rows.

    Policies that look ahead along deterministic drafts are excepted: they have a different law.
    """
    if seen.policy.look_ahead is not None:
        return
    paths = some_paths(seen)
    source = torch.Generator().manual_seed(seen.seed + 2)
    each = torch.arange(len(paths.ids)).repeat_interleave(TRIALS)
    ids, q, tree = paths.ids[each], paths.q[each], paths.tree[each]
    counts = [paths.length] * len(ids)
    drafts = Draft(ids, counts, None), Draft(ids, counts, one_hot(ids, q))
    coins = torch.rand(len(ids), paths.coins + 1, generator=source, dtype=torch.float64)
    coins[::TRIALS] = 0.0  # in the first trial of each path, every coin is 0
    accept, draw = coins[:, :-1], coins[:, -1]
    deterministic, expected = (
        seen.verifier.verify(seen.assigned, q, draft, accept, draw).output_token_ids
        for draft in drafts
    )
    about = "deterministic draft of this tree: token at place {0}"
    yield Bounds(deterministic, expected, expected, about, 0.0, rows=tree)
    laws = [seen.verifier.law(seen.assigned, q, draft) for draft in drafts]
    for name in ("stop", "last", "alive", "emitted"):
        deterministic, expected = (getattr(law, name) for law in laws)
        if deterministic is None or expected is None:
            continue
        about = f"deterministic draft of this tree: {name} of the law at {{0}}"
        yield Bounds(deterministic, expected, expected, about, EXACT, rows=tree)


@verifier_property(hint="one policy for every token, or that of another place")
def each_token_has_its_own_policy(seen: Enumeration) -> Iterator[Bounds]:
    """Where policies differ from token to token, each row follows the policy assigned to it.

    If each draft has one policy, its verdicts are those under that policy alone. If two policies
    take turns along every draft, the law emitted at each node is that of the node's policy.
    """
    paths, verifier = some_paths(seen), seen.verifier
    other = next(policy for policy in map(read_policy, OTHERS) if policy.spec != seen.policy.spec)
    policies = (seen.policy, other)
    number = torch.arange(len(paths.ids))[:, None]
    draft = Draft(paths.ids, [paths.length] * len(paths.ids), paths.p)
    # one policy for each draft
    source, choice = torch.Generator().manual_seed(seen.seed + 3), number % 2
    coins = torch.rand(len(paths.ids), paths.coins + 1, generator=source, dtype=torch.float64)
    whole = Assignment(policies, choice.expand(paths.ids.shape))
    mixed, first, second = (
        verifier.verify(assigned, paths.q, draft, coins[:, :-1], coins[:, -1]).output_token_ids
        for assigned in (whole, *(Assignment((policy,)) for policy in policies))
    )
    expected = torch.where(choice == 0, first, second)
    about = "draft of this tree, a policy for each draft: token at place {0}"
    yield Bounds(mixed, expected, expected, about, 0.0, rows=paths.tree)
    # policies in turn; in a block they see the alive ratios that the other policy has left
    turns = (number + torch.arange(paths.length)) % 2
    law = verifier.law(Assignment(policies, turns), paths.q, draft)
    path = PathState(law.alive[:, :-1].flatten())
    rows = paths.q[:, :-1].flatten(0, 1), paths.p.flatten(0, 1)
    first, second = (
        aim(verifier, policy, *rows, path).reshape(law.emitted.shape) for policy in policies
    )
    expected = torch.where(turns[..., None] == 0, first, second)
    about = "draft of this tree, policies in turn: probability at row {0} of token {1}"
    yield Bounds(law.emitted, expected, expected, about, EXACT, rows=paths.tree)
