"""Logging: all rows of every round of the target's own text, through kills and restarts."""

from pathlib import Path

import pytest
import torch

from cactus_theory.decoding import ModelDrafter, NGram, Siblings, generate
from cactus_theory.traces import Trace, log_trace
from tests.decoding.conftest import disturbed, random_llama

PROMPTS = [[1, 5, 2], [3, 3, 7, 1], [2]]
OPTIONS = {"num_draft_tokens": 3, "max_new_tokens": 6, "seed": 4}
# rows of a float64 model stored as float32: half an ulp of a log-probability below 32, twice
ROUNDING = 2.0**-19


def forward(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].softmax(-1)


def emitted(trace: Trace, text: int, cycles: list, generated: list[int]) -> None:
    """Check that each cycle stands where the text of the same seed does."""
    assert cycles[0].position == 0
    for cycle, following in zip(cycles, cycles[1:], strict=False):
        count = following.position - cycle.position
        assert 1 <= count <= len(cycle.draft_token_ids) + 1
        own = generated[cycle.position : following.position]
        assert own[:-1] == cycle.draft_token_ids[: count - 1].tolist()


def test_the_rows_are_those_of_both_models_along_the_text(tiny, tmp_path: Path) -> None:
    trace = log_trace(*tiny, PROMPTS, tmp_path / "t", dtype="float32", **OPTIONS)
    assert trace.texts == len(PROMPTS)
    for text, prompt in enumerate(PROMPTS):
        cycles = [cycle for cycle in trace if cycle.text == text]
        result = generate(  # the text itself, with the same room and seed
            *tiny, torch.tensor([prompt]), policy="speculative", num_draft_tokens=3,
            max_new_tokens=9, seed=4 + text,
        )  # fmt: skip
        generated = result.output_token_ids[0].tolist()
        emitted(trace, text, cycles, generated)
        for cycle in cycles:
            before = [*prompt, *generated[: cycle.position]]
            drafted = cycle.draft_token_ids.tolist()
            assert len(drafted) == 3  # in the last round too
            q, p = (forward(model, [*before, *drafted]) for model in tiny)
            first = len(before) - 1
            torch.testing.assert_close(cycle.target_probs, q[first:], rtol=ROUNDING, atol=0)
            torch.testing.assert_close(cycle.draft_probs, p[first:-1], rtol=ROUNDING, atol=0)
        assert cycles[-1].position < 6


def test_an_end_of_text_the_cycles(tiny, tmp_path: Path) -> None:
    whole = log_trace(*tiny, PROMPTS, tmp_path / "a", **OPTIONS)
    every = list(range(24))
    ended = log_trace(*tiny, PROMPTS, tmp_path / "b", eos_token_ids=every, **OPTIONS)
    assert len(ended) == len(PROMPTS) < len(whole)  # the first token ends a text
    assert ended.header.eos_token_ids == every


@pytest.mark.parametrize("kind", ["ngram", "greedy"])
def test_deterministic_drafts_have_no_rows(tiny, tmp_path: Path, kind: str) -> None:
    drafter = NGram() if kind == "ngram" else ModelDrafter(tiny[1], greedy=True)
    trace = log_trace(tiny[0], drafter, PROMPTS, tmp_path / "t", **OPTIONS)
    assert all(cycle.draft_probs is None for cycle in trace)
    counts = {len(cycle.draft_token_ids) for cycle in trace}
    assert counts == {3} if kind == "greedy" else len(counts) > 1
    assert trace.header.draft == ("NGram" if kind == "ngram" else "LlamaForCausalLM")


def test_temperature_0_logs_the_target_at_temperature_1(tiny, tmp_path: Path) -> None:
    trace = log_trace(*tiny, PROMPTS[:1], tmp_path / "t", temperature=0, **OPTIONS)
    for cycle in trace:
        assert cycle.draft_probs is None and bool((cycle.target_probs > 0).all())


def test_passes_go_on_until_there_are_enough_cycles(tiny, tmp_path: Path) -> None:
    trace = log_trace(*tiny, PROMPTS, tmp_path / "t", cycles=12, **OPTIONS)
    assert trace.texts > len(PROMPTS)
    sizes = [entry.cycles for entry in trace.manifest.shards]
    assert sum(sizes[:-1]) < 12 <= sum(sizes)
    just = log_trace(*tiny, PROMPTS, tmp_path / "just", cycles=sum(sizes[:2]), **OPTIONS)
    assert just.texts == 2  # no more than asked for
    again = [[c.target_probs for c in trace if c.text == text][0] for text in (0, 3)]
    assert torch.equal(again[0][0], again[1][0])  # the same prompt
    assert not torch.equal(again[0], again[1])  # another text


class Killed(Exception):
    pass


def killed_after(texts: int):
    def on_text(cycles: int, done: int) -> None:
        if done == texts:
            raise Killed

    return on_text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_run_that_is_killed_leaves_what_one_that_is_not_does(
    tiny, tmp_path: Path, after: int
) -> None:
    log_trace(*tiny, PROMPTS, tmp_path / "whole", **OPTIONS)
    with pytest.raises(Killed):
        log_trace(*tiny, PROMPTS, tmp_path / "part", on_text=killed_after(after), **OPTIONS)
    kept = contents(tmp_path / "part")
    assert len(kept) == after + 1 and "manifest.json" not in kept
    # a kill while a file is written leaves a part of it under another name
    (tmp_path / "part" / ".text-00001.safetensors.x1y2").write_bytes(b"half")
    seen = []
    log_trace(
        *tiny, PROMPTS, tmp_path / "part", on_text=lambda *done: seen.append(done[1]), **OPTIONS
    )
    assert seen == list(range(after, len(PROMPTS) + 1))  # finished texts are not made again
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")


