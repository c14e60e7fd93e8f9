"""Drafted trees in traces: what is written is what is read, and a replay is the walks' mean."""

import itertools
import json

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ByPosition, ModelDrafter, generate
from cactus_theory.decoding.drafters import NGram, Siblings
from cactus_theory.traces import Cycle, Trace, expect, log_trace, replay, save_trace
from cactus_theory.traces._folder import MANIFEST
from cactus_theory.tuning import Costs, tune
from cactus_theory.verify import Draft, Tree
from tests.amounts import THOROUGH, some
from tests.verify.test_tree import VOCAB, Plan, draft_of, outcomes

# float32 log-probabilities above −8 keep a row to 2⁻²²; sums of some ten such numbers
STORED = 1e-5
SHAPES = ((1, 1, 1), (2, 1), (2, 2))
CHILDREN = ("deterministic", "sampled", "off", "mixed", "late")
SPECS = ("speculative", "band:price=1", "cactus:delta=0.1", "band:price=1,per_row=True")
END = 2
# the Gibbs law of deterministic trees has its own test
CASES = [
    (*case, (END,) if case[2].startswith("cactus") else ())
    for case in itertools.product(SHAPES, CHILDREN, SPECS, ("block", "chain"))
    if case[1:4] != ("deterministic", "band:price=1", "block")
]
LIGHT = [case for case in CASES if case[0] != (2, 2) and case[1] != "late"]  # few walks


def saved(folder, walks, ends=()):
    """Return a trace whose texts are the given trees, each once."""
    drafts = [draft_of(own, 1) for own in walks]
    depth = len(walks[0].plan.shape)
    most = max(draft.lengths[0] for _, draft in drafts)
    cycles = [[Cycle.of(0, 0, *own)] for own in drafts]
    sizes = {"vocab_size": VOCAB, "num_draft_tokens": depth, "nodes": most}
    return save_trace(folder, cycles, **sizes, eos_token_ids=ends)


def enumerated(walks, found, ends):
    """Return tokens, accepted ones and KL of a tree, over all boxes of its coins."""
    sums, total = np.zeros(3), sum(mass for *_, mass in found)
    for _, emitted, visited, mass in found:
        stop = next((i for i, t in enumerate(emitted, 1) if t in ends), len(emitted))
        kl = 0.0
        for node, h in visited[:stop]:
            q = walks.step(node, 1.0).q
            if walks.children[node]:
                kl += float(np.sum(h * np.log(np.where(h > 0, h, 1.0) / q)))
        sums += mass * np.array([stop, min(len(emitted) - 1, stop), kl])
    return sums, total


@pytest.mark.parametrize(
    ("shape", "children", "spec", "runs", "ends"), CASES if THOROUGH else some(LIGHT, 9)
)
def test_a_replay_is_the_mean_of_all_walks(tmp_path, shape, children, spec, runs, ends):
    late = children == "late"  # a sibling that is not declared, as of Siblings
    kind = "sampled" if late else children
    plan, policy = Plan(shape, kind, late="late" if late else ""), ct.policy(spec)
    every = list(outcomes(plan, policy, runs))
    trace = saved(tmp_path / "t", [walks for walks, _ in every], ends)
    got = replay(trace, policy, Tree(runs))
    due, total = zip(*(enumerated(*own, ends) for own in every), strict=True)
    share = np.array(total)  # texts are trees, which are not drafted equally often
    mean = [float((own * share).sum()) for own in (got.tokens, got.accepted, got.spent["kl"])]
    assert mean == pytest.approx(np.sum(due, axis=0), abs=STORED)
    accepted = (got.accepted_at * share).sum()
    assert accepted == pytest.approx(mean[1], abs=STORED)


def test_the_residual_of_a_proposal_is_that_of_its_own_token(tmp_path):
    """With three tokens it is the same for all; a sibling chosen after the draw tells of more."""
    generator = torch.Generator().manual_seed(3)
    q, p = torch.rand(2, 6, generator=generator, dtype=torch.float64).pow(2).unbind()
    q, p, rule = q / q.sum(), p / p.sum(), ct.policy("cactus:delta=0.1")
    flags = torch.tensor([True, False]), torch.tensor([False, False])
    parents, due, texts = torch.tensor([-1, -1]), [], []
    for token in range(6):
        ids = torch.tensor([token, (token + 1) % 6])
        texts.append([Cycle(0, 0, ids, q.expand(3, -1), p[None], parents, *flags)])
        accepted = float(rule.acceptance(q, p, ids[:1]))
        due.append(1 + accepted + (1 - accepted) * float(rule.residual(q, p, ids[0])[ids[1]]))
    trace = save_trace(tmp_path / "t", texts, vocab_size=6, num_draft_tokens=1, nodes=2)
    assert replay(trace, rule, Tree("chain")).tokens == pytest.approx(due, abs=STORED)


