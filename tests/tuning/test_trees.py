"""Siblings in a tuned setting: what they catch, when they are named, and that a decode has them."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.decoding import ModelDrafter, Siblings, generate
from cactus_theory.decoding.drafters.siblings import likeliest, with_siblings
from cactus_theory.traces import Cycle, SavedRows, Trace, replay, save_trace
from cactus_theory.traces.replays import replay_widths, shares_rows
from cactus_theory.traces.trees import with_caught
from cactus_theory.tuning import Costs, Prompts, measure_costs, tune
from cactus_theory.tuning.choices import Tuned
from cactus_theory.tuning.costs import speed
from cactus_theory.tuning.measure import Setting
from cactus_theory.tuning.report import notes, save_tuned
from cactus_theory.verify import Draft, Tree
from tests.amounts import THOROUGH, some
from tests.traces.conftest import rows_of

# float32 log-probabilities above −8 keep a row to 2⁻²²; sums of some ten such numbers
STORED = 1e-5
ROUNDING = 1e-12
V, K, END = 3, 3, 1
COUNTS = (1, 2, 5)
RULES = [  # in the plain suite the first, the last and two between, with the number of siblings
    ("speculative", "chain", 5),
    ("lenience:lenience=0.5", "chain", 2),
    ("band:price=1", "block", 5),
    ("speculative", "block", 1),
    ("mixture:alpha=0.4", "chain", 1),
    ("cactus:delta=0.1", "chain", 2),
    ("band:price=1", "chain", 2),
    ("soft_band:price=1", "block", 2),
]
EVERY = [(spec, runs, count) for spec, runs, _ in RULES for count in COUNTS]
LEVEL = 0.05
TRIED = {"policies": ["band:price"], "widths": [2, 4]}


@pytest.fixture(scope="module")
def free(trace) -> Tuned:
    """The trace with siblings whose nodes cost nothing."""
    return tune(trace, Costs.ratios(0.05), LEVEL, **TRIED, siblings=[2])


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Every path of a Markov pair, each a text of its own, with its probability."""
    source = torch.Generator().manual_seed(8)
    q, p = rows_of(source, V, V), rows_of(source, V, V)
    p[2] = torch.tensor([0.3, 0.7, 0.0])  # a token that cannot be drafted is no sibling
    own = [
        ([0, *path], float(np.prod([p[at] for at in zip([0, *path], path, strict=False)])))
        for path in itertools.product(range(V), repeat=K)
    ]
    own = [(above, mass) for above, mass in own if mass > 0]
    cycles = [[Cycle(0, 0, torch.tensor(a[1:]), q[a], p[a[:-1]])] for a, _ in own]
    folder = tmp_path_factory.mktemp("drafted")
    sizes = {"vocab_size": V, "num_draft_tokens": K, "eos_token_ids": [END], "dtype": "float32"}
    trace = save_trace(folder / "paths", cycles, **sizes)
    return trace, cycles, q, np.array([mass for _, mass in own]), folder, sizes


@pytest.mark.parametrize(("spec", "runs", "count"), EVERY if THOROUGH else some(RULES, 4))
def test_what_is_caught_is_what_walks_down_logged_trees_catch(drafted, spec, runs, count) -> None:
    """Averaged over all drafts: tokens, accepted ones, nats, and what is kept by place."""
    trace, cycles, q, mass, folder, sizes = drafted
    trees = [[_beside(own, q, count)] for (own,) in cycles]
    nodes = max(len(own.draft_token_ids) for (own,) in trees)
    logged = save_trace(folder / f"{spec}{runs}{count}", trees, **sizes, nodes=nodes)
    rule, judge = ct.policy(spec), Tree(runs)
    paths = replay_widths(trace, rule, runs, [1, K])
    found = with_caught(paths, trace, rule, runs, count, shares_rows(rule, runs))
    due, own = replay(logged, rule, judge), found[K]
    assert own.verifier == judge.spec and set(found) == {1, K}
    for mine, walked in ((own.tokens, due.tokens), (own.accepted, due.accepted),
                         (own.spent["kl"], due.spent["kl"]), (own.kept, due.kept)):  # fmt: skip
        assert (mine * mass).sum(-1) == pytest.approx((walked * mass).sum(-1), abs=STORED)
    gain = ((own.tokens - paths[K].tokens) * mass).sum()
    assert gain > 1e-3 or count == 1  # what this draft finds likeliest the target never wants more
    assert own.followed.sum() == pytest.approx((own.tokens - paths[K].tokens).sum())
    one = with_caught({1: paths[1]}, trace, rule, runs, count, shares_rows(rule, runs))[1]
    if runs == "chain":  # at the first place it is the same however long the draft is
        np.testing.assert_allclose(one.followed[0], own.followed[0], rtol=ROUNDING)
        np.testing.assert_allclose(one.tokens, found[1].tokens, rtol=ROUNDING)