def test_a_run_that_was_killed_is_finished_with_fewer_rounds(tiny, tmp_path: Path) -> None:
    rounds = {"cycles": 99, "on_text": killed_after(2)}
    with pytest.raises(Killed):
        log_trace(*tiny, PROMPTS, tmp_path / "part", **OPTIONS, **rounds)
    part = log_trace(*tiny, PROMPTS, tmp_path / "part", **OPTIONS, cycles=3)
    assert part.texts == 2 and len(part) >= 3  # what was logged stays
    log_trace(*tiny, PROMPTS, tmp_path / "whole", **OPTIONS, cycles=3, texts=2)
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="another at_least_cycles .3, now 99"):
        log_trace(*tiny, PROMPTS, tmp_path / "part", **OPTIONS, cycles=99)


def test_a_finished_folder_is_returned_as_it_is(tiny, tmp_path: Path) -> None:
    first = log_trace(*tiny, PROMPTS, tmp_path / "t", **OPTIONS)
    before = contents(tmp_path / "t")
    again = log_trace(*tiny, PROMPTS, tmp_path / "t", on_text=killed_after(0), **OPTIONS)
    assert again.fingerprint == first.fingerprint and contents(tmp_path / "t") == before


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("folders")
    log_trace(*tiny, PROMPTS, folder / "finished", **OPTIONS)
    with pytest.raises(Killed):
        log_trace(*tiny, PROMPTS, folder / "unfinished", on_text=killed_after(1), **OPTIONS)
    return folder / "finished", folder / "unfinished"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, "another seed .4, now 5."),
        ({"num_draft_tokens": 2}, "another num_draft_tokens .3, now 2."),
        ({"max_new_tokens": 7}, "another max_new_tokens"),
        ({"dtype": "float32"}, "another dtype"),
        ({"temperature": 0.5}, "another temperature"),
        ({"eos_token_ids": 0}, "another eos_token_ids"),
        ({"prompts_ids": [*PROMPTS[:2], [4]]}, "logged with 3 other prompts; name another"),
        ({"draft_model": NGram()}, "another draft"),
    ],
)
def test_a_folder_of_other_arguments_is_refused(tiny, folders, changes, said: str) -> None:
    names = ("target_model", "draft_model", "prompts_ids")
    given = dict(zip(names, (*tiny, PROMPTS), strict=True)) | OPTIONS
    for folder in folders:
        before = contents(folder)
        with pytest.raises(ValueError, match=said):
            log_trace(**given | {"folder": folder} | changes)
        assert contents(folder) == before


def test_other_weights_of_the_same_shape_are_refused(tiny, folders) -> None:
    for pair in ((random_llama(seed=1), tiny[1]), (tiny[0], disturbed(tiny[0], seed=2))):
        with pytest.raises(ValueError, match="another (target|draft)_weights"):
            log_trace(*pair, PROMPTS, folders[0], **OPTIONS)


def test_a_folder_of_something_else_is_left_alone(tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"must be empty or hold a trace; .* holds mine.txt"):
        log_trace(*tiny, PROMPTS, tmp_path, **OPTIONS)
    assert list(contents(tmp_path)) == ["mine.txt"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts_ids": []}, "prompts_ids: must hold at least one prompt"),
        ({"prompts_ids": [[1], []]}, "every prompt must hold a token; prompt 1"),
        ({"prompts_ids": [[1], [24]]}, r"ids must lie in \[0, 24\); got 24"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer of at least 1"),
        ({"max_new_tokens": 125}, "must fit the 128 positions"),
        ({"cycles": 0}, "cycles: must be an integer of at least 1"),
        ({"dtype": "bfloat16"}, "dtype: must be one of float16, float32"),
    ],
)
def test_bad_arguments_write_nothing(tiny, tmp_path: Path, changes, said: str) -> None:
    given = {"prompts_ids": PROMPTS, "folder": tmp_path / "t"} | OPTIONS | changes
    with pytest.raises(ValueError, match=said):
        log_trace(*tiny, **given)
    assert not (tmp_path / "t").exists()


def test_a_drafter_of_trees_is_refused(tiny, tmp_path: Path) -> None:
    target, draft = tiny
    with pytest.raises(ValueError, match="must draft one path; Siblings drafts trees"):
        log_trace(target, Siblings(ModelDrafter(draft)), PROMPTS, tmp_path / "t", **OPTIONS)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("most", [0, 2**30])
def test_rows_that_were_read_stay_in_memory_up_to_a_limit(tiny, tmp_path, monkeypatch, most):
    monkeypatch.setattr("cactus_theory.traces.trace.KEPT_BYTES", most)
    log_trace(*tiny, PROMPTS, tmp_path / "t", **OPTIONS)
    trace = Trace.open(tmp_path / "t")
    first = [cycle.target_probs for cycle in trace]
    for cycle in trace:  # what a reader does to its rows is seen by no other one
        cycle.target_probs.zero_()
    assert all(map(torch.equal, first, (cycle.target_probs for cycle in trace)))
    for path in (tmp_path / "t").glob("*.safetensors"):
        path.unlink()
    if most:
        assert len(list(trace)) == len(first)
    else:
        with pytest.raises(OSError):
            list(trace)
