"""Properties of batches: rows as if alone, deterministic drafts as one-hot rows, own policies."""

from collections.abc import Iterator

import torch

from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._decisions import Path
from cactus_theory.policies._policy import one_hot
from cactus_theory.testing._property import EXACT, Bounds
from cactus_theory.testing.verifiers._enumeration import (
    Enumeration,
    aim,
    some_paths,
    verifier_property,
)
from cactus_theory.verify import Assignment, Draft

# number of rows of a ragged batch, and of coin trials for each deterministic draft
BATCH, TRIALS = 6, 4
# policies beside the one that is checked
OTHERS = ("speculative", "mixture:alpha=0.5")


@verifier_property(hint="a quantity that is not reset for each row, or rows after a draft's end")
def a_row_alone_equals_the_batch(seen: Enumeration) -> Iterator[Bounds]:
    """In a ragged batch each row has the verdict and the law that it has alone.

    Whatever stands after its own tokens: here what belongs to other drafts.
    """
    verifier, assigned, length = seen.verifier, seen.assigned, seen.trees.depth
    source = torch.Generator().manual_seed(seen.seed + 1)
    trees = len(seen.trees.kinds)
    tree = torch.arange(BATCH) * max(1, trees // BATCH) % trees
    path = seen.weight[tree].multinomial(1, generator=source)[:, 0]
    counts = (torch.arange(BATCH) % (length + 1))[torch.randperm(BATCH, generator=source)]
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
        own = Draft(ids[part, :count], [count], p[part, :count])
        tossed = accept[part, : verifier.coins(count)], draw[part]
        single = verifier.verify(assigned, rows, own, *tossed)
        alone[row, : count + 1] = single.output_token_ids[0]
        laws[row, : count + 1] = verifier.law(assigned, rows, own).stop[0] if count else 1.0
    about = "row of this tree in a ragged batch: token at place {0}"
    yield Bounds(together, alone, alone, about, 0.0, rows=tree)
    about = "row of this tree in a ragged batch: chance of {0} accepted tokens"
    yield Bounds(law, laws, laws, about, EXACT, rows=tree)


@verifier_property(hint="a deterministic draft that is not treated as a one-hot row")
def deterministic_drafts_are_one_hot_rows(seen: Enumeration) -> Iterator[Bounds]:
    """A draft without rows has the verdicts and the law of one with one-hot rows.

    Unless the policy looks ahead along deterministic drafts, which is another law.
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
    coins[::TRIALS] = 0.0
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
    """Where policies differ from place to place, each row follows the one that judges it.

    Whole drafts with a policy each have the verdicts that they have under that policy alone.
    """
    paths, verifier = some_paths(seen), seen.verifier
    other = next(policy for policy in map(find_policy, OTHERS) if policy.spec != seen.policy.spec)
    policies = (seen.policy, other)
    number = torch.arange(len(paths.ids))[:, None]
    draft = Draft(paths.ids, [paths.length] * len(paths.ids), paths.p)
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
    turns = (number + torch.arange(paths.length)) % 2
    law = verifier.law(Assignment(policies, turns), paths.q, draft)
    if law.emitted is None:
        return
    path = Path(law.alive[:, :-1].flatten())
    rows = paths.q[:, :-1].flatten(0, 1), paths.p.flatten(0, 1)
    first, second = (
        aim(verifier, policy, *rows, path).reshape(law.emitted.shape) for policy in policies
    )
    expected = torch.where(turns[..., None] == 0, first, second)
    about = "draft of this tree, policies in turn: probability at row {0} of token {1}"
    yield Bounds(law.emitted, expected, expected, about, EXACT, rows=paths.tree)
