"""What is said of a round with its coins integrated out is what the verifiers do with them."""

import itertools

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import load_pair
from cactus_theory.decoding.drafters.siblings import with_siblings
from cactus_theory.verify import Assignment, Draft, find_verifier
from simulations.common.inputs import PAIR
from simulations.trees import command, ideas, rounds
from tests.amounts import amount, thorough

# sums of a few float64 terms; of the root of a row; of float32 passes with and without a cache
EXACT, ROOT, PASSES = 1e-12, 1e-9, 1e-4
SPECS = ["speculative", "band:price=1", "soft_band:price=0.7"]


def paths(seed, width=3, vocab=5):
    """Return a round: rows that depend on depth alone, tokens drawn from them."""
    rng = np.random.default_rng(seed)
    q, p = (torch.from_numpy(rng.dirichlet(np.ones(vocab), width + more)) for more in (1, 0))
    ids = [int(rng.choice(vocab, p=row.numpy())) for row in p]
    return rounds.Round(q, p, ids)


def soft(path, rule):
    none = np.zeros(0, dtype=int)
    return lambda place, alive: torch.from_numpy(
        ideas.counting(path.q[place].numpy(), path.p[place].numpy(), alive, rule.price, none)
    )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chain", [False, True])
def test_the_course_of_a_path_is_the_verifiers_law(spec, chain):
    rule = ct.policy(spec)
    if chain and rule.needs_path:
        return
    for seed in range(amount(6, 60)):
        path = paths(seed)
        row = soft(path, rule) if rule.needs_path else rounds.alone(path, rule)
        course = rounds.followed(path, row, chain)
        judge = find_verifier("chain" if chain else "block")
        draft = Draft(torch.tensor([path.ids]), [3], path.p[None])
        law = judge.law(Assignment((rule,)), path.q[None], draft)
        np.testing.assert_allclose(course.alive, law.alive[0], rtol=0, atol=ROOT)
        # the last token's replacement is averaged over nothing but that token
        mean = torch.zeros(5, dtype=torch.float64)
        for token, chance in enumerate(path.p[2].tolist()):
            other = Draft(torch.tensor([[*path.ids[:2], token]]), [3], path.p[None])
            one = judge.law(Assignment((rule,)), path.q[None], other)
            mean += chance * one.stop[0, 2] * one.last[0, 2]
        np.testing.assert_allclose(course.replaced[2], mean, rtol=0, atol=ROOT)


@pytest.mark.parametrize("certain", [False, True])
def test_the_walk_emits_as_many_tokens(certain):
    """Tokens and catches on average over drafts and coins, within four standard errors."""
    rule, m, count = ct.policy("band:price=1"), 2, amount(1500, 6000)
    path = paths(8, width=2)  # a fifth of its rounds catch
    fixed = path.p.topk(m)[1]
    expected = np.zeros(2)
    for ids in itertools.product(range(5), repeat=2):
        one = rounds.Round(path.q, path.p, list(ids))
        row = rounds.alone(one, rule, fixed.tolist() if certain else None)
        course = rounds.followed(one, row)
        caught = course.sums(course.caught(fixed))[0, -1]
        chance = float(path.p[0, ids[0]] * path.p[1, ids[1]])
        expected += chance * np.array([caught, caught - course.sums()[0, -1]])
    source = torch.Generator().manual_seed(0)
    ids = torch.multinomial(path.p, count, replacement=True, generator=source).T.contiguous()
    trunk = Draft(ids, [2] * count, path.p.expand(count, -1, -1))
    tree = with_siblings(trunk, [fixed.tolist()] * count, m, certain)
    depth = torch.cat([torch.zeros(count, 1).long(), trunk_depths(tree)], 1)
    rows = path.q[depth]
    accept, draw = (
        torch.rand(count, size, dtype=torch.float64, generator=source)
        for size in (tree.token_ids.shape[1], 3)
    )
    verdict = find_verifier("tree").verify(Assignment((rule,)), rows, tree, accept, draw)
    assert verdict.path is not None
    caught = (verdict.path >= 2).any(1)  # beside the path of two tokens
    counts = np.array(
        [[len(new), bool(path)] for new, path in zip(verdict.rows(), caught, strict=True)]
    )
    errors = counts.std(0) / np.sqrt(count)
    assert (np.abs(counts.mean(0) - expected) < 4 * errors).all()


def trunk_depths(tree):
    """Return how many drafted tokens each node has up to itself."""
    depths = torch.zeros_like(tree.token_ids)
    for place in range(depths.shape[1]):
        above = tree.parents[:, place]
        before = depths.gather(1, above.clamp(min=0)[:, None])[:, 0]
        depths[:, place] = torch.where(above < 0, 0, before) + 1
    return depths


