"""The walk down a tree, enumerated over drafts and coins, and its edges."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies.policy import PathState
from cactus_theory.verify import Assignment, Draft, Tree
from cactus_theory.verify.walk import Path
from tests.amounts import amount, some
from tests.verify.blocks import one, random_case

# sums of some thousand float64 terms
EXACT = 1e-12
# a box thinner than this lies between two roundings of one border
THIN = 1e-15
# how near to a border of its box a coin is put, in parts of the box
BESIDE = 1e-6
VOCAB = 3
SHAPES = ((1, 1, 1), (2, 1), (2, 2), (3, 2))
CHILDREN = ("deterministic", "sampled", "off", "mixed")
SPECS = ("speculative", "band:price=1", "band:price=2,per_row=True", "cactus:delta=0.1",
         "lenience:lenience=0.5")  # fmt: skip


@cache
def row_of(seed, text, vocab=VOCAB):
    source = np.random.default_rng([seed, len(text), *text])
    return source.dirichlet(np.full(vocab, 0.8))


@dataclass(frozen=True)
class Plan:
    """Which trees are drafted: how many children by depth, and of which kind."""

    shape: tuple
    children: str
    seed: int = 0
    late: str = ""  # a sibling chosen after the draw: declared "late", or falsely "deterministic"

    def target(self, text):
        return row_of(self.seed, text)

    def node(self, text):
        """Return the deterministic tokens after a text, and the row of the sampled one, or None."""
        if len(text) >= len(self.shape):
            return [], None
        width = self.shape[len(text)]
        kind = self.children
        if kind == "mixed":
            kind = ("off", "deterministic", "sampled")[(sum(text) + len(text)) % 3]
        row = row_of(self.seed + 1000, text)
        deterministic = width if kind == "deterministic" else width - 1
        fixed = [] if self.late else np.argsort(-row, kind="stable")[:deterministic].tolist()
        if kind == "deterministic":
            return fixed, None
        if kind == "off":
            row = row.copy()
            row[fixed] = 0.0
            row = row / row.sum()
        return fixed, row

    def trees(self):
        """Yield (nodes, probability): nodes are (parent, token, sampled, deterministic)."""
        yield from self._grown([(None, None, False, False)], 0, 1.0)

    def _grown(self, nodes, at, mass):
        if at == len(nodes):
            yield nodes[1:], mass
            return
        fixed, row = self.node(text_of(nodes, at))
        own = [(at, token, False, True) for token in fixed]
        if row is None:
            yield from self._grown(nodes + own, at + 1, mass)
            return
        for token in np.flatnonzero(row):
            drawn = [(p, t, t == token, c) for p, t, _, c in own]
            if token not in fixed:
                drawn = [*own, (at, int(token), True, False)]
            if self.late:  # the likeliest other token, known once the first one is
                other = max(set(range(VOCAB)) - {int(token)}, key=lambda n: row[n])
                drawn.append((at, other, False, self.late == "deterministic"))
            yield from self._grown(nodes + drawn, at + 1, mass * row[token])


def text_of(nodes, at):
    text = []
    while at:
        parent, token, *_ = nodes[at]
        text, at = [token, *text], parent
    return tuple(text)


@dataclass(frozen=True)
class Step:
    """A node, its alive ratio, rows q, r (0 without a sampled child) and h, and (P h − r)₊."""

    node: int
    alive: float
    q: np.ndarray
    r: np.ndarray
    h: np.ndarray
    fixed: list
    left: np.ndarray


class Walks:
    """All outcomes of a drafted tree: boxes of coins, what is emitted there, and h by node."""

    def __init__(self, plan, nodes, policy):
        self.plan, self.nodes, self.policy = plan, [(None,) * 4, *nodes], policy
        self.children = [
            [n for n in range(1, len(self.nodes)) if self.nodes[n][0] == at]
            for at in range(len(self.nodes))
        ]

    def sampled(self, at):
        return next((n for n in self.children[at] if self.nodes[n][2]), None)

    def step(self, at, alive):
        """Return what a node has to judge by."""
        text = text_of(self.nodes, at)
        q, r = self.plan.target(text), np.zeros(VOCAB)
        fixed = [self.nodes[n][1] for n in self.children[at] if self.nodes[n][3]]
        if self.sampled(at) is not None:
            r = self.plan.node(text)[1]
        h = q
        if fixed or r.any():
            kind = "deterministic+sampled" if r.any() else "deterministic"
            law = ct.selection_law(q, r if r.any() else None, 1, kind, fixed) if fixed else r
            path = PathState(torch.tensor([alive], dtype=torch.float64))
            rows = (torch.tensor(row)[None] for row in (q, law))
            h = self.policy.target(*rows, path)[0].numpy()
        return Step(at, alive, q, r, h, fixed, np.maximum(alive * h - r, 0.0))

    def boxes(self, at=0, drawn=0):
        """Yield (box, emitted tokens, visited): a box is {coin: (low, high)}."""
        for box, path, law in self._judged(at):
            end = path[-1][0]
            tokens = [self.nodes[n][1] for n, _ in path[1:]]
            edges = np.concatenate([[0.0], np.cumsum(law / law.sum())])
            for token in np.flatnonzero(law):
                own = box | {("draw", drawn): (edges[token], edges[token + 1])}
                caught = [n for n in self.children[end] if self.nodes[n][1] == token]
                if not caught:
                    yield own, [*tokens, token], path
                    continue
                for more, after, later in self.boxes(caught[0], drawn + 1):
                    yield own | more, [*tokens, token, *after], path + later

    def _judged(self, at):
        """Yield (box, [(node, h), …], the law of the token after them)."""
        steps, following = [self.step(at, 1.0)], self.sampled(at)
        values = [1.0]  # what the coin of each token on the run is compared with
        while following is not None:
            token, alive = self.nodes[following][1], steps[-1].alive
            ratio = min(1.0, alive * steps[-1].h[token] / steps[-1].r[token])
            steps.append(self.step(following, ratio))
            lost = 1 - steps[-1].alive
            left = steps[-1].left.sum()
            values.append(left / (left + lost) if lost else ratio)
            following = self.sampled(following)
        for number, step in enumerate(steps):
            box = {}
            for place, value in enumerate(values[1:], 1):
                coin = "accept", steps[place].node - 1
                if place > number:
                    box[coin] = (value, 1.0)
                elif place == number:
                    box[coin] = (0.0, value)
            if any(high - low <= THIN for low, high in box.values()):
                continue
            law = step.left if step.left.sum() > 0 else step.q
            yield box, [(own.node, own.h) for own in steps[: number + 1]], law


def outcomes(plan, policy):
    """Yield (nodes, boxes with probabilities) of every tree."""
    for nodes, mass in plan.trees():
        walks = Walks(plan, nodes, policy)
        found = []
        for box, emitted, visited in walks.boxes():
            size = math.prod(high - low for low, high in box.values())
            if size > THIN:
                found.append((box, emitted, visited, mass * size))
        yield walks, found


def draft_of(walks, count):
    """Return a tree as a draft of so many equal rows, and its target rows."""
    nodes, plan = walks.nodes, walks.plan
    ids, parents = ([[n[k] for n in nodes[1:]]] * count for k in (1, 0))
    flags = [torch.tensor([[bool(n[k]) for n in nodes[1:]]] * count) for k in (2, 3)]
    texts = [text_of(nodes, at) for at in range(len(nodes))]
    q = torch.tensor(np.array([plan.target(text) for text in texts])).expand(count, -1, -1)
    p = np.full((len(nodes) - 1, VOCAB), np.nan)  # no law where nothing was sampled
    for at in range(len(nodes) - 1):
        if walks.sampled(at) is not None:
            p[at] = plan.node(texts[at])[1]
    draft = Draft(
        torch.tensor(ids),
        [len(nodes) - 1] * count,
        torch.tensor(p).expand(count, -1, -1),
        torch.tensor(parents) - 1,
        *flags,
    )
    return q, draft


def charged(verdict, q, row):
    """Return the numbers of a row's nodes that are charged, by the rows that they look at."""
    rows = {q[row, node].data_ptr(): node for node in range(q.shape[1])}
    nodes = [node for node in verdict.nodes(row) if node.drafted]
    return [rows[torch.from_numpy(node.q).data_ptr()] for node in nodes]