def _beside(own: Cycle, q, count: int) -> Cycle:
    p = own.draft_probs[None]
    path = Draft(own.draft_token_ids[None], [K], p)
    draft = with_siblings(path, likeliest(p, count), count, certain=False)
    return Cycle.of(0, 0, q[[0, *draft.token_ids[0].tolist()]][None], draft)


def test_parts_and_the_speed_of_a_text_by_hand(drafted) -> None:
    """Of one drafted token: a caught one makes two tokens, as a kept one does; a bonus is one."""
    trace, *_ = drafted
    paths = replay_widths(trace, "speculative", "chain", [1])
    own = with_caught(paths, trace, ct.policy("speculative"), "chain", 2, True)[1]
    part = own.part([0, 5])
    assert part.followed.shape == (1, 2) and part.tokens[1] == own.tokens[5]
    tokens = own.tokens.sum() / own.cycles.sum()
    squares = 1 + 3 * (tokens - 1)  # 1 or 2 tokens
    costs = replace(Costs.ratios(0.5), new_tokens=10.0)
    calls = (10 + (squares / tokens - 1) / 2) / tokens
    assert speed(own, costs, "any").value == pytest.approx(10 / (1.5 * calls), rel=ROUNDING)
    longer = replay_widths(trace, "speculative", "chain", [K])
    own = with_caught(longer, trace, ct.policy("speculative"), "chain", 2, True)[K]
    path, places = longer[K], np.arange(K)
    bonus = path.tokens - path.reached.sum(0)
    squares = ((2 * places + 1) @ path.reached + (2 * K + 1) * bonus).sum()
    squares += ((2 * places + 3) @ own.followed).sum()  # i + 1 tokens became i + 2
    calls = (10 + (squares / own.tokens.sum() - 1) / 2) / (own.tokens.sum() / own.cycles.sum())
    found = speed(own, replace(costs, draft=(0.5, 0.5)), "any").value
    assert found == pytest.approx(10 / (1.5 * calls), rel=ROUNDING)


