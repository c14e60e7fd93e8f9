"""Properties of batches: rows as if alone, deterministic drafts as one-hot rows, stated draws."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._decisions import Path
from cactus_theory.policies._policy import one_hot
from cactus_theory.testing._property import EXACT, Bounds, chance_of_counts
from cactus_theory.testing.verifiers._enumeration import (
    Enumeration,
    Paths,
    aim,
    some_paths,
    verifier_property,
)
from cactus_theory.verify import Assignment, Draft, Verdict
from cactus_theory.verify._checks import verify_tensors

# number of rows of a ragged batch, and of coin trials for each deterministic draft
BATCH, TRIALS = 6, 4
# trees with sampled verdicts, probability of a false alarm on each, and number of samples
DRAWN, FALSE_ALARM, DRAWS = (1, 14, 18), 1e-6, 2000
# policies beside the one that is checked
OTHERS = ("speculative", "mixture:alpha=0.5")


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths; those beyond a row's own length belong to other drafts."""

    tree: Int[Tensor, "batch"]
    q: Float[Tensor, "batch K1 vocab"]
    p: Float[Tensor, "batch K vocab"]
    ids: Int[Tensor, "batch K"]
    counts: list[int]
    accept: Float[Tensor, "batch coins"]
    draw: Float[Tensor, "batch"]

    @property
    def drafts(self) -> Draft:
        """Return the batch as a draft."""
        return Draft(self.ids, self.counts, self.p)

    @property
    def padded(self) -> Tensor:
        """Return the tokens with −1 after each row's own."""
        beyond = torch.arange(self.ids.shape[1]) >= torch.tensor(self.counts)[:, None]
        return self.ids.masked_fill(beyond, -1)

    def alone(self, row: int) -> tuple[Tensor, Draft]:
        """Return the target's rows and the draft of one row."""
        count, part = self.counts[row], slice(row, row + 1)
        draft = Draft(self.ids[part, :count], [count], self.p[part, :count])
        return self.q[part, : count + 1], draft