def check_boxes(walks, found, policy, source):
    """Hold the verifier to every box of a tree, at a point of it, near its borders too."""
    q, draft = draft_of(walks, len(found))
    accept = torch.rand(len(found), len(walks.nodes) - 1, generator=source, dtype=torch.float64)
    draw = torch.rand(len(found), len(walks.plan.shape) + 1, generator=source, dtype=torch.float64)
    for number, (box, *_) in enumerate(found):
        for (kind, place), (low, high) in box.items():
            share = (BESIDE, 0.5, 1 - BESIDE)[int(torch.randint(3, (1,), generator=source))]
            (accept if kind == "accept" else draw)[number, place] = low + share * (high - low)
    verdict = Tree().verify(Assignment((policy,)), q, draft, accept, draw)
    for row, (own, (_, emitted, visited, _)) in enumerate(zip(verdict.rows(), found, strict=True)):
        assert own == [int(token) for token in emitted]
        expected = [node for node, _ in visited if walks.children[node]]
        assert charged(verdict, q, row) == expected


def law_error(plan, policy):
    """Return how far the token after any node that is reached is from h there, in probability."""
    source = torch.Generator().manual_seed(0)
    following, expected, total = {}, {}, 0.0
    for walks, found in outcomes(plan, policy):
        check_boxes(walks, found, policy, source)
        for _, emitted, visited, mass in found:
            total += mass
            for (node, h), token in zip(visited, emitted, strict=True):
                text = text_of(walks.nodes, node)
                assert text == tuple(emitted[: len(text)])
                following.setdefault(text, np.zeros(VOCAB))[token] += mass
                expected[text] = expected.get(text, 0.0) + mass * h
    assert total == pytest.approx(1, abs=EXACT)
    return max(np.abs(following[text] - expected[text]).max() for text in following)