def test_siblings_are_named_where_their_nodes_are_free_and_a_decode_has_them(
    trace: Trace, free: Tuned, tmp_path, tiny
) -> None:
    found, best = free, free.best
    assert best.family.siblings == 2 and best.verifier.startswith("tree")
    assert best.replay.divergence_per_token().value == pytest.approx(LEVEL, rel=0.01)
    plain = tune(trace, Costs.ratios(0.05), LEVEL, **TRIED)
    for half in ("chosen_by", "speed"):
        assert getattr(best, half).value > getattr(plain.best, half).value
    save_tuned(found, tmp_path / "tuned.json")
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert content["version"] == 2 and content["recommended"]["siblings"] == 2
    setting = ct.load_tuned(tmp_path / "tuned.json")
    assert (setting.verifier, setting.siblings) == (best.verifier, 2)
    ids, options = torch.tensor([[1, 5, 2, 9]]), {"max_new_tokens": 24, "seed": 3}
    told = generate(*tiny, ids, tuned=setting, **options)
    told_too = generate(tiny[0], setting.drafter(tiny[1]), ids, **setting.options, **options)
    drafter = Siblings(ModelDrafter(tiny[1]), 2)
    by_hand = generate(tiny[0], drafter, ids, policy=best.policy, verifier=best.verifier,
                       num_draft_tokens=best.num_draft_tokens, **options)  # fmt: skip
    without = generate(*tiny, ids, policy=best.policy, verifier="chain",
                       num_draft_tokens=best.num_draft_tokens, **options)  # fmt: skip
    for own in (told, told_too):
        assert own.output_token_ids.tolist() == by_hand.output_token_ids.tolist()
        assert own.target_calls == by_hand.target_calls
    assert told.target_calls < without.target_calls
    for count in (-1, 10**9, 2.0):
        bad = content | {"recommended": content["recommended"] | {"siblings": count}}
        (tmp_path / "tuned.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=f"siblings must be .* up to 256; got {count}"):
            ct.load_tuned(tmp_path / "tuned.json")


def test_where_nodes_cost_the_path_is_named_with_the_ratio_from_which_they_would_pay(
    trace: Trace, free: Tuned, tmp_path, capsys
) -> None:
    """At a ratio of passes just below the one that is said the tree is the faster one."""
    asked = ["tune", "--kl-per-token", "0.05", "--policies", "band:price", "--num-draft-tokens",
             "2", "4", "--trace", str(trace.folder), "--cost-ratio", "0.05", "--verify-cost", "0.1",
             "--out", str(tmp_path / "tuned.json"), "--json"]  # fmt: skip
    assert main(asked) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*asked, "--siblings", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == alone["recommended"] and found["version"] == 1
    assert found["sentence"] == alone["sentence"] and "siblings" not in alone["source"]["tried"]
    assert ct.load_tuned(tmp_path / "tuned.json").siblings == 0 and "trees" not in alone
    assert "2 siblings a place, which" in " ".join(found["not_tried"])
    own = found["trees"]
    assert own["speed_ratio"] < 1 < own["pays_below"]
    assert own["pass_ratio"] > own["pays_below"]
    assert f"it pays below {own['pays_below']:.2f} times." in own["sentence"]
    known = Costs.ratios(0.05, 0.1)
    tuned = free.at_costs(known)
    assert tuned.trees.pays_below == own["pays_below"] and own["sentence"] in notes(tuned)
    dear = tuned.at_costs(replace(_measured(known, 1.0), other=(0.0, 0.0)))
    more = replace(dear.costs.siblings[2], other=(9.0, 9.0))
    never = tuned.at_costs(replace(dear.costs, siblings={2: more}))
    assert notes(never)[0].endswith("it would not pay if it took as long.")
    width = tuned.trees.tree.num_draft_tokens
    (passes,) = (known.part("target", width),)
    for share, ahead in ((0.999, True), (1.001, False)):
        trees = _measured(known, passes * own["pays_below"] * share)
        again = tuned.at_costs(trees)
        tree = next(c for c in again.choices if _place(c) == _place(tuned.trees.tree))
        path = next(c for c in again.choices if _place(c) == _place(tuned.trees.path))
        halves = (tree.speed / path.speed, tree.chosen_by / path.chosen_by)
        assert (min(half.value for half in halves) > 1) == ahead


def _place(choice):
    return choice.family.key, choice.num_draft_tokens


def _measured(costs: Costs, passes: float) -> Costs:
    """Return the same costs in seconds, with passes of trees that take as long at every K."""
    own = replace(costs, unit="seconds")
    return replace(own, siblings={2: replace(own, target=(passes, passes))})


def test_a_lead_within_its_interval_is_none(free: Tuned) -> None:
    found = free
    tree, path = found.trees.tree, found.trees.path
    for half in ("chosen_by", "speed"):
        own, other = getattr(tree, half), getattr(path, half)
        ratio = (own / other).value
        texts = np.arange(len(own.left_out)) - (len(own.left_out) - 1) / 2
        wide = replace(own, left_out=own.left_out * (1 + (ratio - 1) * texts))
        narrow = replace(found, choices=(replace(tree, **{half: wide}), path))
        assert (narrow.trees.ratio.value > 1) and narrow.best is path
        slow = replace(tree, **{half: replace(own, value=0.99 * other.value)})
        assert replace(found, choices=(slow, path)).best is path
    assert replace(found, choices=(tree, path)).best is tree


def test_passes_with_siblings_are_measured_and_kept(tiny, tmp_path) -> None:
    prompts = Prompts([[1, 5, 2], [3, 3, 7, 1]], 1, 8)
    paths = [Setting("speculative@chain", "speculative", "chain", width) for width in (1, 3)]
    trees = [Setting("speculative@chain+2", "speculative", "tree:runs=chain", width, 2)
             for width in (1, 3)]  # fmt: skip
    costs = measure_costs(*tiny, prompts, [*paths, *trees], repeats=1)
    own = costs.beside(2)
    assert list(costs.siblings) == [2] and list(own.verify) == ["speculative@chain+2"]
    assert own.plain == costs.plain and own.widths == (1, 3) and own.target != costs.target
    assert costs.beside(0) is costs and "siblings" not in replace(costs, siblings={}).as_json()
    file = tmp_path / "costs.json"
    content = {"format": "cactus-theory tuned", "version": 1, "costs": costs.as_json()}
    file.write_text(json.dumps(content))
    assert Costs.load(file, 1) == costs
    with pytest.raises(ValueError, match="as many as were timed, 2; got 4"):
        costs.beside(4)
    for wrong in ({"x": own.as_json()}, {"2": {}}, {"2": own.as_json() | {"plain": -1}}, []):
        file.write_text(json.dumps(content | {"costs": costs.as_json() | {"siblings": wrong}}))
        with pytest.raises(ValueError, match="--costs: must be a file that tune --out wrote"):
            Costs.load(file, 1)
    with pytest.raises(ValueError, match="settings: must hold one without siblings"):
        measure_costs(*tiny, prompts, trees)


def test_what_says_nothing_of_siblings_is_refused_first(trace: Trace, cheap, tmp_path) -> None:
    q = rows_of(torch.Generator().manual_seed(0), 4, 6)
    sure = [[replace(own, draft_probs=None) for own in trace]]
    certain = save_trace(tmp_path / "sure", sure * 2, vocab_size=24, num_draft_tokens=4)
    for source in (SavedRows.of(q, q), certain):
        with pytest.raises(ValueError, match="siblings: must be tried on a trace whose drafts"):
            tune(source, cheap, LEVEL, siblings=[2])
    with pytest.raises(ValueError, match="siblings: must be 1 to 256, each number once; got 0"):
        tune(trace, cheap, LEVEL, siblings=[0])
    with pytest.raises(ValueError, match="as many as were timed, none; got 2"):
        tune(trace, replace(cheap, unit="seconds"), LEVEL, siblings=[2])
