"""Drafts with siblings: greedy texts, batches, exact law of whole decodes, rows, refusals."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import pytest
import torch
import transformers

import cactus_theory as ct
from cactus_theory.decoding import (
    Cascade,
    DecodeOptions,
    Ledger,
    ModelDrafter,
    NGram,
    Siblings,
    generate,
    generate_plain,
)  # fmt: skip
from cactus_theory.decoding._opening import Opening
from cactus_theory.decoding.host import Decode
from cactus_theory.verify import Draft
from tests.amounts import amount, some
from tests.decoding.models.families import build, families
from tests.verify.test_tree import Walks

TEXTS = torch.tensor([[1, 5, 9], [4, 4, 2], [7, 0, 3]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
TREE = {"verifier": "tree", "num_draft_tokens": 4}
# sums of some thousand float64 terms; norms of Llama-like models are float32 throughout
EXACT, ROUNDING = 1e-9, 1e-5
VOCAB, DEPTH = 3, 2


def drafters(model):
    return {
        "model": ModelDrafter(model),
        "greedy": ModelDrafter(model, greedy=True),
        "stopped": ModelDrafter(model, stop=0.5),
        "ngram": NGram(),
    }


@pytest.mark.parametrize(
    ("name", "fast", "eos"), some(product(("model", "ngram"), (True, False), (None, 3)), 3)
)
def test_greedy_output_is_the_plain_one(tiny, name, fast, eos):
    options = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_ids": eos}
    plain = generate_plain(tiny[0], TEXTS, attention_mask=MASK, **options)
    drafter = Siblings(drafters(tiny[1])[name], 3)
    options |= TREE | {"policy": "band:price=1", "fast_forward": fast, "attention_mask": MASK}
    found = generate(tiny[0], drafter, TEXTS, **options)
    assert found.output_token_ids.equal(plain.output_token_ids)
    assert found.target_calls < plain.target_calls


@pytest.mark.parametrize("name", some(("model", "greedy", "ngram", "stopped"), 2))
def test_a_batch_is_as_alone(tiny, name):
    options = TREE | {"policy": "soft_band:price=1", "max_new_tokens": 14, "eos_token_ids": 3}
    drafter = Siblings(drafters(tiny[1])[name], 2)
    both = generate(tiny[0], drafter, TEXTS, seed=7, **options)
    spent = 0.0
    for row in range(len(TEXTS)):
        alone = generate(tiny[0], drafter, TEXTS[row : row + 1], seed=7 + row, **options)
        length = alone.row_lengths[0]
        assert both.row_lengths[row] == length and both.row_ended[row] == alone.row_ended[0]
        assert both.output_token_ids[row, :length].equal(alone.output_token_ids[0, :length])
        spent += alone.reading.emitted_divergence
    assert both.reading.emitted_divergence == pytest.approx(spent, abs=ROUNDING) and spent > 0


def test_without_siblings_it_is_the_path_itself(tiny):
    options = TREE | {"policy": "band:price=1", "max_new_tokens": 12, "seed": 3}
    bare = generate(*tiny, TEXTS, **options)
    found = generate(tiny[0], Siblings(ModelDrafter(tiny[1]), 0), TEXTS, **options)
    assert found.output_token_ids.equal(bare.output_token_ids) and found.rounds == bare.rounds


def test_what_is_beside_a_path_was_likeliest_before_it_was_drawn(tiny):
    """Rows by node are both models' own after their texts, also where a sibling was caught."""
    target, model = tiny
    caught = 0

    def see(q, draft, texts, before):
        nonlocal caught
        for row, count in enumerate(draft.lengths):
            text = [*TEXTS[texts[row]].tolist(), *written[texts[row]][: before[row]]]
            for node, children in enumerate(draft.children(row)):
                path = draft.path(row, node - 1) if node else []
                ids = torch.tensor([[*text, *draft.token_ids[row, path].tolist()]])
                own = [one(input_ids=ids).logits[0, -1].softmax(-1) for one in tiny]
                assert (q[row, node] - own[0]).abs().max() < ROUNDING
                if not children:
                    continue
                r = draft.probs[row, node]
                assert (r - own[1]).abs().max() < ROUNDING
                tokens = draft.token_ids[row, children].tolist()
                assert len(set(tokens)) == len(tokens)
                assert sorted(draft.fixed(row)[node]) == sorted(r.topk(2).indices.tolist())
                (drawn,) = draft.token_ids[row, children][draft.sampled[row, children]].tolist()
                assert set(tokens) == {drawn, *draft.fixed(row)[node]}
            assert count <= 12

    options = TREE | {"policy": "band:price=1", "max_new_tokens": amount(10, 24)}
    drafter = Siblings(ModelDrafter(model), certain=True)
    written = generate(target, drafter, TEXTS, **options)
    alone = written.num_accepted
    written = written.output_token_ids.tolist()
    found = generate(target, drafter, TEXTS, on_rows=see, **options)
    assert found.output_token_ids.tolist() == written and found.num_accepted == alone > 0


