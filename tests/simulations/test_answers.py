"""Numbers of whole answers by hand; settings chosen by what was predicted; a run is taken up."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cactus_theory.base.prompts import Prompt
from cactus_theory.traces import Trace
from cactus_theory.traces.ends import LOSSLESS
from cactus_theory.tuning import Costs
from simulations.scores import score_of

pytest.importorskip("transformers")
from simulations import answers
from simulations.__main__ import main
from simulations.common import tuned
from simulations.common.grid import Config
from simulations.common.results import read_csv
from simulations.common.tuned import key
from tests.amounts import thorough

PROMPTS = [Prompt(f"prompt {number}") for number in range(40)]


def line(spec: str, width: int, level: float = 0.05, seconds=1.0, tokens=10, text="no") -> tuple:
    """Return a line whose answers take ``seconds`` each; texts are those of all prompts, or one."""
    texts = [text] * len(PROMPTS) if isinstance(text, str) else text
    records = [{"seconds": seconds * (1 + number % 2), "tokens": tokens * (1 + number % 2),
                "row_calls": 5, "kl": 0.5, "ended": [number > 9], "texts": [own]}
               for number, own in enumerate(texts)]  # fmt: skip
    return level, Config(spec, width), records


def score(prompt: Prompt, text: str) -> float:
    return float(text == "yes")


@pytest.mark.parametrize("batch", [1, 2])
def test_numbers_are_ratios_of_sums_beside_the_faster_lossless_line(batch) -> None:
    right, better = ["yes"] * 30 + ["no"] * 10, ["no"] * 2 + ["yes"] * 38
    runs = [
        line("plain", 0, 0.0, seconds=2.0),
        line("speculative", 4, 0.0, seconds=1.25, text=["no"] * 40),
        line("speculative", 3, 0.0, seconds=1.0, text=right),
        line("band:price=1", 5, seconds=0.8, tokens=16, text=better),
        line("cactus:delta=1", 5, seconds=1.0, text=right),
    ]
    if batch == 2:  # the same answers, two to a decode
        runs = [(*own, [{name: one[name] + other[name] for name in one}
                        for one, other in zip(records[::2], records[1::2], strict=True)])
                for *own, records in runs]  # fmt: skip
    plain, _, lossless, band, cactus = answers.rows_of(runs, PROMPTS, score, 0)
    assert plain["over_plain"] == 1 and lossless["over_lossless"] == 1
    assert {round(band[f"tokens_per_second{end}"], 9) for end in ("", "_low", "_high")} == {20}
    assert band["over_plain"] == pytest.approx(4) and band["over_lossless"] == pytest.approx(2)
    assert band["answer_over_lossless"] == pytest.approx(1.25) and band["cut"] == 0.25
    assert band["tokens_per_answer"] == 24 and band["tokens_per_call"] == pytest.approx(24 / 5)
    assert (band["kl_per_token"], band["seconds_per_answer"]) == pytest.approx((0.5 / 24, 1.2))
    assert (band["score"], band["score_difference"]) == (0.95, pytest.approx(0.2))
    assert band["seconds_per_right"] == pytest.approx(1.2 / 0.95)
    assert (band["right_alone"], band["lossless_right_alone"]) == (10, 2)
    # by hand: 2 (1 + 12 + 66)/4096, and twice it among two lines
    assert band["p"] == pytest.approx(158 / 4096) and band["p_of_all"] == pytest.approx(316 / 4096)
    assert (cactus["p"], cactus["p_of_all"], cactus["prompts_needed"]) == (1, 1, None)
    # of 40 prompts with a spread of √(12/40 − .04): 40 ((1.96 + .8416)/(.2/.0806))²
    assert band["prompts_needed_score"] == pytest.approx(51, abs=4) or batch == 2
    assert answers._sentence(band).startswith("band:price=1, K 5: 2.00 (2.00 to 2.00) times")


def test_intervals_are_over_prompts() -> None:
    """A line that is twice as fast on half of the prompts has the spread of such draws."""
    half = line("band:price=1", 5)
    for number, record in enumerate(half[2]):
        record |= {"seconds": 1.0, "tokens": 10 + 10 * (number % 2)}
    level = [record | {"seconds": 1.0, "tokens": 10} for record in half[2]]
    lossless = (0.0, Config("speculative", 4), level)
    *_, row = answers.rows_of([lossless, lossless, half], PROMPTS, None, 0)
    assert row["over_lossless"] == pytest.approx(1.5)
    assert row["over_lossless_high"] - 1.5 == pytest.approx(1.645 * 0.5 / np.sqrt(40), rel=0.2)
    assert row["p"] is None and "score" not in row


def test_every_family_has_the_setting_that_is_predicted_fastest() -> None:
    def tuned(family: str, verifier: str, width: int, speed: float) -> dict:
        policy = family if family == "speculative" else f"{family}=0.5"
        return {"family": family, "verifier": verifier, "num_draft_tokens": width,
                "policy": policy, "predicted_speed": speed}  # fmt: skip

    lossless = [tuned("speculative", "chain", 2, 9.0), tuned("speculative", "block", 3, 9.5)]
    results = {
        key(0.05): {"lines": [*lossless, tuned("band:price", "chain", 4, 10.0)]},
        key(0.1): {"lines": [*lossless, tuned("band:price", "chain", 4, 10.0),
                                tuned("band:price", "block", 6, 11.0)]},
    }  # fmt: skip
    args = argparse.Namespace(nats=[0.05, 0.1], policy=[], temperature=0.7, top_p=1.0, batch=1)
    lines = answers.chosen(args, SimpleNamespace(results=results, path=Path("journal.jsonl")))
    assert [(level, own.policy, own.num_draft_tokens, own.verifier) for level, own in lines] == [
        (0.0, "plain", 0, "chain"), (0.0, "speculative", 3, "block"),
        (0.0, "speculative", 2, "block"), (0.05, "band:price=0.5", 4, "chain"),
        (0.1, "band:price=0.5", 6, "block"),
    ]  # fmt: skip
    args.policy = ["speculative", "mixture:alpha=0.9"]
    results = {key(level): {"lines": lossless, "over": [f"None at {level}."]}
               for level in args.nats}  # fmt: skip
    journal = SimpleNamespace(results=results, path=Path("journal.jsonl"))
    with pytest.raises(ValueError, match=r"must leave a line; None at 0.05. None at 0.1.$"):
        answers.chosen(args, journal)


def test_a_policy_may_be_within_the_larger_of_two_levels_alone(monkeypatch) -> None:
    """Calls are timed once, at the level that the most policies keep."""
    made = []

    def timed(pair, prompts, repeats, settings) -> Costs:
        made.append(settings)
        return replace(Costs.ratios(0.1), verify={key: (0.01, 0.01) for key, _ in settings})

    monkeypatch.setattr(tuned, "timed", timed)
    monkeypatch.setattr(tuned, "logged", lambda *_, **__: Trace.open("simulations/data/trace"))
    sizes = {"num_draft_tokens": [1], "batch": 1, "timings": 1, "out": Path("build")}
    law = {"nats": [0.05, 9.0], "policy": ["mixture:alpha=0.9"], "temperature": 1.0, "seed": 0}
    law["top_p"] = 1.0
    args = argparse.Namespace(**sizes, **law)
    results: dict[str, dict] = {}
    journal: Any = SimpleNamespace(results=results, add=results.__setitem__)
    pair: Any = None
    tuned.tune_all(args, journal, pair, [[1]], 8, cycles=1)
    found = {level: {own["family"] for own in results[key(level)]["lines"]} for level in args.nats}
    assert len(made) == 1 and found == {0.05: {LOSSLESS}, 9.0: {LOSSLESS, "mixture:alpha=0.9"}}
    assert "mixture:alpha=0.9 spends at most 0.05" in answers.over(args, journal)[0]


def test_prompts_without_what_a_score_reads_start_no_decode(tmp_path: Path, capsys) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "one"}\n' * 4)
    asked = ["answers", "--target", "nothing", "--prompts", f"{tmp_path}/p.jsonl"]
    for more, said in (("--score gsm8k", "p.jsonl must hold 'answer' for this score"),
                       ("--batch 2", "must be below the 2 prompts that are answered")):  # fmt: skip
        assert main([*asked, *more.split(), "--out", f"{tmp_path}/out"]) == 2
        assert said in capsys.readouterr().err


@thorough
def test_a_run_is_taken_up_and_scored_again_without_a_decode(tmp_path: Path, capsys) -> None:
    asked = ("answers --policy speculative:tilt --policy band:hold=eos "
             "--policy mixture:alpha=0.9 --num-prompts 3 "
             "--max-new-tokens 6 --num-draft-tokens 2 --cycles 4 --timings 1 --temperature 0.9 "
             f"--top-p 0.95 --batch 2 --threads 1 --out {tmp_path}").split()  # fmt: skip
    assert main(asked) == 0
    rows, notes = read_csv(tmp_path / "answers.csv")
    kept = (tmp_path / "journal.jsonl").read_text()
    methods = ["plain", "speculative", "speculative", "band", "speculative"]
    assert [row["method"] for row in rows] == methods
    assert {json.loads(own)["job"].count("tuned") for own in kept.splitlines()[1:]} == {0, 1}
    assert json.loads(kept.splitlines()[1])["costs"]["batch"] == 2
    assert all(float(row["kl_per_token"]) > 0 for row in rows[3:]) and "hold" in rows[3]["knob"]
    assert (tmp_path / "answers.png").is_file() and notes["dtype"] == "float32"
    (tmp_path / "mine.py").write_text("def score(prompt, text):\n    return len(text) > 9")
    assert main([*asked, "--score", f"{tmp_path}/mine.py:score"]) == 0
    assert (tmp_path / "journal.jsonl").read_text() == kept
    assert "score" in read_csv(tmp_path / "answers.csv")[0][0]
    said = capsys.readouterr().out
    assert "prompts make that significant" in said
    assert said.count("No setting of mixture:alpha=0.9 spends at most 0.05 nats of KL") == 2


def test_a_score_of_three_arguments_gets_the_columns_of_the_line(tmp_path: Path) -> None:
    body = "def score(prompt, text, line):\n    return text == line['answer'] and prompt == 'two?'"
    (tmp_path / "mine.py").write_text(body)
    own = score_of(f"{tmp_path}/mine.py:score")
    assert own is not None
    asked = Prompt("two?", columns={"answer": "2"})
    assert (own(asked, "2"), own(asked, "3")) == (1.0, 0.0)
    with pytest.raises(ValueError, match="mine.py:score raised KeyError: 'answer'"):
        own(Prompt("two?"), "2")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def score(prompt, text): return float('nan')", "must return finite numbers; got nan"),
        ("def score(prompt, text): return text + 1", "score raised TypeError"),
        (
            "def score(text): return 1",
            r"must take a prompt and .*; got score\(text\)",
        ),
        ("score = 3", "must be a function"),
        ("def other(text): return 1", "must define score; got no such name"),
    ],
)
def test_a_score_that_is_none_is_named(tmp_path, body, said) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises((ValueError, TypeError), match=said):
        score_of(f"{tmp_path}/mine.py:score")(Prompt("prompt"), "text")


def test_a_score_is_a_function_of_a_file_or_reads_the_columns_of_its_prompt(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, text):\n    return len(text)")
    score = score_of(f"{tmp_path}/mine.py:score")
    assert score is not None and score(Prompt("prompt"), "abc") == 3 and score_of(None) is None
    score = score_of("gsm8k")
    assert score is not None and score(Prompt("2 + 3?", columns={"answer": "#### 5"}), "It is 5.")


def test_at_temperature_0_nats_are_of_regret(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    sizes = "--num-prompts 4 --batch 2 --max-new-tokens 8 --cycles 24 --num-draft-tokens 3"
    asked = f"answers --temperature 0 --nats 0.1 {sizes} --timings 1 --out {out}"
    assert main([*asked.split(), "--policy", "regret@block", "--policy", "regret@chain"]) == 0
    rows, _ = read_csv(out / "answers.csv")
    judges = [(row["method"], row["verifier"]) for row in rows]
    assert judges[:3] == [("plain", ""), *[("regret", "chain")] * 2]
    assert sorted(judges[3:]) == [("regret", "block"), ("regret", "chain")]
    assert [float(row["kl_per_token"]) > 0 for row in rows] == [False] * 3 + [True] * 2
    capsys.readouterr()