CASES = list(itertools.product(SHAPES, CHILDREN, SPECS))


@pytest.mark.parametrize("shape, children, spec", some(CASES, 7))
def test_the_next_token_has_the_law_h_at_every_node(shape, children, spec):
    assert law_error(Plan(shape, children, seed=len(spec)), ct.policy(spec)) <= EXACT


BANDS = (
    "price=0.7", "price=0.7,per_row=True", "price=0.5,divergence=pearson_chi2",
    "price=0.5,divergence=reverse_kl,per_row=True", "delta=0.05",
    "delta=0.05,divergence=renyi:a=2",
)  # fmt: skip
BOXES = ("head=0.6", "floor=0", "hold=1", "head=0.6,floor=2,hold=0", "floor=0+1+2")
BOXED = list(itertools.product(SHAPES, CHILDREN, BANDS, BOXES))


@pytest.mark.parametrize("shape, children, band, boxes", some(BOXED, 6))
def test_boxed_rows_have_the_law_h_in_trees_of_every_kind(shape, children, band, boxes):
    policy = ct.policy(f"band:{band},{boxes}")
    assert law_error(Plan(shape, children, seed=len(boxes)), policy) <= EXACT


def test_a_law_may_depend_on_how_a_node_was_reached():
    """The band sees the alive ratio."""
    band = ct.policy("band:price=1,divergence=reverse_kl")
    for children in some(CHILDREN, 2):
        assert law_error(Plan((2, 1), children, 3), band) <= EXACT


def test_tokens_chosen_after_the_draw_change_no_law():
    """Declared deterministic, a sibling that leaves the drawn token out shifts what is emitted."""
    policy = ct.policy("band:price=1")
    assert law_error(Plan((2, 2), "sampled", 2, late="late"), policy) <= EXACT
    false = Plan((2, 2), "sampled", 2, late="deterministic")
    apart = {}
    for _, found in outcomes(false, policy):
        for _, emitted, _, mass in found:
            apart[emitted[0]] = apart.get(emitted[0], 0.0) + mass
    fixed, row = replace(false, late="").node(())
    h = policy.target(torch.tensor(false.target(())), torch.tensor(row)).numpy()
    assert max(abs(apart[token] - h[token]) for token in apart) > 1e-3


def lines(case):
    """Return the drafts of a case as trees that happen to be chains."""
    ids = case.draft.token_ids
    line = torch.arange(-1, ids.shape[1] - 1).expand_as(ids)
    return replace(case.draft, parents=line, sampled=torch.ones_like(ids, dtype=torch.bool))


@pytest.mark.parametrize("vocab", some([3, 40], 1))
@pytest.mark.parametrize("spec", [*SPECS, "band:delta=0.05", "mixture:alpha=0.3"])
def test_without_deterministic_children_it_is_the_block(vocab, spec):
    assigned = one(spec)
    for seed in range(amount(2, 10)):
        case = random_case(vocab, seed)
        plain = case.verify(assigned)
        for draft in (lines(case), case.draft):  # as any tree, and as the chain that it is
            found = Tree().verify(assigned, case.q, draft, case.accept, case.draw)
            assert found.output_token_ids.equal(plain.output_token_ids)
            for row, count in enumerate(case.draft.lengths):
                nodes = list(range(count))[: int(plain.num_accepted[row]) + 1]
                assert charged(found, case.q, row) == nodes


