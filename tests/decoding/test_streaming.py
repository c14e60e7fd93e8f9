"""Streamers, stop strings and pieces of text: what plain ``generate`` does, during the decode."""

import threading

import pytest
import torch
import transformers

import cactus_theory as ct
from cactus_theory.decoding import speculative_generate
from cactus_theory.decoding.options import Callbacks
from tests.amounts import some
from tests.decoding.letters import tokenizer

TOKENIZER = tokenizer()
IDS = torch.tensor([[5, 9, 3, 14]])
GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": 2}
OURS = {"custom_generate": speculative_generate, "num_draft_tokens": 4}


class Heard(transformers.generation.BaseStreamer):
    """Keeps every call."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((tuple(value.shape), value.tolist()))

    def end(self):
        self.calls.append("end")


def both(tiny, ids=IDS, heard=False, **options):
    """Return what the library gives and what the hook gives, and what a streamer heard of each."""
    target, draft = tiny
    tokenizer = options.pop("tokenizer", None)
    given = {"attention_mask": torch.ones_like(ids)} | GREEDY | options
    found, calls = [], []
    for prefix, hook in (("", {}), ("text_", OURS | {"draft_model": draft})):
        streamer = Heard()
        streams = {f"{prefix}streamer": streamer} if heard else {}
        streams |= {f"{prefix}tokenizer": tokenizer} if tokenizer else {}
        found.append(target.generate(ids, **given, **streams, **hook).tolist())
        calls.append(streamer.calls)
    return *found, *calls


def test_a_streamer_hears_what_it_hears_without_the_hook(tiny):
    plain, ours, first, second = both(tiny, heard=True)
    assert ours == plain and second == first
    assert first[0] == ((1, 4), IDS.tolist()) and first[-1] == "end" and len(first) == 42


def test_a_streamer_hears_tokens_during_the_decode(tiny):
    """Every round's tokens are heard before the next round's are drafted."""
    target, draft = tiny
    streamer, heard = Heard(), []
    told = Callbacks(on_tokens=lambda new: heard.append((len(new), len(streamer.calls))))
    ours = OURS | {"draft_model": draft, "text_streamer": streamer, "callbacks": told}
    target.generate(IDS, **GREEDY, **ours)
    assert len(heard) > 5
    assert [count for _, count in heard] == [
        1 + sum(length for length, _ in heard[: number + 1]) for number in range(len(heard))
    ]


@pytest.mark.parametrize("length", some([1, 3, 2, 5], 2))
def test_stop_strings_end_a_text_where_the_library_ends_it(tiny, length):
    """Across tokens, within one, at an overhang."""
    plain = tiny[0].generate(IDS, **GREEDY)[0, IDS.shape[1] :].tolist()
    text = TOKENIZER.decode(plain)
    starts = some(range(0, len(text) - length, 2), 3)
    early = 0
    for start in starts:
        wanted = {"stop_strings": [text[start : start + length]], "tokenizer": TOKENIZER}
        expected, ours, first, second = both(tiny, heard=True, **wanted)
        assert ours == expected and second == first
        early += len(ours[0]) < len(plain) + IDS.shape[1]
    assert early


def test_stop_is_told_which_tokens_are_new(shipped):
    """Of a batch, and in the hook, where the library's own strings may begin in the prompt."""
    target, draft, tokenizer = shipped.target, shipped.draft, shipped.tokenizer
    strings, prompts = ["\nimport", "\nclass"], ["import os\n", "import os, sys\n\n\n"]
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")

    def stop(ids, prompt_length):
        return any(text in tokenizer.decode(ids[0, prompt_length:]) for text in strings)

    options = {"max_new_tokens": 8, "stop": stop}
    greedy = options | {"temperature": 0, "attention_mask": given.attention_mask}
    found = ct.generate(target, draft, given.input_ids, **greedy).output_token_ids
    first, second = (tokenizer.decode(row[row >= 0]) for row in found)
    assert first == "import sys\nimport" and second.startswith("class F") and found[1].min() >= 0
    inputs = tokenizer(prompts[0], return_tensors="pt")
    hook = OURS | {"draft_model": draft, "do_sample": False, "max_new_tokens": 8}
    across = {"stop_strings": strings, "text_tokenizer": tokenizer, "stop": lambda *_: False}
    for more, wanted in ((options, first), (across, "import")):
        (row,) = target.generate(**inputs, **hook | more)
        assert tokenizer.decode(row) == prompts[0] + wanted


def test_stop_strings_need_a_tokenizer(tiny):
    with pytest.raises(ValueError, match="text_tokenizer: must be given along with stop_strings"):
        tiny[0].generate(IDS, **GREEDY, **OURS, draft_model=tiny[1], stop_strings=["a"])
    own = transformers.GenerationConfig(**GREEDY, stop_strings=["a"])
    with pytest.raises(ValueError, match="stop strings"):  # the library's own refusal
        tiny[0].generate(IDS, own, **OURS, draft_model=tiny[1], text_tokenizer=TOKENIZER)


def test_criteria_of_one_s_own_are_asked_and_not_read(tiny):
    class Never(transformers.StoppingCriteria):
        max_length, eos_token_id = 6, list(range(24))

        def __call__(self, input_ids, scores, **given):
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected, ours, _, _ = both(tiny, stopping_criteria=[Never()])
    assert ours == expected and len(ours[0]) == 44


def test_the_device_loop_streams(tiny):
    options = GREEDY | OURS | {"draft_model": tiny[1]}
    expected, heard = Heard(), Heard()
    plain = tiny[0].generate(IDS, **GREEDY, streamer=expected)
    found = tiny[0].generate(IDS, **options, device_loop=True, text_streamer=heard)
    assert found.tolist() == plain.tolist() and heard.calls == expected.calls


def test_a_loop_reads_the_text_from_the_library_s_iterator(tiny):
    streamer = transformers.TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    given = GREEDY | OURS | {"draft_model": tiny[1], "text_streamer": streamer}
    thread = threading.Thread(target=tiny[0].generate, args=(IDS,), kwargs=given)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == TOKENIZER.decode(tiny[0].generate(IDS, **GREEDY)[0, IDS.shape[1] :])
