"""Model runner V2's own functions emit the law of the policy, on logits that we have biased and
with our hook in its place.

No CPU build has an engine for this runner: its sampler's and rejection sampler's methods are
called one after another, interpreted by Triton, with plain tensors for their buffers. They come
from the vLLM that runs these tests, or from VLLM_SOURCE=DIR, an unpacked wheel of another version.
Seeds are fixed, and one of these runs in 1e4 fails by chance (Bonferroni over TESTS).
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import cactus_theory as ct
from cactus_theory.verify import Assignment, Draft, find_verifier
from tests.counts import p_value

HERE = Path(__file__).resolve().parent
FAMILY, TESTS, DETERMINISTIC = 1e-4, 20, 1e-6
REQUESTS = 450  # a request takes 25 ms, interpreted
LENGTHS = (2, 1, 0)  # drafted tokens, by turns
TARGET = ((0.1, 1.5, 1.0, -0.3, 0.0), (0.4, 0.2, -0.3, 0.9, 0.1), (0.0, 0.4, 0.1, 0.2, 0.3))
DRAFT = ((1.0, 0.2, 0.5, 0.0, -1.0), (0.3, 0.8, 0.1, 0.0, 0.5))
PLAIN = {
    "verifier": "chain", "heat": 0.7, "method": "standard", "deterministic": True,
    "lengths": LENGTHS, "requests": REQUESTS, "target": TARGET, "draft": DRAFT,
}  # fmt: skip
CASES = {
    "band": {"policy": "band:price=0.5"},
    "block law, method block": {
        "policy": "band:price=0.5", "verifier": "block", "method": "block",
    },
    "cuts": {"policy": "band:price=0.5", "cuts": {"top_k": 4, "top_p": 0.9}},
    "hook": {"policy": "band:price=0.5", "deterministic": False},
    "hook, block": {"policy": "band:price=0.5", "deterministic": False, "verifier": "block"},
    "greedy": {"policy": "band:price=0.5", "heat": 0.0, "requests": 6},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    jobs = [PLAIN | {"seed": number} | case for number, case in enumerate(CASES.values())]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    path = [os.environ.get("VLLM_SOURCE", ""), str(HERE.parents[1]), *sys.path]
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "runner_v2.py", folder / "jobs.json", folder / "answers.json"],
        env=os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    if not (folder / "answers.json").exists():
        pytest.fail(f"the runner gave no answer:\n{done.stderr[-4000:]}")
    return dict(zip(CASES, json.loads((folder / "answers.json").read_text()), strict=True))


def rows(name, length):
    heat = (PLAIN | CASES[name])["heat"]
    q, p = ((torch.tensor(part).double() / heat).softmax(-1) for part in (TARGET, DRAFT))
    if cuts := CASES[name].get("cuts"):
        q = torch.where(q >= q.topk(cuts["top_k"]).values[:, -1:], q, 0.0)
        q, order = (q / q.sum(-1, keepdim=True)).sort(descending=True)
        q = torch.where(q.cumsum(-1) - q < cuts["top_p"], q, 0.0).gather(1, order.argsort())
        q = q / q.sum(-1, keepdim=True)
    return q[: length + 1], p[:length]


def law_of(name, length, policy=None):
    """Return the probability of everything that a request with ``length`` drafts may emit."""
    case = PLAIN | CASES[name]
    rule, judge = ct.policy(policy or case["policy"]), find_verifier(case["verifier"])
    q, p = rows(name, length)
    paths = torch.tensor(list(itertools.product(range(5), repeat=length))).long()
    chance = p.gather(1, paths.T).prod(0)
    if case["deterministic"]:
        paths, chance = torch.tensor(DRAFT).argmax(-1)[None, :length], torch.ones(1)
    many = [row.expand(len(paths), -1, -1) for row in (q, p)]
    draft = Draft(paths, [length] * len(paths), None if case["deterministic"] else many[1])
    law, found = judge.law(Assignment((rule,)), many[0], draft), {}
    for path, share, stop, last in zip(paths.tolist(), chance, law.stop, law.last, strict=True):
        for count in range(length + 1):
            for token in range(5):
                own = (*path[:count], token)
                mass = float(share * stop[count] * last[count, token])
                found[own] = found.get(own, 0.0) + mass
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


def chance(emitted, law):
    """Return the chance of counts as far from the law; 0 if one of them is impossible."""
    seen = Counter(map(tuple, emitted))
    if not seen.keys() <= law.keys():
        return 0.0
    counts = torch.tensor([seen[own] for own in law])
    return p_value(counts, torch.tensor([*law.values()], dtype=torch.float64))


SAMPLED = [name for name in CASES if name != "greedy"]


@pytest.mark.parametrize("name", SAMPLED)
def test_the_law_of_everything_a_request_emits(answers, name):
    emitted = answers[name]["emitted"]
    for turn, length in enumerate(LENGTHS):
        own = emitted[turn :: len(LENGTHS)]
        assert all(1 <= len(tokens) <= length + 1 for tokens in own)
        assert chance(own, law_of(name, length)) > FAMILY / TESTS
        if length:
            assert chance(own, law_of(name, length, "speculative")) < DETERMINISTIC


def test_drafts_of_the_engine_have_the_law_that_the_hook_takes_them_for(answers):
    _, p = rows("hook", 2)
    drafted = [tuple(own) for own in answers["hook"]["drafted"]]
    law = {(i, j): float(p[0, i] * p[1, j]) for i in range(5) for j in range(5)}
    assert chance(drafted, law) > FAMILY / TESTS


def test_greedy_requests_are_decided_as_the_engine_does(answers):
    """Drafted: 0, of which the target's largest logit is not."""
    assert answers["greedy"]["emitted"] == [[1]] * 6