def door(case, draft, coins=None, **options):
    ids = torch.where(
        torch.arange(draft.token_ids.shape[1]) < torch.tensor(draft.counts)[:, None],
        draft.token_ids,
        -1,
    )
    options = {"sampled": draft.sampled, "deterministic": draft.deterministic} | options
    shared = ct.policy("band:price=1"), case.q, draft.probs, ids, draft.parents
    return ct.verify_tree(*shared, coins=coins, **options)


def random_tree(seed, vocab=12, batch=4, width=9):
    """Return ragged trees with every kind of children, and their rows."""
    source = np.random.default_rng(seed)
    case = random_case(vocab, seed, counts=[width - number % 3 for number in range(batch)])
    ids, parents = case.draft.token_ids.clone(), torch.full((batch, width), -1)
    sampled, deterministic = (torch.zeros(batch, width, dtype=torch.bool) for _ in range(2))
    for row in range(batch):
        taken = {}
        for place in range(width):
            parent = int(source.integers(-1, place))
            own = taken.setdefault(parent, {"ids": set(), "drawn": False})
            token = next(int(n) for n in source.permutation(vocab) if n not in own["ids"])
            own["ids"].add(token)
            parents[row, place], ids[row, place] = parent, token
            sampled[row, place] = not own["drawn"] and bool(source.random() < 0.6)
            own["drawn"] |= bool(sampled[row, place])
            deterministic[row, place] = bool(source.random() < 0.7)
    draft = replace(
        case.draft, token_ids=ids, parents=parents, sampled=sampled, deterministic=deterministic
    )
    return case, draft


def test_a_row_of_a_batch_is_as_alone():
    for seed in range(amount(5, 20)):
        case, draft = random_tree(seed)
        generators = [torch.Generator().manual_seed(row) for row in range(4)]
        both = door(case, draft, generator=generators)
        for row, count in enumerate(draft.counts):
            own = replace(
                draft,
                counts=[count],
                **{
                    name: getattr(draft, name)[row : row + 1, :count]
                    for name in ("token_ids", "probs", "parents", "sampled", "deterministic")
                },
            )
            alone = replace(case, q=case.q[row : row + 1, : count + 1])
            source = torch.Generator().manual_seed(row)
            found = door(alone, own, generator=source if row % 2 else [source])
            if row % 2 == 0:
                assert found.rows()[0] == both.rows()[row]
                assert torch.rand(1, generator=source) == torch.rand(1, generator=generators[row])
            text = both.path[row, : int(both.num_accepted[row])].tolist()
            assert draft.parents[row, text].tolist() == [-1, *text][: len(text)]


def test_only_rows_of_runs_that_are_walked_are_read():
    case, draft = random_tree(3)
    accept, draw = torch.rand(4, 9).double(), torch.rand(4, 10).double()
    plain = Tree().verify(one("band:price=1"), case.q, draft, accept, draw)
    q, p = torch.full_like(case.q, math.nan), torch.full_like(draft.probs, math.nan)
    for row in range(len(q)):
        nodes = charged(plain, case.q, row)
        reached = {*nodes, *(int(place) + 1 for place in plain.path[row] if place >= 0)}
        for place, above in enumerate(draft.above[row]):  # sampled tokens below are of the run
            if above in reached and draft.sampled[row, place]:
                reached.add(place + 1)
        assert len(reached) < draft.lengths[row] + 1
        q[row, list(reached)] = case.q[row, list(reached)]
        inner = [node for node in reached if node < 9]
        p[row, inner] = draft.probs[row, inner]
    found = Tree().verify(one("band:price=1"), q, replace(draft, probs=p), accept, draw)
    assert found.output_token_ids.equal(plain.output_token_ids)