@dataclass(frozen=True)
class Rows:
    """What :class:`Walks` asks of a plan, of two models and a temperature of 1 after a prompt."""

    pair: tuple
    prompt: tuple
    m: int
    depth: int
    certain: bool

    @cached_property
    def rows(self):
        texts = [own for size in range(DEPTH + 2) for own in product(range(VOCAB), repeat=size)]
        found = []
        with torch.inference_mode():
            for one in self.pair:
                rows = {}
                for text in texts:
                    ids = torch.tensor([[*self.prompt, *text]])
                    rows[text] = one(input_ids=ids).logits[0, -1].softmax(-1).numpy()
                found.append(rows)
        return found

    @property
    def shape(self):
        return (self.m + 1,) * self.depth

    def target(self, text):
        return self.rows[0][text]

    def node(self, text):
        if len(text) >= self.depth:
            return [], None
        row = self.rows[1][text]
        return np.argsort(-row, kind="stable")[: self.m].tolist(), row

    def trees(self):
        """Yield every draft as the drafter lays it out: the path, then what is beside it."""
        for path in product(range(VOCAB), repeat=self.depth):
            own, beside, mass = [], [], 1.0
            for place, token in enumerate(path):
                fixed, row = self.node(path[:place])
                mass *= row[token]
                own.append((place, token, True, self.certain and token in fixed))
                beside += [(place, n, False, self.certain) for n in fixed if n != token]
            yield path, own + beside, mass


def rounds(plan, spec, runs):
    """Yield (numbers of a row's stream, tokens due, probability) of everything a round may do."""
    for path, nodes, mass in plan.trees():
        coins = []
        for place, token in enumerate(path):
            edges = np.cumsum(plan.node(path[:place])[1])
            coins.append(edges[token] - plan.node(path[:place])[1][token] / 2)
        walks, most = Walks(plan, nodes, ct.policy(spec), runs), len(plan.shape) * (plan.m + 1)
        for box, emitted, _ in walks.boxes():
            middles = {coin: (low + high) / 2 for coin, (low, high) in box.items()}
            size = np.prod([high - low for low, high in box.values()])
            accept = [middles.get(("accept", place), 0.5) for place in range(most)]
            draws = [middles.get(("draw", step), 0.5) for step in range(len(path) + 1)]
            yield [*coins, *accept, *draws], [int(token) for token in emitted], mass * size


def decoded(pair, prompt, numbers, plan, spec, runs, most):
    """Return the new tokens of one round, a row for each list of numbers."""
    options = DecodeOptions(
        policy=spec, num_draft_tokens=DEPTH, max_new_tokens=most, meter=False,
        verifier=f"tree:runs={runs}",
    )  # fmt: skip
    ids = torch.tensor([prompt] * len(numbers))
    drafter = Siblings(ModelDrafter(pair[1]), plan.m, plan.certain)
    opening = Opening(pair[0], drafter, ids, options)
    left = [torch.tensor(own, dtype=torch.float64) for own in numbers]

    def stream(row):
        def take(count):
            taken, left[row] = left[row][:count], left[row][count:]
            return taken.numpy()

        return take

    opening.coins.streams = [stream(row) for row in range(len(numbers))]
    with torch.inference_mode():
        new = Decode(opening).round()
    assert not any(len(own) for own in left)  # every number was used
    return new