def test_sums_of_short_paths_are_the_beginnings_of_long_ones():
    path = paths(5)
    long = command.sums(path, ct.policy("band:price=1"), [2, 1])
    begun = rounds.Round(path.q[:3], path.p[:2], path.ids[:2])
    short = command.sums(begun, ct.policy("band:price=1"), [2, 1])
    for key in [("chain", 0), ("block", 0), ("tree", 2), ("tree", 1), (command.CERTAIN, 2)]:
        np.testing.assert_allclose(long[key][:, :3], short[key], rtol=0, atol=EXACT)


def test_sums_are_by_text_and_between_two_lengths_a_coins():
    sums = rounds.Sums(2)
    sums.cycles[:] = 2, 1
    for text, tokens in ((0, 1.0), (0, 3.0), (1, 5.0)):
        sums.add(text, ("block", "speculative"), [[1, tokens, 9], [0, 0.5, 4]])
    replay = sums.replay("block", "speculative", 1.25)
    np.testing.assert_allclose(replay.tokens, [0.75 * 4 + 0.25 * 18, 0.75 * 5 + 0.25 * 9])
    assert replay.num_draft_tokens == 1 and replay.cycles.tolist() == [2, 1]
    nats, tokens = sums.at(["speculative"], None, "block", 1)
    assert tokens is not None and tokens.value == 3 and nats == pytest.approx(1.5 / 9)
    assert sums.at(["band:price=1"], None, "block", 1)[1] is None  # no such policy
    assert sums.at(["speculative"], 9.0, "block", 1) == (9.0, None)  # nor a level


def test_the_row_that_counts_catches_is_the_best_one():
    """Against rows around it: kept tokens, one more for each that is caught, less the nats."""
    price, fixed = 1.3, np.array([0, 3])
    for seed in range(amount(5, 50)):
        rng = np.random.default_rng(seed)
        q, p = rng.dirichlet(np.ones(6), 2)
        alive = rng.uniform(0.3, 1)

        def yields(h, q=q, p=p, alive=alive):
            kept = np.minimum(p, alive * h).sum()
            caught = np.maximum(alive * h - p, 0)[fixed].sum()
            return kept + caught - price * alive * (h * np.log(h / q)).sum()

        best = ideas.counting(q, p, alive, price, fixed)
        assert best.sum() == pytest.approx(1)
        for _ in range(50):
            near = best * np.exp(rng.normal(scale=0.02, size=6))
            assert yields(near / near.sum()) <= yields(best) + EXACT


def test_placements_take_as_many_nodes_and_no_more_than_can_be_caught():
    """Two texts: what is caught is at the second place of the first, and is found from q alone."""
    shape = 2, 2, ideas.CANDIDATES
    caught, chances = np.zeros(shape), np.full(shape, 0.01)
    caught[:, 1, 7] = 0.5
    cells = {"speculative": [(caught[i], chances[i], np.full(2, 0.5), np.ones(3)) for i in (0, 1)]}
    totals = {(ideas.PLAIN, "speculative"): np.array([[2.0, 2], [0, 0], [9, 9]])}
    needed = ideas._placed(cells, np.array([0, 1]), totals)
    for name in ("placed by depth and rank", "placed by known q"):
        tokens, _, nodes = totals[name, "speculative"]
        assert tokens.tolist() == [2.5, 2.5] and nodes.tolist() == [9, 9]
    assert needed["placed by known q"].value <= 1 / (2 * ideas.CONTINUED)


@thorough
def test_runs_below_siblings_have_the_models_own_rows():
    pair = load_pair(PAIR / "target", PAIR / "draft")
    prompt = torch.tensor([pair.tokenizer("def f(")["input_ids"]])
    whole, paths = rounds.logged(pair, prompt, 3, 12, temperature=1.0, seed=1)
    assert len(paths) > 1
    below = ideas.below(pair, whole, paths, 0.6, 0)
    path, runs = paths[1], below[1]
    sibling = int(path.p[2].topk(2)[1][1])
    run = runs[2][1]
    text = torch.cat([whole[0, : path.before], torch.tensor([*path.ids[:2], sibling, *run.ids])])
    with torch.inference_mode():
        for model, rows in ((pair.target, run.q), (pair.draft, run.p)):
            logits = model(input_ids=text[None]).logits[0, -1 - len(run.ids) :]
            expected = (logits.double() / 0.6).softmax(-1)[: len(rows)]
            assert (expected - rows).abs().max() < PASSES
