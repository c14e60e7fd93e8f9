"""Processors, criteria and prefix functions are asked as generate asks them, or refused by name."""

import pytest
import torch
import transformers

from cactus_theory.decoding import ModelDrafter, NGram, Siblings, speculative_generate
from tests.decoding.letters import PIECES
from tests.decoding.test_ragged import padded, prompts

ONE = torch.tensor([[5, 9, 3, 14]])
BATCH, MASK = padded(prompts(seed=9), pad=6)
GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 6}


class Counts(transformers.LogitsProcessor):
    """Favours another token at every call, and notes where it was asked."""

    def __init__(self):
        self.lengths, self.mean = [], torch.zeros(())

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        self.mean += scores.mean()
        scores[:, (7 * len(self.lengths)) % 24] += 6
        return scores


class Brackets:
    """A grammar, [..(..)..], whose matcher forks and fails at a token that it does not allow."""

    class Matcher:
        def __init__(self, open_=()):
            self.open = list(open_)

        def __reduce__(self):
            raise TypeError("compiled")

        def fork(self):
            return type(self)(self.open)

        def allowed(self):
            return [3, 4, *({3: [5], 4: [6]}[self.open[-1]] if self.open else [2])]

        def accept(self, token):
            if token not in self.allowed():
                raise AssertionError(f"{token} is not allowed")
            self.open.append(token) if token in (3, 4) else self.open and self.open.pop()

    def __init__(self):
        self.matcher, self.first = self.Matcher(), True

    def __call__(self, input_ids, scores):
        if not self.first:
            self.matcher.accept(int(input_ids[0, -1]))
        self.first = False
        mask = torch.full_like(scores, -torch.inf)
        mask[:, self.matcher.allowed()] = 0
        return scores + mask


def synth():
    options = 3, [654, 400, 836], 256, 0, 64, torch.device("cpu")
    return transformers.SynthIDTextWatermarkLogitsProcessor(*options)


def both(tiny, ids=ONE, mask=None, drafter=None, **options):
    """Return what the library gives and what the hook gives; options that are called are made."""
    target, draft = tiny
    given = {"attention_mask": torch.ones_like(ids) if mask is None else mask} | GREEDY
    hook = {"custom_generate": speculative_generate, "num_draft_tokens": 4}
    hook |= {"draft_model": draft if drafter is None else drafter(draft)}
    if drafter is TREE:
        hook["verifier"] = "tree"
    found = []
    for more in ({}, hook):
        made = {name: make() if callable(make) else make for name, make in options.items()}
        found.append((target.generate(ids, **given | made | more).tolist(), made))
    return found


def TREE(draft):
    return Siblings(ModelDrafter(draft), m=2)


@pytest.mark.parametrize("drafter", [None, lambda _: NGram(), TREE], ids=["model", "ngram", "tree"])
@pytest.mark.parametrize("make", [Counts, Brackets, synth])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.4}], ids=["", "penalty"])
def test_what_keeps_something_is_asked_once_a_place_along_the_text(tiny, make, more, drafter):
    plain, ours = both(tiny, logits_processor=lambda: [make()], drafter=drafter, **more)
    assert ours[0] == plain[0]
    if make is Counts:
        first, second = (made["logits_processor"][0] for _, made in (plain, ours))
        assert second.lengths == first.lengths and torch.allclose(second.mean, first.mean)


def test_sampled_rows_are_those_that_generate_draws_from(tiny):
    target, draft = tiny
    options = {"do_sample": True, "top_k": 9, "temperature": 0.8, "max_new_tokens": 24}
    output = target.generate(
        ONE, **options, logits_processor=[Counts()], custom_generate=speculative_generate,
        draft_model=draft, seed=1, return_dict_in_generate=True, log_probs=True, pad_token_id=6,
    )  # fmt: skip
    ids, library = output.sequences, transformers
    logits = target(ids).logits.float()
    chain = [Counts(), library.TemperatureLogitsWarper(0.8), library.TopKLogitsWarper(9)]
    for place in range(4, ids.shape[1]):
        scores = logits[:, place - 1]
        for one in chain:
            scores = one(ids[:, :place], scores)
        expected = scores.log_softmax(-1)[0, ids[0, place]]
        assert output.result.log_probs.target[0, place - 4] == pytest.approx(
            expected.item(), abs=1e-4
        )


class Shared(Counts):
    calls = [0]

    def __call__(self, input_ids, scores):
        self.calls[0] += 1
        return scores + 0 * self.calls[0]


class Noise(Counts):
    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class Locked(Counts):
    def __init__(self):
        super().__init__()
        self.stream = (number for number in range(9))


def closure():
    calls = 0

    def favour(input_ids, scores):
        nonlocal calls
        calls += 1
        return scores + calls

    return favour