@pytest.mark.parametrize("price", [0.5, 2.0])
def test_a_policy_that_looks_ahead_gives_the_value_of_its_law(tmp_path, price):
    """Accepted tokens less the price of their KL are ν ln z (THEORY.md, Theorem 14)."""
    plan, policy = Plan((3, 2), "deterministic"), ct.policy("band", price=price)
    walks = tree_walks(plan)
    got = replay(saved(tmp_path / "t", [walks]), policy, "tree")

    def z(at):
        own = [(walks.nodes[n][1], n) for n in walks.children[at]]
        q = walks.step(at, 1.0).q
        return 1 - sum(q[t] for t, _ in own) + sum(q[t] * np.exp(1 / price) * z(n) for t, n in own)

    value = got.accepted[0] - price * got.spent["kl"][0]
    assert value == pytest.approx(price * np.log(z(0)), abs=STORED)


def tree_walks(plan):
    """Return the only tree of a plan that samples nothing."""
    ((walks, _),) = outcomes(plan, ct.policy("speculative"), "chain")
    return walks


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_tree_comes_back(tmp_path, dtype):
    walks = [own for own, _ in outcomes(Plan((2, 2), "mixed"), ct.policy("speculative"), "chain")]
    drafts = [draft_of(own, 1) for own in walks]
    row = torch.full((2, VOCAB), 1 / VOCAB, dtype=torch.float64)
    chains = [Cycle(0, 0, torch.tensor([1]), row, own) for own in (row[:1], None)]
    # the node of the first sampled token comes after that of the second one
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.0, 0.0]], dtype=torch.float64)
    ids, parents = torch.tensor([[0, 1, 1]]), torch.tensor([[-1, 0, -1]])
    drawn = torch.tensor([[False, True, True]])
    tree = Draft(ids, [3], p[None], parents, drawn, ~drawn)
    drafts.append((row[0].expand(1, 4, -1), tree))
    written = [Cycle.of(0, n, *own) for n, own in enumerate(drafts)]
    written = [*written[:-1], *chains, written[-1]]
    drafts[-1:] = [*[None] * 2, drafts[-1]]
    sizes = {"vocab_size": VOCAB, "num_draft_tokens": 2, "nodes": 6, "dtype": dtype}
    read = list(save_trace(tmp_path / "t", [written], **sizes).cycles())
    rounding = {"float16": 2.0**-8, "float32": 2.0**-21}[dtype]  # see test_format
    for made, cycle in zip(drafts, read, strict=True):
        if made is None:
            continue
        (q, draft), again = made, cycle.draft()
        for name in ("token_ids", "parents", "sampled", "deterministic"):
            assert torch.equal(getattr(draft, name), getattr(again, name)), name
        torch.testing.assert_close(cycle.target_probs, q[0], rtol=rounding, atol=0)
        for place in draft.sampled[0].nonzero()[:, 0].tolist():
            node = draft.node(0, place)
            one, other = draft.probs[0, node], again.probs[0, node]
            torch.testing.assert_close(other, one, rtol=rounding, atol=0)
    for cycle, drawn in zip(read[-3:-1], (True, False), strict=True):  # paths, as trees
        assert cycle.parents.tolist() == [-1]
        assert cycle.sampled.tolist() == [drawn] and cycle.deterministic.tolist() == [not drawn]