def test_only_rows_that_were_sampled_from_must_be_laws():
    case, draft = random_tree(3)
    coins = torch.rand(4, 9).double(), torch.rand(4, max(map(max, draft.depths)) + 1).double()
    p, read = torch.full_like(draft.probs, math.nan), []
    for row, count in enumerate(draft.counts):
        read += [(row, draft.above[row][n]) for n in range(count) if draft.sampled[row, n]]
    for at in read:
        p[at] = draft.probs[at]
    found = door(case, replace(draft, probs=p), coins)
    assert found.output_token_ids.equal(door(case, draft, coins).output_token_ids)
    p[read[-1]] = math.nan
    with pytest.raises(ValueError, match="draft_probs"):
        door(case, replace(draft, probs=p), coins)


def test_tokens_that_the_target_excludes_are_never_emitted():
    for seed in range(amount(3, 40)):
        case, draft = random_tree(seed, vocab=6)
        case.q[..., ::2] = 0
        case.q[..., 1] += 1e-3
        q = case.q / case.q.sum(-1, keepdim=True)
        for share in (0.0, 1 - 2.0**-53):
            coins = torch.full((4, 9), share).double(), torch.full((4, 10), share).double()
            found = Tree().verify(one("band:price=0.3"), q, draft, *coins)
            emitted = [token for own in found.rows() for token in own]
            assert all(token % 2 for token in emitted)


@pytest.mark.parametrize("price", [0.7, 2.0])
def test_a_token_both_sampled_and_deterministic_may_exceed_the_bounds_of_a_sampled_token(price):
    """A band per row is solved at P = 1, where entries say h_n ≤ max(p_n, q_n) without siblings."""
    band = ct.policy(f"band:price={price},per_row=True")
    q = torch.tensor([[[0.5, 0.5, 0, 0], [0.3, 0.3, 0.2, 0.2], [0.25] * 4]], dtype=torch.float64)
    p = torch.tensor([[[1.0, 0, 0, 0], [0.32, 0.68, 0, 0]]], dtype=torch.float64)
    offered = ct.selection_law(q[0, 1], p[0, 1], kind="deterministic+sampled", deterministic=[0])
    first = float(band.target(q[0, 0], p[0, 0])[0])  # P of the node after the first token
    both = first * float(band.target(q[0, 1], offered)[0]) / 0.32
    assert first < 0.99 and both > 1.05 * first
    coins = torch.tensor([[0.999, (first + min(both, 1)) / 2]]), torch.zeros(1, 3)
    flags = {
        "sampled": torch.tensor([[True, True]]),
        "deterministic": torch.tensor([[False, True]]),
    }
    tree = torch.tensor([[0, 0]]), torch.tensor([[-1, 0]])
    assert int(ct.verify_tree(band, q, p, *tree, coins=coins, **flags).num_accepted) == 2


def test_a_large_vocabulary_in_every_precision():
    vocab = 151_936
    source = torch.Generator().manual_seed(0)
    q = (3 * torch.randn(1, 6, vocab, generator=source)).softmax(-1)
    p = (q[:, :5].log() / 2 + torch.randn(1, 5, vocab, generator=source)).softmax(-1)
    parents = torch.tensor([[-1, -1, -1, 0, 0]])
    top = q[0].topk(3, -1).indices
    ids = torch.tensor([[int(p[0, 0].argmax()), *top[0, 1:].tolist(), *top[1, :2].tolist()]])
    flags = {"sampled": torch.tensor([[True, False, False, False, False]])}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rows = q.to(dtype), p.to(dtype)
        exact = [row.double() / row.double().sum(-1, keepdim=True) for row in rows]
        coins = torch.rand(1, 5, generator=source), torch.rand(1, 3, generator=source)
        found = ct.verify_tree(
            ct.policy("band:price=1"), *rows, ids, parents, coins=coins, validate=False, **flags
        )
        other = ct.verify_tree(
            ct.policy("band:price=1"), *exact, ids, parents, coins=coins, **flags
        )
        assert found.output_token_ids.equal(other.output_token_ids)