@pytest.mark.parametrize(
    ("make", "rows", "message"),
    [
        (Shared, 1, "Shared keeps something outside of itself, which its copies change"),
        (closure, 1, "favour keeps something outside of itself"),
        (Noise, 1, "Noise draws from a global generator; give it a generator of its own"),
        (Locked, 1, r"Locked cannot be copied, .* give its class a method fork\(\) .* 'generator'"),
        (Counts, 2, "Counts must be asked about one text at a time; got 2 texts"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(tiny, make, rows, message):
    ids = torch.cat([ONE, ONE.flip(1)])[:rows]
    with pytest.raises(ValueError, match=f"^logits_processor: {message}"):
        both(tiny, ids, logits_processor=lambda: [make()])


@pytest.mark.parametrize(
    "more",
    [{"logits_processor": [Brackets()]}, {"prefix_allowed_tokens_fn": lambda number, ids: [3, 2]}],
    ids=["Brackets", "PrefixConstrainedLogitsProcessor"],
)
def test_a_policy_that_emits_what_they_forbid_is_refused_beside_them(tiny, request, more):
    name = request.node.callspec.id
    said = f"^logits_processor: {name} may forbid tokens, which mixture:.*support=free may emit"
    hook = {"custom_generate": speculative_generate, "draft_model": NGram()}
    with pytest.raises(ValueError, match=said):
        tiny[0].generate(ONE, **GREEDY, **hook, policy="mixture:alpha=0.9,support=free", **more)


ONCE = {"do_sample": True, "top_k": 1}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
MENDED = pytest.mark.skipif(VERSION < (5, 19), reason="transformers itself is wrong before 5.19")


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
        pytest.param(
            {"num_return_sequences": 2, "encoder_repetition_penalty": 1.4} | ONCE, marks=MENDED
        ),
        {"sequence_bias": [[[3], 2.0], [[4, 9], 5.0]], "no_repeat_ngram_size": 1},
        pytest.param(
            {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 2, "min_new_tokens": 5},
            marks=MENDED,
        ),
        {"logits_processor": lambda: [transformers.WatermarkLogitsProcessor(24, "cpu")]},
        {"logits_processor": lambda: [transformers.RepetitionPenaltyLogitsProcessor(1.7)]},
        {"eos_token_id": 2},
        {"eos_token_id": 2, "repetition_penalty": 1.5},
        {"eos_token_id": 2, "bad_words_ids": [[3], [4, 9], [15, 2]]},
        {"min_new_tokens": 6, "eos_token_id": [7, 13, 15]},
        {"eos_token_id": [7, 13, 15]},
        {"eos_token_id": 15, "repetition_penalty": 1.2, "suppress_tokens": [2, 11]},
        {"eos_token_id": 2, "max_new_tokens": 1},
        {"eos_token_id": 2, "max_length": 12, "max_new_tokens": None},
        {"eos_token_id": 2, "forced_eos_token_id": 5},
        {"eos_token_id": 2, "no_repeat_ngram_size": 2},  # padding counts as text
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_batches_equal_the_librarys(tiny, options):
    plain, ours = both(tiny, BATCH, MASK, **options)
    assert ours[0] == plain[0]


def test_known_classes_are_asked_about_single_rows(tiny, monkeypatch):
    kind, rows = transformers.RepetitionPenaltyLogitsProcessor, []
    call = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, ids, scores: rows.append(len(ids)) or call(self, ids, scores)
    )
    both(tiny, BATCH, MASK, repetition_penalty=1.1)
    assert sum(rows) <= 7 * 14 + 7 * 14 * 9  # plain's, and at most 4 + 5 a round and text


def test_prefix_functions_see_a_text_up_to_its_end(tiny):
    class Allows:
        def __reduce__(self):
            return Allows, ()

        def __call__(self, number, ids):
            assert ids[: ONE.shape[1]].tolist() == ONE[0].tolist()
            return [2 + len(ids) % 5, 13, 2]

    plain, ours = both(tiny, prefix_allowed_tokens_fn=lambda: Allows())
    assert ours[0] == plain[0]

    def allowed(number, ids):
        new = ids[ONE.shape[1] :].tolist()
        assert 2 not in new, "asked behind an end of text"
        return [3, 2] if len(new) > 3 else [3, 9, 14]

    target, draft = tiny
    hook = {"custom_generate": speculative_generate, "draft_model": draft}
    hook |= {"prefix_allowed_tokens_fn": allowed, "sequence_bias": [[[2], 9.0]], "eos_token_id": 2}
    (text,) = target.generate(ONE, **GREEDY, **hook).tolist()
    assert text.index(2, 4) == 8


class MultiToken(transformers.StoppingCriteria):
    """Ends a text once it has had a sequence, as lm-eval's MultiTokenEOSCriteria does."""

    def __init__(self):
        self.done = False

    def __call__(self, input_ids, scores, **given):
        new = input_ids[0, BATCH.shape[1] :].tolist()
        self.done = self.done or "a" in "".join(PIECES[token] for token in new)
        return self.done


class Longer(transformers.StoppingCriteria):
    """Ends texts of a length, in the way that the library asks for."""

    def __call__(self, input_ids, scores, **given):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12)


@pytest.mark.parametrize("ends", [None, [7, 13]], ids=str)
@pytest.mark.parametrize("kind", [MultiToken, Longer])
def test_criteria_get_what_generate_gives_them(tiny, kind, ends):
    options = {"stopping_criteria": lambda: [kind()], "eos_token_id": ends, "max_new_tokens": 30}
    plain, ours = both(tiny, BATCH[:1], MASK[:1], **options)
    assert ours[0] == plain[0]
    if kind is MultiToken:
        first, second = (made["stopping_criteria"][0].done for _, made in (plain, ours))
        assert first == second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"stopping_criteria": [transformers.MaxTimeCriteria(9.0)]},
            "MaxTimeCriteria must .* or b",
        ),
        ({"text_streamer": []}, "text_streamer: supports one text only; got a batch"),
    ],
)
def test_what_asks_about_a_whole_batch_is_refused_by_name(tiny, options, said):
    hook = {"custom_generate": speculative_generate, "draft_model": tiny[1]}
    with pytest.raises(ValueError, match=said):
        tiny[0].generate(BATCH, attention_mask=MASK, **GREEDY, **hook, **options)