def _ragged(seen: Enumeration) -> Ragged:
    source = torch.Generator().manual_seed(seen.seed + 1)
    trees, length = len(seen.trees.kinds), seen.trees.depth
    tree = torch.arange(BATCH) * max(1, trees // BATCH) % trees
    path = seen.weight[tree].multinomial(1, generator=source)[:, 0]
    counts = torch.arange(BATCH) % (length + 1)
    counts = counts[torch.randperm(BATCH, generator=source)]
    other = tree.roll(1), path.roll(1)
    beyond = (torch.arange(length + 1) > counts[:, None])[..., None]
    q = torch.where(beyond, seen.q[other], seen.q[tree, path])
    p = torch.where(beyond[:, 1:], seen.p[other], seen.p[tree, path])
    ids = torch.where(beyond[:, 1:, 0], seen.trees.paths[other[1]], seen.trees.paths[path])
    width = seen.verifier.coins(length) + 1
    coins = torch.rand(BATCH, width, generator=source, dtype=torch.float64)
    return Ragged(tree, q, p, ids, counts.tolist(), coins[:, :-1], coins[:, -1])


@verifier_property(hint="a quantity that is not reset for each row, or rows after a draft's end")
def a_row_alone_equals_the_batch(seen: Enumeration) -> Iterator[Bounds]:
    """In a ragged batch each row has the verdict and the law that it has alone.

    Whatever stands after its own tokens; with a generator per row, too.
    """
    batch, verifier, assigned = _ragged(seen), seen.verifier, seen.assigned
    together = verifier.verify(assigned, batch.q, batch.drafts, batch.accept, batch.draw)
    law = verifier.law(assigned, batch.q, batch.drafts)
    alone, laws = torch.full_like(together.output_token_ids, -1), torch.zeros_like(law.stop)
    for row, count in enumerate(batch.counts):
        q, draft = batch.alone(row)
        accept = batch.accept[row : row + 1, : verifier.coins(count)]
        single = verifier.verify(assigned, q, draft, accept, batch.draw[row : row + 1])
        alone[row, : count + 1] = single.output_token_ids[0]
        laws[row, 0] = 1.0
        if count:
            laws[row, : count + 1] = verifier.law(assigned, q, draft).stop[0]
    about = "row of this tree in a ragged batch: token at place {0}"
    yield Bounds(together.output_token_ids, alone, alone, about, 0.0, rows=batch.tree)
    about = "row of this tree in a ragged batch: chance of {0} accepted tokens"
    yield Bounds(law.stop, laws, laws, about, EXACT, rows=batch.tree)
    if verifier.coins(seen.trees.depth) == seen.trees.depth:
        yield _by_generator(seen, batch)


def _by_generator(seen: Enumeration, batch: Ragged) -> Bounds:
    verdict = _with_generators(seen, batch.q, batch.p, batch.padded, list(range(BATCH)))
    emitted = verdict.output_token_ids
    expected = torch.full_like(emitted, -1)
    for row, count in enumerate(batch.counts):
        q, draft = batch.alone(row)
        alone = _with_generators(seen, q, draft.probs, draft.token_ids, [row])
        expected[row, : count + 1] = alone.output_token_ids[0]
    about = "row of this tree, with a generator per row: token at place {0}"
    return Bounds(emitted, expected, expected, about, 0.0, rows=batch.tree)


def _with_generators(
    seen: Enumeration, q: Tensor, p: Tensor | None, ids: Tensor, seeds: list[int]
) -> Verdict:
    generators = [torch.Generator().manual_seed(seen.seed + seed) for seed in seeds]
    return verify_tensors(seen.verifier, seen.policy, q, p, ids, generators, None, False)


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
    paths = some_paths(seen)
    other = next(policy for policy in map(find_policy, OTHERS) if policy.spec != seen.policy.spec)
    policies = (seen.policy, other)
    number = torch.arange(len(paths.ids))[:, None]
    turns = (number + torch.arange(paths.length)) % 2
    draft = Draft(paths.ids, [paths.length] * len(paths.ids), paths.p)
    yield _whole_drafts(paths, policies, number % 2)
    law = seen.verifier.law(Assignment(policies, turns), paths.q, draft)
    if law.emitted is None:
        return
    path = Path(law.alive[:, :-1].flatten())
    rows = paths.q[:, :-1].flatten(0, 1), paths.p.flatten(0, 1)
    first, second = (
        aim(seen.verifier, policy, *rows, path).reshape(law.emitted.shape) for policy in policies
    )
    expected = torch.where(turns[..., None] == 0, first, second)
    about = "draft of this tree, policies in turn: probability at row {0} of token {1}"
    yield Bounds(law.emitted, expected, expected, about, EXACT, rows=paths.tree)


def _whole_drafts(paths: Paths, policies: tuple[Policy, Policy], choice: Tensor) -> Bounds:
    seen = paths.seen
    source = torch.Generator().manual_seed(seen.seed + 3)
    coins = torch.rand(len(paths.ids), paths.coins + 1, generator=source, dtype=torch.float64)
    draft = Draft(paths.ids, [paths.length] * len(paths.ids), paths.p)
    mixed, first, second = (
        seen.verifier.verify(assigned, paths.q, draft, coins[:, :-1], coins[:, -1]).output_token_ids
        for assigned in (
            Assignment(policies, choice.expand(paths.ids.shape)),
            *(Assignment((policy,)) for policy in policies),
        )
    )
    expected = torch.where(choice == 0, first, second)
    about = "draft of this tree, a policy for each draft: token at place {0}"
    return Bounds(mixed, expected, expected, about, 0.0, rows=paths.tree)


@verifier_property(hint="coins that are not uniform, or used twice")
def frequencies_follow_the_stated_law(seen: Enumeration) -> Iterator[Bounds]:
    """Counts and tokens drawn with a generator occur together as often as the law states.

    χ² over 2,000 seeded draws on the least certain draft of three trees; a correct verifier
    fails with probability 1e-6 on each.
    """
    paths = some_paths(seen)
    for number in DRAWN:
        if number in seen.trees.numbers and paths.coins == paths.length:
            of_tree = (paths.tree == seen.trees.numbers.index(number)).nonzero()[:, 0]
            joint = paths.stop[of_tree][..., None] * paths.last[of_tree]
            least = of_tree[joint.square().sum((-1, -2)).argmin()][None]
            chance = _chance_of_frequencies(paths.part(least))
            about = paths.part(least).about(lambda i: "chance of frequencies at least as odd")
            yield Bounds(chance[None], FALSE_ALARM, None, about, 0.0, rows=paths.tree[least])


def _chance_of_frequencies(path: Paths) -> Tensor:
    generator = torch.Generator().manual_seed(path.seen.seed)
    q, p, ids = (part.expand(DRAWS, *part.shape[1:]) for part in (path.q, path.p, path.ids))
    seen = path.seen
    verdict = verify_tensors(seen.verifier, seen.policy, q, p, ids, generator, None, False)
    vocab = path.q.shape[-1]
    expected = (path.stop[..., None] * path.last).flatten() * DRAWS
    counts = (verdict.num_accepted * vocab + verdict.last).bincount(minlength=len(expected))
    return chance_of_counts(counts, expected)
