"""A draft may stop by what it has drafted; what it has drafted may not be withdrawn.

Laws are enumerated through the drafter itself: one row of a batch for every path, with coins
that draw it.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.decoding import (
    Cascade,
    DraftStop,
    EarlyExit,
    ModelDrafter,
    NGram,
    generate,
    generate_plain,
)
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.drafters import Setting
from cactus_theory.decoding.drafters.stop import Watch
from cactus_theory.decoding.pace import AdaptivePace
from cactus_theory.decoding.result import Stopwatch, VerifiedRows
from cactus_theory.policies._base import FixedTarget
from cactus_theory.verify.contract import Assignment, Draft, find_verifier

PROMPT = torch.tensor([[1, 5, 9]])
START, VOCAB, WIDTH = [1, 0], 3, 3
TEXTS = list(itertools.product(range(VOCAB), repeat=WIDTH + 1))
PATHS = list(itertools.product(range(VOCAB), repeat=WIDTH))
# sums of 81 products of float64 rows
EXACT = 1e-12
# what a withdrawn token must move the law by at least, to call the enumeration sharp
SEEN = 1e-3
# φ̂ = p, so that likely and unlikely tokens part early
STOPS = [DraftStop(threshold, ((0.0, 0.0), (1.0, 1.0))) for threshold in (0.1, 0.2, 0.35)]


class Rows:
    """The rows of a model after every prefix of up to WIDTH tokens."""

    def __init__(self, model):
        self.after = {}
        for length in range(WIDTH + 1):
            prefixes = list(itertools.product(range(VOCAB), repeat=length))
            ids = torch.tensor([START + list(prefix) for prefix in prefixes])
            with torch.inference_mode():
                rows = model(input_ids=ids, use_cache=False).logits[:, -1].double().softmax(-1)
            self.after |= dict(zip(prefixes, rows, strict=True))

    def share(self, text, first=0):
        """Return the probability of a text's tokens from number ``first`` on."""
        return np.prod([float(self.after[text[:i]][text[i]]) for i in range(first, len(text))])


@pytest.fixture(scope="module")
def three_tokens(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=1, seed=3, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    model = make_draft(target, noise=0.6, seed=2)
    return target, model, Rows(target), Rows(model)


def opened(drafter, target, prompts, width):
    """Return the drafter at work on these prompts, and their texts."""
    texts = Texts(prompts, 60, frozenset(), torch.device("cpu"))
    warp = Warp(1.0, (), [0] * len(prompts))
    return drafter.begin(Setting(target, texts, warp, Stopwatch(), width)), texts


def every_draft(target, model, p, stop):
    """Return what is drafted on each path, once each, and with what probability."""
    drafting, _ = opened(ModelDrafter(model, stop=stop), target, [START] * len(PATHS), WIDTH)
    coins = torch.empty(len(PATHS), WIDTH, dtype=torch.float64)
    for row, path in enumerate(PATHS):
        for place, token in enumerate(path):
            own = p.after[path[:place]]
            coins[row, place] = own[:token].sum() + own[token] / 2
    with torch.inference_mode():
        draft = drafting.propose([WIDTH] * len(PATHS), coins)
    found = {}
    for row, (path, count) in enumerate(zip(PATHS, draft.counts, strict=True)):
        assert draft.token_ids[row, :count].tolist() == list(path[:count])
        found.setdefault(path[:count], row)
    rows = list(found.values())
    counts = [draft.counts[row] for row in rows]
    at = draft.token_ids[rows, :, None]
    each = draft.probs[rows].gather(-1, at)[..., 0]
    weights = [float(own[:count].prod()) for own, count in zip(each, counts, strict=True)]
    limits = None if draft.limits is None else [WIDTH] * len(rows)
    return Draft(draft.token_ids[rows], counts, draft.probs[rows], limits=limits), weights


def law_of(verifier, rule, draft, q):
    """Return the verdict's law on each draft; target rows that are not read are uniform."""
    shape = (len(draft.counts), draft.token_ids.shape[1] + 1, VOCAB)
    rows = torch.full(shape, 1 / VOCAB, dtype=torch.float64)
    for row, count in enumerate(draft.counts):
        for place in range(count + 1):
            rows[row, place] = q.after[tuple(draft.token_ids[row, :place].tolist())]
    return find_verifier(verifier).law(Assignment((rule,)), rows, draft)


def emitted_starts(law, draft, weights):
    """Return {tokens of one round: probability}."""
    found = {}
    for row, (count, weight) in enumerate(zip(draft.counts, weights, strict=True)):
        path = tuple(draft.token_ids[row].tolist())
        for accepted in range(count + 1):
            reached = weight * float(law.stop[row, accepted])
            for token, share in enumerate(law.last[row, accepted].tolist()):
                start = (*path[:accepted], token)
                found[start] = found.get(start, 0.0) + reached * share
    return found


def distance_from_target(starts, q):
    """Return the largest error of the law of WIDTH + 1 tokens, rounds continued by the target."""
    worst = 0.0
    for text in TEXTS:
        own = sum(
            starts.get(text[:length], 0.0) * q.share(text, length) for length in range(1, WIDTH + 2)
        )
        worst = max(worst, abs(own - q.share(text)))
    return worst


def withdrawn(draft):
    """Return the draft without the tokens that ended it."""
    return replace(draft, counts=[count - (count < WIDTH) for count in draft.counts])


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: str(stop.threshold))
def test_a_stopped_draft_emits_the_targets_law(three_tokens, verifier, stop):
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, stop)
    assert sum(weights) == pytest.approx(1, abs=EXACT)
    law = law_of(verifier, ct.policy("speculative"), draft, q)
    assert distance_from_target(emitted_starts(law, draft, weights), q) < EXACT