def law_of(pair, prompt, most, m, spec, runs, certain=False):
    """Return the law of the next ``most`` tokens, every round of the decode enumerated."""
    plan = Rows(pair, prompt, m, min(DEPTH, most - 1), certain)
    if most == 1:
        return {(token,): mass for token, mass in enumerate(plan.target(()))}
    numbers, due, masses = zip(*rounds(plan, spec, runs), strict=True)
    assert sum(masses) == pytest.approx(1, abs=EXACT)
    assert decoded(pair, prompt, numbers, plan, spec, runs, most) == list(due)
    found, after = {}, {}
    for text, mass in zip(due, masses, strict=True):
        left = most - len(text)
        if left and (tuple(text), left) not in after:
            rest = left, m, spec, runs, certain
            after[tuple(text), left] = law_of(pair, (*prompt, *text), *rest)
        for more, share in after.get((tuple(text), left), {(): 1.0}).items():
            key = (*text, *more)
            found[key] = found.get(key, 0.0) + mass * share
    return found


@pytest.fixture(scope="module")
def three_tokens(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=1, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    return target, make_draft(target, noise=0.5, seed=4)


@pytest.mark.parametrize(
    ("runs", "m", "certain"), some(product(("block", "chain"), (1, 2), (False, True)), 1)
)
def test_the_enumerated_law_of_a_decode_is_that_of_plain_sampling(three_tokens, runs, m, certain):
    """All drafts and coins of every round, run by the loop itself; as the target samples."""
    prompt, most = (1, 0), 3
    law = law_of(three_tokens, prompt, most, m, "speculative", runs, certain)
    rows = Rows(three_tokens, prompt, m, DEPTH, certain).rows[0]
    assert len(law) == VOCAB**most
    for text, mass in law.items():
        due = np.prod([rows[text[:place]][text[place]] for place in range(most)])
        assert mass == pytest.approx(due, abs=EXACT)


@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_of_a_relaxed_decode_has_the_band(three_tokens, certain):
    """Around the draft's row, or around the selection law where siblings are declared."""
    law = law_of(three_tokens, (1, 0), 2, 1, "band:price=0.5", "block", certain)
    plan = Rows(three_tokens, (1, 0), 1, 1, certain)
    (fixed, r), q = plan.node(()), plan.target(())
    offered = ct.selection_law(q, r, kind="certain+sampled", certain=fixed) if certain else r
    h = ct.optimal_acceptance(q, offered, price=0.5).target
    first = [sum(mass for text, mass in law.items() if text[0] == n) for n in range(VOCAB)]
    assert np.abs(np.array(first) - h).max() < EXACT
    assert np.abs(h - q).max() > 1e-3


def test_processors_see_ancestors_only(tiny):
    """A penalty on used tokens makes the text depend on all that is shown to it."""
    options = {"temperature": 0.0, "max_new_tokens": 24}
    options["logits_processor"] = [transformers.RepetitionPenaltyLogitsProcessor(1.8)]
    plain = generate_plain(tiny[0], TEXTS, **options)
    drafter = Siblings(ModelDrafter(tiny[1]), 2)
    found = generate(tiny[0], drafter, TEXTS, policy="speculative", **TREE, **options)
    assert found.output_token_ids.equal(plain.output_token_ids) and found.num_accepted > 0


@dataclass(frozen=True)
class Undeclared(Siblings):
    """Does not say which tokens were sampled."""

    def begin(self, setting):
        drafting = super().begin(setting)
        propose = drafting.propose

        def silent(wanted, coins):
            draft = propose(wanted, coins)
            return Draft(draft.token_ids, draft.counts, draft.probs, draft.parents)

        drafting.propose = silent
        return drafting


def test_trees_declare_which_tokens_were_sampled(tiny):
    drafter = Undeclared(ModelDrafter(tiny[1]), 2)
    with pytest.raises(ValueError, match="must declare which tokens were sampled"):
        generate(tiny[0], drafter, TEXTS, policy="speculative", max_new_tokens=4, **TREE)


def test_ngrams_offer_what_else_followed():
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 9, 5, 6, 8, 5, 6]])
    seen = []
    options = TREE | {"policy": "speculative", "max_new_tokens": 4, "meter": False}
    options["on_rows"] = lambda q, draft, texts, before: seen.append(draft)
    model = build(*families()["LlamaForCausalLM"])
    generate(model, Siblings(NGram(), 2), ids, **options)
    draft = seen[0]
    assert draft.token_ids[0, : draft.lengths[0]].tolist() == [8, 5, 6, 7, 9]
    assert draft.parents[0, : draft.lengths[0]].tolist() == [-1, 0, 1, -1, 0]
    assert draft.probs is None and not bool(draft.sampled.any())


