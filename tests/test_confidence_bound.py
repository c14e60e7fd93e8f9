"""Readings of answers bound the mean over prompts, and ``promise`` says all of it in words."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.confidence import LowerMean
from cactus_theory.cli import main
from cactus_theory.commands.promise import read_readings
from cactus_theory.traces import Cycle, save_trace
from cactus_theory.traces.noise_floor import TEMPERATURES, equal_temperature
from tests.amounts import amount

ALPHA, CAP = 0.1, 0.5
# of sums of probabilities
ROUNDING = 1e-9
# a simulation of RUNS is red by chance once in a million, if the bound is wrong ALPHA of the time
RUNS, RED = amount(300, 5000), 4.8


@pytest.mark.parametrize("n", [1, 2, 10])
def test_readings_of_nothing_or_all_are_covered_at_every_time(n):
    """Readings of 0 and the cap, the widest that there are: every order, no sampling."""
    bounds = {}
    for length in range(1, n + 1):
        for order in itertools.product((0, 1), repeat=length):
            readings = [CAP * one for one in order]
            bounds[order] = ct.confidence_bound(readings, CAP, ALPHA).bound
            assert CAP * sum(order) / length <= bounds[order] <= CAP
    worst = 0.0
    for p in np.linspace(0.01, 0.99, 50):
        alive, missed = {(): 1.0}, 0.0
        for _ in range(n):
            after = {(*own, one): mass * (p if one else 1 - p)
                     for own, mass in alive.items() for one in (0, 1)}  # fmt: skip
            missed += sum(mass for own, mass in after.items() if bounds[own] < CAP * p)
            alive = {own: mass for own, mass in after.items() if bounds[own] >= CAP * p}
        worst = max(worst, missed)
    assert worst <= ALPHA + ROUNDING
    assert n < 10 or worst > 0  # it is not idle


@pytest.mark.parametrize("law", ["beta", "ledger", "few"])
def test_simulated_readings_are_covered_at_every_time(law):
    source, n = np.random.default_rng(3), 60
    draws = {
        "beta": (source.beta(0.5, 3.0, (RUNS, n)), 1 / 7),
        "ledger": (1 - source.random((RUNS, n)) ** 2 / 10, 1 - 1 / 30),
        "few": ((source.random((RUNS, n)) < 0.02) * source.random((RUNS, n)), 0.01),
    }
    shares, mean = draws[law]
    looks = range(5, n + 1, 11)
    bounds = np.array([[ct.confidence_bound(CAP * own[:look], CAP, ALPHA).bound for look in looks]
                       for own in shares])  # fmt: skip
    missed = (bounds < CAP * mean).any(-1).mean()
    assert missed <= ALPHA + RED * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def test_alike_readings_have_a_narrow_bound_and_parts_add_up():
    source = np.random.default_rng(1)
    alike, apart = 0.2 + 0.01 * source.random(2000), CAP * source.integers(0, 2, 2000)
    near, far = (ct.confidence_bound(own, CAP) for own in (alike, apart))
    assert near.bound - near.mean < 0.004 < 0.015 < far.bound - far.mean < 0.05
    assert ct.confidence_bound([0.0] * 100, CAP).bound < 0.04
    whole, parts = (LowerMean(1.0, 0.0, start=-0.5) for _ in range(2))
    whole.add(-alike)
    for part in np.split(-alike, 40):
        parts.add(part)
    assert parts.bound(0.05) == pytest.approx(whole.bound(0.05), rel=1e-12)


def test_the_bound_is_where_the_average_of_supermartingales_is_one_in_alpha():
    """The definition by hand: the mean over rates of e^(λS − ψ(λ)V) is 1/α."""
    values = np.random.default_rng(0).normal(0.1, 0.3, 500).clip(min=-1.6)
    sequence = LowerMean(1.6, 0.5)
    sequence.add(values)
    guesses = [0.0, *(np.cumsum(values)[:-1] / np.arange(2, 501))]
    squares = sum((x - min(max(g, -1.6), 0.5)) ** 2 for x, g in zip(values, guesses, strict=True))
    excess = (values - sequence.bound(0.01)).sum() / 2.1
    rates = [0.95 / 2**k for k in range(10)]
    psi = [-math.log(1 - rate) - rate for rate in rates]
    average = np.mean([math.exp(r * excess - own * squares / 2.1**2)
                       for r, own in zip(rates, psi, strict=True)])  # fmt: skip
    assert average == pytest.approx(100, rel=1e-6)


def said(capsys, *arguments, code=0):
    assert main(["promise", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return " ".join((err if code else out).split())


def test_the_command_says_cap_interval_and_unit(capsys):
    text = said(capsys, "--cap", 0.1, "--rate", 0.9, 0.01)
    assert "any 0.1 90 % 74.3 % 99.9 %" in text and "any 0.1 1 % 0 % 8.05 %" in text
    assert "right at most 61.1 % of the time" in text and "temperature and truncation" in text
    assert "give rows: --trace DIR" in text and "for a whole answer" in text
    text = said(capsys, "--per-token", 0.01, "--tokens", 100, "--lossless", 8, "--rate", 0.9)
    assert "8 0 90 % 90 %" in text and "16 0.16" in text and "100 1 90 % 31.1 % 100 %" in text
    assert "1 an answer of 100" in text
    text = said(capsys, "--cap", 0.1, "--lossless", 5, "--rate", 0.9)
    assert "5 0 90 % 90 % 90 %" in text and "6 0.1 90 % 74.3 % 99.9 %" in text
    assert "tokens: must be given with per_token" in said(capsys, "--per-token", 0.1, code=2)
    assert "rate: must lie in" in said(capsys, "--cap", 1, "--rate", 2, code=2)


def write(folder: Path, *lines) -> str:
    path = folder / "readings.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_readings_of_a_file_have_a_bound(tmp_path, capsys):
    answers = [{"emitted_kl": 0.2 + 0.001 * i, "num_tokens": 40 + i} for i in range(12)]
    file = write(tmp_path, *answers)
    nats = [own["emitted_kl"] for own in answers]
    assert read_readings(file, ct.EventBounds(cap=0.5)) == (nats, 0)
    text = said(capsys, "--cap", 0.5, "--readings", file, "--rate", 0.9)
    assert "12 readings, mean" in text and "averaged over prompts" in text
    assert "prompts drawn independently, one answer each" in text
    main(["promise", "--per-token", "0.01", "--tokens", "51", "--readings", file, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["confidence_bound"]["count"] == 12 and found["nats"] == pytest.approx(0.51)
    assert found["averaged"][0]["nats"] <= 0.51
    assert len(found["by_position"]) > 3 and len(found["events"]) == 3


def test_answers_of_no_token_are_left_out_and_counted(tmp_path, capsys):
    """A server writes such a line for a request that is aborted before its first token."""
    kept = [{"emitted_kl": 0.2, "num_tokens": 40}] * 3
    aborted = {"emitted_kl": 0.0, "num_tokens": 0, "finish_reason": "abort"}
    file = write(tmp_path, aborted, *kept, aborted)
    for most in (("--cap", 0.5), ("--per-token", 0.0125, "--tokens", 40)):
        text = said(capsys, *most, "--readings", file)
        assert "3 readings, mean 0.2 nats" in text
        assert "2 answers of 0 tokens, as aborted ones are, were left out" in text
        main(["promise", *map(str, most), "--readings", file, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["answers_left_out"] == 2 and found["confidence_bound"]["count"] == 3
    file = write(tmp_path, aborted)
    assert "must be at least one" in said(capsys, "--cap", 1, "--readings", file, code=2)
    file = write(tmp_path, {"emitted_kl": 0.1, "num_tokens": -1})
    assert "num_tokens: must be" in said(capsys, "--cap", 1, "--readings", file, code=2)


def test_nats_of_a_token_given_for_an_answer_are_caught(tmp_path, capsys):
    file = write(tmp_path, {"emitted_kl": 1.9, "num_tokens": 40})
    both = ("--readings", file)
    text = said(capsys, "--cap", 0.05, *both, code=2)
    assert "line 1 must be within 0.05 nats" in text and "was --per-token meant?" in text
    assert "1 readings" in said(capsys, "--per-token", 0.05, "--tokens", 40, *both)
    text = said(capsys, "--per-token", 0.05, "--tokens", 30, *both, code=2)
    assert "--tokens: must be the most of any answer; got 30" in text
    assert "within 1.6 nats" in said(capsys, "--per-token", 0.04, "--tokens", 99, *both, code=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be at least one"),
        ("{", "must be JSON"),
        ('{"emitted_js": 1, "num_tokens": 2}', "must hold emitted_kl and num_tokens"),
        ("true", "must hold JSON objects, a reading each; got True"),
        ("1", "must hold JSON objects, a reading each; got 1"),
        ('{"emitted_kl": -1, "num_tokens": 2}', "--readings: must lie in"),
        ('{"emitted_kl": 0.1, "num_tokens": "x"}', "must hold emitted_kl and num_tokens"),
    ],
)
def test_bad_files_are_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "readings.jsonl"
    path.write_text(content)
    assert message in said(capsys, "--cap", 1, "--readings", path, code=2)
    assert "readable file" in said(capsys, "--cap", 1, "--readings", tmp_path / "no", code=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    source = torch.Generator().manual_seed(2)
    rows = (2 * torch.randn(6, 4, 3, 24, generator=source, dtype=torch.float64)).softmax(-1)
    rows[0, 0, 0, :5] = 0.0
    rows = rows / rows.sum(-1, keepdim=True)
    texts = [
        [Cycle(text, 3 * place, torch.tensor([7, 8]), q, q[:2]) for place, q in enumerate(own)]
        for text, own in enumerate(rows)
    ]
    folder = tmp_path_factory.mktemp("promise") / "trace"
    return save_trace(folder, texts, vocab_size=24, num_draft_tokens=2)


def kl_of_colder(rows, hot):
    cold = rows ** (1 / hot)
    cold = cold / cold.sum(-1, keepdim=True)
    return float(torch.where(rows > 0, cold * (cold / rows).log(), 0).sum(-1).mean())


def test_an_equal_temperature_is_as_far(trace, capsys):
    rows = torch.stack([cycle.target_probs for cycle in trace]).reshape(-1, 24)

    def nats_at(hot):
        return kl_of_colder(rows, hot)

    hot = 0.8
    nats = nats_at(hot)  # a draft that is the target is always kept: rows count alike
    found = equal_temperature(trace, nats)
    assert found.value == pytest.approx(hot, abs=1e-4) and 0 < found.standard_error < 0.1
    assert equal_temperature(trace, nats_at(0.855)).value == pytest.approx(0.855, abs=1e-4)
    assert equal_temperature(trace, 0.0).value == 1.0 and equal_temperature(trace, 50.0) is None
    asked = ("--trace", trace.folder, "--rate", 0.9)
    text = said(capsys, "--cap", 10 * nats, "--tokens", 10, *asked)
    assert "as far from the target as temperature 0.800 ±" in text and "(6 logged texts" in text
    assert f"than temperature {TEMPERATURES[0]} is" in said(
        capsys, "--per-token", 50, "--tokens", 9, *asked
    )
    assert "--tokens: must be given with --trace" in said(capsys, "--cap", 1, *asked, code=2)
