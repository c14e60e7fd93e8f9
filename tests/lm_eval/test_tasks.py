"""Scores by columns, a floor, and the harness' model: nats above 0, answers that differ."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cactus_theory.lm_eval.__main__ import compared, main, parsed
from cactus_theory.lm_eval.tasks import TASKS, floor, last_number

ROOT = Path(__file__).resolve().parents[2]
PAIR = f"target={ROOT}/simulations/pair/target,draft={ROOT}/simulations/pair/draft"


def test_the_last_number_counts() -> None:
    right = TASKS["gsm8k"].right
    assert (
        right({"answer": "…\n#### 1,200"}, "First 7, then $1200.") and last_number("-3.50") == -3.5
    )
    assert not right({"answer": "#### 5"}, "5 of 6") and not right({"answer": "#### 5"}, "five")
    with pytest.raises(ValueError, match="line 3 must hold 'answer' .* got columns id"):
        TASKS["gsm8k"].checked({"id": 1}, "line 3")


def test_answers_to_other_items_are_the_floor() -> None:
    texts = [str(number) for number in range(12)]
    assert "items score 0.000, those to their own 1.000 (p = 0.00049)." in floor(
        lambda item, text: item == text, texts, texts
    )
    assert floor(lambda item, text: text == "1", texts, texts).endswith("nothing by this score.")


def test_arguments_may_hold_a_policy_with_several_knobs() -> None:
    known = ("target", "policy")
    asked = parsed("target=a,policy=band:price=1,hold=eos", known)
    assert asked == {"target": "a", "policy": "band:price=1,hold=eos"}
    with pytest.raises(ValueError, match="must begin with one of target, policy; got model=a"):
        parsed("model=a", known)


def test_items_are_paired_by_their_number_and_filter() -> None:
    def items(scores: str) -> list[dict]:
        fixed = {"filter": "none", "metrics": ["right", "list"], "list": [1]}
        return [{"doc_id": number, "right": float(score), "resps": [[scores[0]]]} | fixed
                for number, score in enumerate(scores)]  # fmt: skip

    (row,) = compared("task", items("1110000000"), items("0010000001")[::-1])
    assert (row["metric"], row["items"], row["score"], row["lossless"]) == (
        "right, none",
        10,
        0.3,
        0.2,
    )
    assert row["differ"] == 10
    assert (row["right_alone"], row["wrong_alone"], row["p"]) == (2, 1, 1.0)
    assert row["items_needed"] == 228  # by hand: 10 ((1.96 + .8416) √(.3 − .01)/√10 / .1)²
    halves = [own | {"right": own["right"] / 2} for own in items("1110000000")]
    (row,) = compared("task", halves, items("0010000001"))
    assert (row["score"], row["p"], row["right_alone"]) == (0.15, None, None)


def test_bad_arguments_are_refused_in_a_line(capsys) -> None:
    assert main(["--model_args", "policy=band:price=1", "--tasks", "x"]) == 2
    assert main(["--model_args", PAIR, "--tasks", "poems=file"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("--model_args: must name a target; got policy=band:price=1")
    assert said[1].endswith("--tasks: must be one of gsm8k, ifeval; got 'poems'")


HARNESS = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="needs lm_eval: make eval-test"
)
# answers of the harness' own model and of ours, greedy, by the stop strings of each item
BOTH = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from cactus_theory.lm_eval.model import Cactus
target, draft, batch = sys.argv[1:]
items = [("import os\\n", ["\\nimport", "\\nclass"]), ("def f(x):\\n", ["\\n    return", "\\n\\n"]),
         ("import re\\nx = 1\\n", ["\\n"]), ("class A", ["A(", "):\\n"])]
requests = [
    Instance("generate_until", {}, (prompt, {"until": until, "max_gen_toks": 12}), number)
    for number, (prompt, until) in enumerate(items)
]
theirs = HFLM(pretrained=target, device="cpu", dtype="float32", batch_size=int(batch))
ours = Cactus(target, draft, temperature=0, dtype="float32", batch_size=int(batch))
print(json.dumps([own.generate_until(requests, disable_tqdm=True) for own in (theirs, ours)]))
"""


@HARNESS
@pytest.mark.parametrize("batch", ["1", "2"])
def test_answers_end_where_the_harness_ends_them(batch: str) -> None:
    pair = [f"{ROOT}/simulations/pair/{name}" for name in ("target", "draft")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", BOTH, *pair, batch]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout.splitlines()[-1])
    assert ours == theirs and ours[0] == "import sys"


@HARNESS
def test_the_harness_decodes_by_a_policy_and_reads_its_meter(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "def f(", "answer": "#### 1"}\n' * 3)
    asked = ["--model_args", f"{PAIR},policy=band:price=0.5,seed=3", "--limit", "2", "--json",
             "--max_gen_toks", "12", "--tasks", f"gsm8k={tmp_path}/p.jsonl"]  # fmt: skip
    command, env = (
        [sys.executable, "-m", "cactus_theory.lm_eval"],
        os.environ | {"OMP_NUM_THREADS": "1"},
    )
    done = subprocess.run([*command, *asked], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    spent = result["spent"]
    assert spent["band:price=0.5"]["nats_per_token"] > 1e-3 > spent["speculative"]["nats_per_token"]
    (row,) = result["tasks"]
    assert (row["items"], row["differ"]) == (2, 2)
    refused = "import sys; from cactus_theory.lm_eval.model import Cactus; Cactus._refused(None)"
    done = subprocess.run([sys.executable, "-c", refused], capture_output=True, text=True, env=env)
    assert "reads the target's own probabilities, where no policy enters" in done.stderr