def test_drafts_of_every_length_are_enumerated(three_tokens):
    target, model, _, p = three_tokens
    lengths = [set(every_draft(target, model, p, own)[0].counts) for own in STOPS]
    assert set.union(*lengths) == {1, 2, 3} and all(len(own) > 1 for own in lengths)


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_the_token_that_ended_a_draft_is_noticed(three_tokens, verifier):
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, STOPS[1])
    law = law_of(verifier, ct.policy("speculative"), withdrawn(draft), q)
    assert distance_from_target(emitted_starts(law, withdrawn(draft), weights), q) > SEEN


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_in_the_smallest_example_emits_six_to_four(verifier):
    """q = (.5, .5), p = (.8, .2): keeping the doubtful token emits q, dropping it (.6, .4)."""
    q, p = (torch.tensor([own], dtype=torch.float64) for own in ([0.5, 0.5], [0.8, 0.2]))
    for counts, emits in (([1, 1], (0.5, 0.5)), ([1, 0], (0.6, 0.4))):
        draft = Draft(torch.tensor([[0], [1]]), counts, p.expand(2, 1, 2))
        rule = Assignment((ct.policy("speculative"),))
        law = find_verifier(verifier).law(rule, q.expand(2, 2, 2), draft)
        refused = law.stop[:, :1] * law.last[:, 0]
        kept = torch.eye(2).double() * law.stop[:, 1:]
        found = p[0] @ (refused + kept)
        assert found.tolist() == pytest.approx(emits, abs=EXACT)


@dataclass(frozen=True)
class Ahead(FixedTarget):
    """Leans to the draft by how many drafted tokens are to follow."""

    name = "ahead"

    def target(self, q, p):
        return q

    def target_in_block(self, q, p, path):
        lean = path.left[:, None] / 4
        return (1 - lean) * q + lean * p


def test_a_row_may_look_ahead_to_what_was_planned_only(three_tokens):
    """How far a draft got depends on the drafted token; a row that knew would not be emitted."""
    target, model, q, p = three_tokens
    draft, weights = every_draft(target, model, p, STOPS[1])
    intended = (q.after[()] + p.after[()]) / 2
    errors = []
    for own in (draft, replace(draft, limits=None)):
        starts = emitted_starts(law_of("block", Ahead(), own, q), own, weights)
        first = torch.zeros(VOCAB, dtype=torch.float64)
        for tokens, share in starts.items():
            first[tokens[0]] += share
        errors.append(float((first - intended).abs().max()))
    # the model's rows with and without a cache differ by its float32 norms
    assert errors[0] < 1e-6 and errors[1] > SEEN