@pytest.mark.parametrize("kind", some(["siblings", "deterministic", "ngram"], 1))
def test_a_decode_of_trees_is_logged_and_replayed(tiny, tmp_path, kind):
    target, draft = tiny
    drafter = {
        "siblings": Siblings(ModelDrafter(draft), m=2),
        "deterministic": Siblings(ModelDrafter(draft), m=2, deterministic=True),
        "ngram": Siblings(NGram(), m=2),
    }[kind]
    prompts, sizes = [[1, 5, 1, 5], [2, 2, 2]], {"num_draft_tokens": 2, "max_new_tokens": 5}
    trace = log_trace(
        target, drafter, prompts, tmp_path / "t", verifier="tree", dtype="float32", **sizes
    )
    assert trace.header.trees
    for text, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        options = {"policy": "speculative", "verifier": "tree", "num_draft_tokens": 2}
        made = generate(target, drafter, ids, seed=text, max_new_tokens=7, **options)
        new = made.output_token_ids[0].tolist()
        for cycle in trace.cycles():
            if cycle.text != text:
                continue
            own = cycle.draft()
            for node in range(len(cycle.target_probs)):
                path = own.path(0, node - 1) if node else []
                text_ids = [*prompt, *new[: cycle.position], *own.token_ids[0, path].tolist()]
                with torch.inference_mode():
                    logits = target(input_ids=torch.tensor([text_ids])).logits[0, -1]
                row = logits.double().softmax(-1)
                torch.testing.assert_close(cycle.target_probs[node], row, rtol=STORED, atol=STORED)
    best = replay(trace, "band:price=1", "tree")
    assert best.tokens_per_call.value >= replay(trace, "speculative", "tree").tokens_per_call.value
    assert best.divergence_per_token().value > 0


@pytest.fixture
def trees(tmp_path):
    walks = [own for own, _ in outcomes(Plan((2, 1), "sampled"), ct.policy("speculative"), "chain")]
    return saved(tmp_path / "t", walks)


@pytest.mark.parametrize(
    ("follow", "who"),
    [
        (lambda t: replay(t, "speculative"), "verifier: chain cannot follow"),
        (lambda t: replay(t, "speculative", "block"), "verifier: block cannot follow"),
        (lambda t: replay(t, ByPosition([(0, "speculative")]), "tree"), "policy: the schedule"),
        (lambda t: replay(t, "speculative", "tree", num_draft_tokens=1), "num_draft_tokens: a sho"),
        (lambda t: expect(t), "expect cannot follow"),
        (lambda t: tune(t, Costs.ratios(0.1), 0.05), "tune cannot follow"),
        (list, "what reads cycles as chains cannot follow"),
        (lambda t: next(t.batches(1)), "what reads cycles as chains cannot follow"),
        (lambda t: t.rows(), "what reads cycles as chains cannot follow"),
    ],
)
def test_what_cannot_follow_a_tree_says_so(trees, follow, who):
    with pytest.raises(ValueError, match=f"^{who}.* the drafted trees of .*verifier='tree'"):
        follow(trees)


@pytest.mark.parametrize(
    ("details", "said"),
    [({}, "must have at most 2 drafted tokens a cycle"), ({"nodes": 0}, "nodes must be")],
)
def test_a_manifest_that_does_not_fit_its_trees_is_refused(trees, details, said):
    path = trees.folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"details": details}))
    with pytest.raises(ValueError, match=said):
        list(Trace.open(trees.folder).cycles())


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        (([1, 1], [-1, -1], [False, False]), "siblings must be different"),
        (([1, 0], [-1, 1], [False, False]), "an earlier token"),
        (([1, 0], [-1, -1], [True, True]), "at most one token may be sampled"),
        (([1, 0, 2], [-1, 0, 1], [False, False, False]), "paths of at most 2 tokens"),
    ],
)
def test_what_is_no_tree_is_not_written(tmp_path, tree, rule):
    ids, parents, sampled = map(torch.tensor, tree)
    rows = torch.full((len(ids) + 1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    p = rows[: int(sampled.sum())] if bool(sampled.any()) else None
    cycle = Cycle(0, 0, ids, rows, p, parents, sampled, ~sampled)
    sizes = {"vocab_size": VOCAB, "num_draft_tokens": 2}
    with pytest.raises(ValueError, match=rule):
        save_trace(tmp_path / "a", [[cycle]], nodes=3, **sizes)
    with pytest.raises(ValueError, match="how many nodes"):
        save_trace(tmp_path / "b", [[cycle]], **sizes)


def test_trees_that_cannot_be_logged_are_named(tiny, tmp_path):
    target, draft = tiny
    sizes = {"num_draft_tokens": 2, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="Siblings drafts trees, and chain verifies one"):
        log_trace(target, Siblings(ModelDrafter(draft)), [[1]], tmp_path / "t", **sizes)
    assert not (tmp_path / "t").exists()
    ids = torch.tensor([[1]])
    with pytest.raises(ValueError, match="must declare which tokens were sampled"):
        Cycle.of(0, 0, torch.ones(1, 2, 2) / 2, Draft(ids, [1], None, ids * 0 - 1))
