"""What nats leave of the mean length of answers, against the best of all laws, and in words."""

import json
import math

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.answer_bounds import mean_length
from cactus_theory.cli import main

# of the interior-point solver, in tokens of 40
PROGRAM = 1e-5
# of a sample of quantiles instead of the law, and of two digits in a table
QUANTILES = 0.02
# of the deviation over 400 resamples, four standard errors
RESAMPLED = 0.15
SAMPLE = [3, 5, 5, 9, 9, 9, 20, 21, 21, 40]


def by_program(sample, fixed, per_token):
    """Return the largest Σ h T of laws with KL(h‖q) ≤ fixed + per_token Σ h T."""
    cp = pytest.importorskip("cvxpy")
    lengths, counts = np.unique(sample, return_counts=True)
    h = cp.Variable(len(lengths), nonneg=True)
    mean, spent = lengths @ h, cp.sum(cp.kl_div(h, counts / counts.sum()))
    limits = [cp.sum(h) == 1, spent <= fixed + per_token * mean]
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-10)
    return float(cp.Problem(cp.Maximize(mean), limits).solve(solver=cp.CLARABEL, **tight))


@pytest.mark.parametrize("fixed", [0.0, 1e-4, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("per_token", [0.0, 1e-4, 0.005, 0.03])
def test_no_law_within_the_nats_writes_longer_answers(fixed, per_token):
    bounds = ct.event_bounds(cap=fixed)
    if per_token:
        bounds = ct.event_bounds(per_token=per_token, tokens=40, burst=fixed)
    found = mean_length(SAMPLE, bounds)
    best = sum(SAMPLE) / 10 if fixed == per_token == 0 else by_program(SAMPLE, fixed, per_token)
    assert found.bound == pytest.approx(best, abs=PROGRAM)
    assert (found.count, found.mean, found.longest) == (10, 14.2, 40)
    assert found.error > 0 and "no bound" not in found.sentence


@pytest.mark.parametrize(("nats", "ratio"), [(0.01, 1.15), (0.05, 1.35), (0.1, 1.52), (0.5, 2.36)])
def test_exponential_lengths_have_the_ratios_of_the_theory(nats, ratio):
    quantiles = -1000 * np.log1p(-(np.arange(100_000) + 0.5) / 100_000)
    sample = np.maximum(quantiles.round().astype(int), 1).tolist()
    assert mean_length(sample, ct.event_bounds(cap=nats)).bound / 1000 == pytest.approx(
        ratio, abs=QUANTILES
    )


@pytest.mark.parametrize(
    ("sample", "bounds"),
    [
        (SAMPLE, ct.event_bounds(cap=math.log(10))),  # one of ten is the longest
        (SAMPLE, ct.event_bounds(cap=math.inf)),
        (SAMPLE, ct.event_bounds(per_token=math.log(10) / 40, tokens=40)),
        ([64] * 5, ct.event_bounds(cap=1e-9)),  # all were cut off
    ],
)
def test_there_is_no_bound_where_the_longest_answer_is_within_the_nats(sample, bounds):
    found = mean_length(sample, bounds)
    assert found.bound == found.longest == max(sample) and found.error is None
    assert "no bound below" in found.sentence
    if bounds.cap == math.log(10):
        assert mean_length(sample, ct.event_bounds(cap=bounds.cap - 1e-6)).bound < 40


@pytest.mark.parametrize(
    "bounds", [ct.event_bounds(cap=0.05), ct.event_bounds(per_token=0.008, tokens=200)]
)
def test_the_error_is_that_of_resampled_lengths(bounds):
    draws = np.random.default_rng(3)
    sample = draws.geometric(1 / 30, 500).clip(max=200)
    again = [mean_length(draws.choice(sample, 500).tolist(), bounds).bound for _ in range(400)]
    found = mean_length(sample.tolist(), bounds)
    assert found.error == pytest.approx(np.std(again), rel=RESAMPLED)


def said(capsys, *arguments, code=0):
    assert main(["promise", *map(str, arguments)]) == code
    out = capsys.readouterr()
    return " ".join((out.err if code else out.out).split())


def test_the_command_says_what_it_rests_on(tmp_path, capsys):
    path = tmp_path / "lengths.jsonl"
    first, second, *others = ({"num_tokens": tokens} for tokens in SAMPLE)
    path.write_text("\n".join(map(json.dumps, [{"readings": [first, second]}, *others])))
    text = said(capsys, "--cap", 0.05, "--lengths", path)
    bound = mean_length(SAMPLE, ct.event_bounds(cap=0.05))
    assert f"mean length, 14.2 tokens in 10 lossless answers: at most {bound.bound:.4g}" in text
    assert "is an estimate from a sample" in text and "whatever the policy" in text
    assert "no bound below" in said(capsys, "--cap", 3, "--lengths", path)
    main(["promise", "--per-token", "0.001", "--tokens", "40", "--lengths", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)["mean_length"]
    assert found["longest"] == 40 and found["bound"] > 14.2


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "must be at least one"), ("{", "must be JSON"), ("3", "a reading each; got 3"),
     ('{"a": 1}', "None"), ('{"num_tokens": 1.5}', "must be an integer")],
)  # fmt: skip
def test_bad_lengths_are_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "lengths.jsonl"
    path.write_text(content)
    text = said(capsys, "--cap", 1, "--lengths", path, code=2)
    assert message in text and "lengths" in text