def rounds(drafter, target, width=6, turns=12, seed=0):
    """Yield each proposal with the texts, the drafting and what was wanted."""
    prompts = [[1, 5, 9], [2], [3, 3, 7, 3, 3, 7, 3], [8, 4, 8, 1]]
    drafting, texts = opened(drafter, target, prompts, width)
    source = torch.Generator().manual_seed(seed)
    for turn in range(turns):
        wanted = [max(width - (row + turn) % 4, 0) * ((row + turn) % 5 > 0) for row in range(4)]
        coins = torch.rand(4, width, generator=source, dtype=torch.float64)
        draft = drafting.propose(wanted, coins)
        yield draft, texts, drafting, wanted
        last = torch.randint(0, 24, (4,), generator=source)
        drafted = zip(draft.token_ids.tolist(), draft.counts, last.tolist(), strict=True)
        taken = [[*ids[: min((turn + row) % 4, count)], token]
                 for row, (ids, count, token) in enumerate(drafted)]  # fmt: skip
        texts.settle(taken, last)
        drafting.settle()


@pytest.mark.parametrize("name", ["model", "early exit"])
def test_rows_stop_where_the_product_falls_and_are_fed_no_further(tiny, name):
    target, model = tiny
    stop = DraftStop(0.5)
    drafter = ModelDrafter(model, stop=stop) if name == "model" else EarlyExit(1, stop=stop)
    early = calls = 0
    with torch.inference_mode():
        for draft, texts, drafting, wanted in rounds(drafter, target):
            assert draft.limits == wanted and draft.token_ids.shape[1] == max(draft.counts)
            assert drafting.calls - calls == max(draft.counts)  # the loop ends with its last row
            calls = drafting.calls
            for row, (count, most) in enumerate(zip(draft.counts, wanted, strict=True)):
                assert min(most, 1) <= count <= most
                at = draft.token_ids[row, :count, None]
                each = draft.probs[row, :count].gather(-1, at)[:, 0].numpy()
                product = stop.acceptance(each).cumprod() if count else np.ones(1)
                assert (product[:-1] >= stop.threshold).all()
                assert count == most or product[-1] < stop.threshold
                early += count < most
                if count:  # the last drafted token is not fed
                    assert drafting.model.lengths[row] == texts.lengths[row] + count - 1
    assert early > 10


def test_a_zero_threshold_never_stops_and_one_stops_at_once(tiny):
    target, model = tiny
    options = {"policy": "speculative", "max_new_tokens": 40, "num_draft_tokens": 5, "seed": 2}
    free = generate(target, model, PROMPT, **options)
    for stop in (0, DraftStop(1.0, ((0.5, 1.0),))):  # a product that equals it goes on
        never = generate(target, ModelDrafter(model, stop=stop), PROMPT, **options)
        assert never.output_token_ids.tolist() == free.output_token_ids.tolist()
        assert never.rounds == free.rounds and never.draft_calls == free.draft_calls
    always = generate(target, ModelDrafter(model, stop=1.0), PROMPT, **options)
    assert {drafted for drafted, _, _ in always.rounds} <= {0, 1}


def test_statistics_count_what_was_drafted(tiny):
    target, model = tiny
    options = {"policy": "cactus:delta=0.2", "max_new_tokens": 60, "num_draft_tokens": 6}
    result = generate(target, ModelDrafter(model, stop=0.5), PROMPT, **options)
    drafted = sum(count * times for (count, _, _), times in result.rounds.items())
    assert drafted == result.draft_calls  # one row: a step is a token
    assert len({count for count, _, _ in result.rounds}) > 3
    assert result.num_tokens == 60 == result.num_accepted + result.target_calls
    assert result.meter.accepted == result.num_accepted
    free = generate(target, model, PROMPT, **options)
    assert result.num_tokens / drafted > 1.1 * free.num_tokens / free.draft_calls


def test_the_pace_learns_what_was_drafted(tiny, monkeypatch):
    target, model = tiny
    seen = []
    note = AdaptivePace.note
    monkeypatch.setattr(
        AdaptivePace, "note", lambda own, done: (seen.append(done), note(own, done))
    )
    ids = torch.tensor([[1, 5, 9], [2, 4, 8], [3, 3, 7]])
    drafter = ModelDrafter(model, stop=0.5)
    result = generate(target, drafter, ids, policy="speculative", num_draft_tokens=6,
                      max_new_tokens=30, adaptive=True, gate=True)  # fmt: skip
    drafted = sum(count * times for (count, _, _), times in result.rounds.items())
    refused = sum(t for (count, kept, cut), t in result.rounds.items() if kept < count and not cut)
    assert sum(done.drafted for done in seen) == drafted
    assert sum(done.refused for done in seen) == refused
    assert sum(done.steps for done in seen if done.drafted) == result.draft_calls