def test_what_cannot_follow_says_so(tiny):
    target, model = tiny
    drafter = Siblings(ModelDrafter(model))
    options = {"policy": "speculative", "max_new_tokens": 4}
    with pytest.raises(ValueError, match="Siblings drafts trees, and chain verifies one drafted"):
        generate(target, drafter, TEXTS, **options)
    with pytest.raises(ValueError, match="where a drafter is more than a model"):
        generate(target, drafter, TEXTS, **options | TREE, device_loop=True)
    with pytest.raises(ValueError, match="must draft one path, alike in every row; got Cascade"):
        Siblings(Cascade(ModelDrafter(model)))
    with pytest.raises(ValueError, match="must draft one path, alike in every row; got Siblings"):
        Siblings(drafter)
    with pytest.raises(ValueError, match="must draft paths inside a Cascade; got Siblings"):
        generate(target, Cascade(drafter), TEXTS, **options)
    with pytest.raises(TypeError, match=r"must be a Drafter, as ModelDrafter\(model\); got Llama"):
        Siblings(model)
    with pytest.raises(ValueError, match="m: must be an integer of at least 0; got -1"):
        Siblings(ModelDrafter(model), -1)
    bloom = build(*families()["BloomForCausalLM"])
    with pytest.raises(ValueError, match="parents: must be None for BloomForCausalLM"):
        generate(bloom, Siblings(ModelDrafter(bloom)), TEXTS, **options | TREE)


@pytest.mark.parametrize("certain", [False, True])
def test_a_cap_holds_beside_siblings(tiny, certain):
    """After every token of every text; most of it is spent."""
    drafter, cap = Siblings(ModelDrafter(tiny[1]), 2, certain=certain), 0.02
    options = TREE | {"policy": Ledger("band:price=0.2", cap), "max_new_tokens": 24}
    spent = generate(tiny[0], drafter, TEXTS, **options).token_charges.cumsum(-1)
    allowed = cap * torch.arange(1, spent.shape[1] + 1)
    assert bool((spent <= allowed * (1 + 1e-9)).all())
    assert float(spent[:, -1].mean()) > cap * spent.shape[1] / 2


def test_generate_of_the_library_and_the_command_line_take_siblings(tiny, monkeypatch):
    from cactus_theory.cli import main
    from cactus_theory.decoding import speculative_generate

    options = {"max_new_tokens": 12, "do_sample": False}
    plain = tiny[0].generate(TEXTS, **options)
    drafter = Siblings(ModelDrafter(tiny[1]), 2)
    options |= {"custom_generate": speculative_generate, "draft_model": drafter}
    found = tiny[0].generate(TEXTS, verifier="tree", return_dict_in_generate=True, **options)
    assert found.sequences.equal(plain) and found.result.target_calls < 12
    seen = []

    class Pair:
        target, draft = tiny

        class tokenizer:
            encode = staticmethod(lambda text: [1, 2])

    def spy(target, drafter, ids, options):
        seen.append((drafter, options.judge.spec))
        raise ValueError("no decode")

    monkeypatch.setattr("cactus_theory.decoding.decode", spy)
    monkeypatch.setattr("cactus_theory.decoding.load_pair", lambda *a, **k: Pair)
    line = "generate --target t --draft d --prompt x --policy speculative --siblings 2".split()
    assert main(line) == main([*line, "--verifier", "tree:runs=chain"]) == 2
    assert seen == [(drafter, "tree"), (drafter, "tree:runs=chain")]