def test_bad_trees_are_named():
    case, draft = random_tree(1)
    ids = draft.token_ids
    flags = torch.zeros(4, 9, dtype=torch.bool)
    bad = {
        "parents: each must be −1 or an earlier token": {"parents": draft.parents + 9},
        "draft_token_ids: siblings must be different tokens; got tokens 0 and 1 of row 0": {
            "token_ids": ids * 0,
            "parents": ids * 0 - 1,
        },
        "sampled: at most one token may be sampled after a node": {
            "sampled": ~flags,
            "parents": ids * 0 - 1,
            "token_ids": torch.arange(9).expand(4, 9),
        },
        "draft_probs: sampled tokens need the rows": {"probs": None},
    }
    for message, change in bad.items():
        with pytest.raises(ValueError, match=message):
            door(case, replace(draft, **change))
    with pytest.raises(ValueError, match="sampled: shape must be"):
        door(case, draft, sampled=flags[:2])
    with pytest.raises(
        TypeError, match="deterministic: must be a tensor of torch.bool; got torch.int64"
    ):
        door(case, draft, deterministic=ids)
    with pytest.raises(ValueError, match=r"coins: draw must have shape \(4, "):
        door(case, draft, coins=(torch.zeros(4, 9), torch.zeros(4)))
    with pytest.raises(ValueError, match="must declare which tokens were sampled"):
        Tree().verify(
            one("speculative"), case.q, replace(draft, sampled=None), case.accept, case.draw
        )
    with pytest.raises(ValueError, match="needs a policy with a row of its own"):
        Tree().check(ct.policy("typical"))
    with pytest.raises(NotImplementedError, match="tree has no enumerated law"):
        Tree().law(one("speculative"), case.q, draft)


def test_a_path_that_is_sure_to_get_there_may_end_there_whatever_rounding_does():
    """R/(R + 1 − P) is below 1 at P = 1 if 1 is added first; what is below x is biased then."""
    coin = 1 - 2.0**-53
    path = Path(0, [0, 1, 2], 0.5, [0, 0], [coin, coin])
    path.alive = [1.0, 1.0]
    generator = torch.Generator().manual_seed(0)
    masses = torch.rand(1000, generator=generator, dtype=torch.float64).tolist()
    assert any(coin >= mass / (mass + 1 - 1.0) for mass in masses)  # what would go wrong
    assert path.ends_at(1)


def test_a_refused_token_does_not_come_back_by_rounding():
    case, draft = random_tree(2, batch=4)
    last = torch.full((4, 9), 1 - 2.0**-53, dtype=torch.float64)
    for seed in range(60):
        draw = torch.rand(4, 10, generator=torch.Generator().manual_seed(seed)).double()
        found = Tree().verify(one("band:price=1"), case.q, draft, last, draw)
        for row in range(4):
            taken = [place for place in found.path[row].tolist() if place >= 0]
            end = taken[-1] + 1 if taken else 0
            below = [place for place, above in enumerate(draft.above[row]) if above == end]
            drawn = [place for place in below if draft.sampled[row, place]]
            assert int(found.last[row]) not in [int(draft.token_ids[row, place]) for place in drawn]


def test_a_refused_token_that_rounding_brings_back_ends_the_walk():
    """Refused by the last bit, it leaves no residual and is drawn from q: it is not accepted."""
    last_coin, ulp = 1 - 2.0**-53, 2.0**-53
    q = torch.full((1, 3, 2), 0.5).double()
    p = torch.tensor([[[0.5 + ulp, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    assert last_coin >= 0.5 / float(p[0, 0, 0])  # refused, and (q - p)+ is 0 everywhere
    ids, parents = torch.tensor([[0, 1]]), torch.tensor([[-1, 0]])
    options = {"sampled": torch.tensor([[True, False]]), "validate": False}
    coins = torch.full((1, 2), last_coin, dtype=torch.float64), torch.zeros(1, 3).double()
    rule = ct.policy("speculative")
    found = ct.verify_tree(rule, q, p, ids, parents, coins=coins, **options)
    assert found.output_token_ids.tolist() == [[0, -1, -1]] and found.num_accepted.tolist() == [0]


@pytest.mark.parametrize("spec", ["band:price=1", "speculative"])
def test_a_token_that_its_row_rounds_to_0_passes_beside_a_deterministic_one(spec):
    """Rows of half precision may have lost the drafted token; the law h has it still."""
    q = torch.tensor([[[0.2, 0.3, 0.5]] * 3], dtype=torch.float64)
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2], dtype=torch.float64)
    ids, parents = torch.tensor([[2, 0]]), torch.tensor([[-1, -1]])
    flags = {
        "sampled": torch.tensor([[True, False]]),
        "deterministic": torch.tensor([[False, True]]),
    }
    coins = torch.full((1, 2), 0.5, dtype=torch.float64), torch.zeros(1).double()
    rule = ct.policy(spec)
    found = ct.verify_tree(rule, q, p, ids, parents, coins=coins, validate=False, **flags)
    assert found.output_token_ids[0, 0] == 2 and found.num_accepted.tolist() == [1]