@pytest.mark.parametrize("width", [3, 8])
def test_greedy_texts_are_the_targets_and_certain_drafts_are_not_stopped(tiny, width):
    target, model = tiny
    options = {"max_new_tokens": 24, "temperature": 0.0, "eos_token_ids": (7, 13)}
    plain = generate_plain(target, PROMPT, **options).output_token_ids.tolist()
    free = generate(target, model, PROMPT, policy="speculative", num_draft_tokens=width, **options)
    for drafter in (ModelDrafter(model, stop=0.9), Cascade(ModelDrafter(model, stop=0.9))):
        found = generate(target, drafter, PROMPT, policy="speculative", num_draft_tokens=width,
                         **options)  # fmt: skip
        assert found.output_token_ids.tolist() == plain
    stopped = generate(target, ModelDrafter(model, stop=0.9), PROMPT, policy="speculative",
                       num_draft_tokens=width, **options)  # fmt: skip
    assert stopped.rounds == free.rounds


def test_certain_rows_of_a_batch_are_as_without_a_stop(tiny):
    """A sampled decode with a greedy draft, and the n-gram rows of a cascade."""
    target, model = tiny
    options = {"policy": "speculative", "max_new_tokens": 30, "num_draft_tokens": 5, "seed": 3}
    greedy = [generate(target, ModelDrafter(model, greedy=True, stop=own), PROMPT, **options)
              for own in (None, 0.9)]  # fmt: skip
    assert greedy[0].output_token_ids.tolist() == greedy[1].output_token_ids.tolist()
    assert greedy[0].rounds == greedy[1].rounds


def test_a_cascade_tells_what_was_planned(tiny):
    """Rows that the n-grams drafted keep their lengths, the model's rows what was wanted."""
    target, model = tiny
    drafter = Cascade(ModelDrafter(model, stop=0.9), NGram(3, 2))
    mixed = 0
    with torch.inference_mode():
        for draft, _, _, wanted in rounds(drafter, target):
            if draft.probs is None:
                continue  # all rows from the n-grams
            copied = draft.probs[:, 0].amax(-1) == 1.0
            whose = zip(copied.tolist(), draft.counts, wanted, draft.planned, strict=True)
            for certain, count, most, planned in whose:
                assert planned == (count if certain and count else most)
                mixed += bool(copied.any()) and count < planned
    assert mixed > 2


@pytest.mark.parametrize(
    "stop", [DraftStop(), DraftStop(knots=((0.3, 0.5),)), DraftStop(knots=((0.2, 0), (0.9, 0.7)))]
)
def test_what_is_looked_up_is_the_acceptance(stop):
    places = [*np.linspace(0, 1, 101), *(place for place, _ in stop.knots)]
    for place, expected in zip(places, stop.acceptance(places), strict=True):
        watch = Watch(stop, [2])
        watch.see(1, torch.tensor([[0.0, place]], dtype=torch.float64), torch.tensor([1]))
        assert watch.products[0] == pytest.approx(expected, abs=EXACT)


def test_a_fit_is_the_monotone_regression_on_its_groups():
    source = np.random.default_rng(0)
    p = source.random(6000)
    truth = 0.4 + 0.5 * p**2
    stop = DraftStop.fit(p, source.random(6000) < truth, threshold=0.2, bins=10)
    assert stop.threshold == 0.2 and 3 < len(stop.knots) <= 10
    places = np.linspace(0.05, 0.95, 19)
    # a group of 600 coins has a standard error of .02
    assert np.abs(stop.acceptance(places) - (0.4 + 0.5 * places**2)).max() < 0.07
    assert (np.diff(stop.acceptance(np.linspace(0, 1, 101))) >= 0).all()


@pytest.mark.parametrize(
    ("p", "accepted", "knots"),
    [
        ([0.1, 0.5, 0.9], [0.2, 0.4, 0.9], [(0.1, 0.2), (0.5, 0.4), (0.9, 0.9)]),
        ([0.9, 0.1, 0.5], [0.9, 0.2, 0.4], [(0.1, 0.2), (0.5, 0.4), (0.9, 0.9)]),
        ([0.1, 0.5, 0.9], [0.6, 0.2, 0.9], [(0.3, 0.4), (0.9, 0.9)]),  # a violator is pooled
        ([0.1, 0.5, 0.9], [0.9, 0.6, 0.0], [(0.5, 0.5)]),  # and its pool with the one before
        ([0.5, 0.5, 0.9], [0.2, 0.4, 0.9], [(0.5, 0.3), (0.9, 0.9)]),  # one p, one knot
        ([1.0], [1.0], [(1.0, 1.0)]),
    ],
)
def test_neighbours_that_do_not_rise_are_pooled(p, accepted, knots):
    found = DraftStop.fit(p, accepted).knots
    assert np.array(found) == pytest.approx(np.array(knots), abs=EXACT)


def test_rows_of_a_decode_are_enough_for_a_fit(tiny):
    result = generate(*tiny, PROMPT, policy="cactus:delta=0.3", num_draft_tokens=4,
                      max_new_tokens=90, record_rows=True)  # fmt: skip
    rows, at = result.rows, result.rows.draft_token_ids[:, None]
    p = rows.draft_probs.gather(1, at)[:, 0]
    rule = ct.policy("cactus:delta=0.3")
    phi = rule.acceptance(rows.target_probs, rows.draft_probs, at)[:, 0]
    assert isinstance(rows, VerifiedRows)
    assert DraftStop.from_rows(rows) == DraftStop.fit(p, rows.accepted)
    exact = DraftStop.from_rows(rows, "cactus:delta=0.3", threshold=0.4, bins=4)
    assert exact == DraftStop.fit(p, phi, threshold=0.4, bins=4)
    assert exact.knots != DraftStop.from_rows(rows, bins=4).knots


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftStop(1.2), r"threshold: must lie in \[0, 1\]; got 1.2"),
        (lambda: DraftStop(float("nan")), r"threshold: must lie in \[0, 1\]; got nan"),
        (lambda: DraftStop("high"), "threshold: must be a number; got 'high'"),
        (lambda: ModelDrafter(None, stop=-1), r"threshold: must lie in \[0, 1\]; got -1"),
        (lambda: EarlyExit(1, stop=-1), r"threshold: must lie in \[0, 1\]; got -1"),
        (lambda: DraftStop(knots=()), r"knots: must be pairs of numbers in \[0, 1\]; got \(\)"),
        (lambda: DraftStop(knots=((0, 1.5),)), r"knots: must be pairs of numbers in \[0, 1\]"),
        (lambda: DraftStop(knots=((0.5, 0.1), (0.5, 0.2))), "knots: p must rise"),
        (lambda: DraftStop(knots=((0.1, 0.3), (0.5, 0.2))), "acceptance must not fall"),
        (lambda: DraftStop.fit([], []), "draft_prob, accepted: must be two lists of one length"),
        (lambda: DraftStop.fit([0.5], [0.5, 1]), "draft_prob, accepted: must be two lists"),
        (lambda: DraftStop.fit([0.5], [1.5]), r"accepted: must lie in \[0, 1\]; got 1.5 to 1.5"),
        (lambda: DraftStop.fit([float("nan")], [1]), r"draft_prob: must lie in \[0, 1\]; got nan"),
        (lambda: DraftStop.fit([0.5], [1], bins=0), "bins: must be an integer of at least 1"),
    ],
)
def test_refuses_what_is_no_stop(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_command_line_takes_a_threshold(tiny, tmp_path, capsys, monkeypatch):
    seen = {}

    def spy(target, draft, ids, **options):
        seen["drafter"] = draft
        raise ValueError("seen")

    class Pair:
        target, draft = tiny

        class tokenizer:
            encode = staticmethod(lambda text: [1, 2])

    monkeypatch.setattr("cactus_theory.decoding.generate", spy)
    monkeypatch.setattr("cactus_theory.decoding.load_pair", lambda *a, **k: Pair)
    given = [
        "generate",
        "--target",
        "t",
        "--draft",
        "d",
        "--prompt",
        "x",
        "--policy",
        "speculative",
    ]
    Pair.target.generation_config.eos_token_id = None
    for more, stop in (([], None), (["--draft-stop", "0.4"], 0.4)):
        assert main([*given, *more]) == 2
        assert seen["drafter"] == ModelDrafter(tiny[1], stop=stop)
    assert main([*given, "--draft-stop", "2"]) == 2
    assert "must lie in [0, 1]; got 2" in capsys.readouterr().err
