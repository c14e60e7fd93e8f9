"""Rules of greedy decoding: each against a slow loop, and the table against replays."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from cactus_theory.base.prompts import Rendering, prompts_of
from cactus_theory.decoding import load_pair
from cactus_theory.traces import log_trace, replay
from simulations import greedy
from simulations.__main__ import main
from simulations.common.inputs import PAIR, PROMPTS

ROUNDS, WIDTH = 400, 6


@pytest.fixture(scope="module")
def places() -> greedy.Places:
    source = np.random.default_rng(4)
    shape = ROUNDS, WIDTH
    at = {name: source.random(shape) for name in greedy.NUMBERS}
    match = source.random(shape) < 0.6
    at["regret"] = np.where(match, 0.0, source.exponential(0.6, shape))
    at["rank"] = np.where(match, 1.0, source.integers(2, 14, shape))
    missing = np.arange(WIDTH) >= source.integers(2, WIDTH + 1, ROUNDS)[:, None]
    at["regret"][missing], at["rank"][missing], at["chance"][missing] = math.inf, math.inf, 0
    return at


def walked(at: greedy.Places, passes) -> list[int]:
    """Return the length of the prefix that passes, place by place."""
    counts = []
    for row in range(ROUNDS):
        count = 0
        while count < WIDTH and passes(row, count, {k: v[row, count] for k, v in at.items()}):
            count += 1
        counts.append(count)
    return counts


def test_every_rule_is_its_loop(places) -> None:
    text = np.arange(ROUNDS) // 10
    match = places["regret"] == 0
    assert greedy.threshold(places, 0.3).tolist() == walked(
        places, lambda r, i, own: own["regret"] <= 0.3
    )
    assert greedy.relaxed(places, 0.4).tolist() == walked(
        places, lambda r, i, own: own["regret"] == 0
        or (own["rank"] <= 10 and own["best"] - own["chance"] <= 0.4),
    )  # fmt: skip
    assert greedy.typical(places, 0.3).tolist() == walked(
        places, lambda r, i, own: own["regret"] == 0
        or own["chance"] >= min(0.3, math.sqrt(0.3) * math.exp(-own["entropy"])),
    )  # fmt: skip
    assert greedy.mars(places, 0.5).tolist() == walked(
        places, lambda r, i, own: own["rank"] == 1 and own["regret"] == 0
        or own["regret"] == 0 or (own["rank"] == 2 and own["logit_ratio"] > 0.5),
    )  # fmt: skip
    for window in (2, 4):
        assert greedy.fly(window)(places, 0.5).tolist() == walked(
            places, lambda r, i, own: match[r, i] or (  # noqa: B023
                own["entropy_3"] >= 0.5 and own["chance"] > 0 and i + window < WIDTH  # noqa: B023
                and match[r, i + 1 : i + 1 + window].all()),  # noqa: B023
        )  # fmt: skip
    for most, budget in ((1, math.inf), (2, 3.0)):
        left = dict.fromkeys(text.tolist(), budget)
        expected = []
        for row in range(ROUNDS):
            missed, spent, count = 0, 0.0, 0
            for lost in places["regret"][row]:
                missed, spent = missed + (lost > 0), spent + lost
                good = lost == 0 or lost <= 0.2 * (WIDTH - count)
                if not (good and missed <= most and spent <= left[text[row]] + 1e-12):
                    break
                count += 1
            left[text[row]] -= places["regret"][row, :count].sum()
            expected.append(count)
        assert greedy.asd(most, budget)(places, 0.2, text).tolist() == expected
    for price in (0.5, 2.0, math.inf):
        found = greedy.best_path(places, price)
        for row, lost in enumerate(places["regret"]):
            with np.errstate(invalid="ignore"):
                cost = [0.0 if own == 0 else price * own for own in lost]
            worth = [n - sum(cost[:n]) for n in range(WIDTH + 1)]
            assert worth[found[row]] == max(worth)
            assert all(own < max(worth) for own in worth[found[row] + 1 :])


def test_the_optimum_has_the_most_tokens_at_every_regret(places) -> None:
    names, text = greedy.NUMBERS, np.arange(ROUNDS) // 10
    texts = [[{"ended": False, "places": [[float(places[name][row, i]) for name in names]
               for i in range(WIDTH) if places["rank"][row, i] < math.inf]}
              for row in np.flatnonzero(text == own)] for own in range(ROUNDS // 10)]  # fmt: skip
    best = greedy._Sums(greedy.OPTIMUM, texts, WIDTH)
    for rule in greedy.RULES[1:]:
        own = greedy._Sums(rule, texts, WIDTH)
        for level in (0.02, 0.05, 0.1):
            if (made := own.at(level)) is not None:
                # a step of the grid of prices
                assert best.at(level)[0].value >= made[0].value - 1e-3, (rule.name, level)


def test_the_table_of_the_shipped_pair_is_that_of_replays(tmp_path, capsys) -> None:
    sizes = ["--num-prompts", "6", "--max-new-tokens", "16", "--num-draft-tokens", "2", "4"]
    asked = ["greedy", *sizes, "--regret", "0.05", "--out", str(tmp_path / "out")]
    assert main(asked) == 0
    first = (tmp_path / "out/greedy.csv").read_text()
    lines = [line for line in first.splitlines() if not line.startswith("#")]
    rows = [*csv.DictReader(lines)]
    pair = load_pair(PAIR / "target", PAIR / "draft")
    ids = [Rendering().ids(own, pair.tokenizer) for own in prompts_of(PROMPTS)[:6]]
    cold = log_trace(pair.target, pair.draft, ids, tmp_path / "trace", num_draft_tokens=4,
                     max_new_tokens=16, temperature=0)  # fmt: skip
    for width in (2, 4):
        own = {(row["rule"], row["asked"]): row for row in rows
               if row["num_draft_tokens"] == str(width)}  # fmt: skip
        strict = replay(cold, "speculative", num_draft_tokens=width).tokens_per_call
        row = own["strict", "0"]
        assert float(row["tokens_per_call"]) == pytest.approx(strict.value, abs=1e-9)
        assert float(row["tokens_per_call_se"]) == pytest.approx(strict.standard_error, abs=1e-9)
        row = own["regret, chain; margin; cascade", ""]  # at its default, ρ ≤ .3
        made = replay(cold, f"regret:price={1 / float(row['knob']):.12g}", num_draft_tokens=width)
        assert float(row["tokens_per_call"]) == pytest.approx(made.tokens_per_call.value, abs=0.02)
        best = own["regret, block", "0.05"]
        near = []
        for by in (1.02, 0.98):
            price = float(best["knob"]) * by
            made = replay(cold, f"regret:price={price}", "block", num_draft_tokens=width)
            near.append(made.tokens_per_call.value)
        assert near[0] - 1e-9 <= float(best["tokens_per_call"]) <= near[1] + 1e-9
    capsys.readouterr()
    assert main(asked) == 0  # from the journal
    assert (tmp_path / "out/greedy.csv").read_text().splitlines()[-5:] == first.splitlines()[-5:]


def test_places_have_the_logits_of_the_models() -> None:
    """The first round's first place, from a pass by hand: MARS reads raw logits."""
    pair = load_pair(PAIR / "target", PAIR / "draft")
    prompt = Rendering().ids(prompts_of(PROMPTS)[0], pair.tokenizer)
    args = SimpleNamespace(num_draft_tokens=[3], max_new_tokens=4, seed=0)
    (first, *_) = greedy._rounds(pair, prompt, args)["rounds"]
    at = dict(zip(greedy.NUMBERS, first["places"][0], strict=True))
    logits = pair.target(torch.tensor([prompt])).logits[0, -1].detach().double()
    top, q = float(logits.max()), logits.softmax(-1)
    assert at["logit_ratio"] == pytest.approx((top - at["regret"]) / top, rel=1e-5)
    assert at["best"] == pytest.approx(float(q.max()), rel=1e-5)
    assert at["entropy"] == pytest.approx(float(torch.special.entr(q).sum()), rel=1e-5)
    assert at["entropy_3"] == pytest.approx(float(torch.special.entr(q.topk(3).values).sum()), 1e-5)


def test_no_bonus_follows_an_end_and_errors_leave_a_text_out(places) -> None:
    names = greedy.NUMBERS
    texts = [[{"ended": row % 3 == 0, "places": [[float(places[name][row, i]) for name in names]
               for i in range(WIDTH) if places["rank"][row, i] < math.inf]}
              for row in range(start, start + 40)] for start in range(0, ROUNDS, 40)]  # fmt: skip
    sums = greedy._Sums(greedy.OPTIMUM, texts, WIDTH)
    loosest = int(np.argmin(greedy.OPTIMUM.knobs))
    kept = greedy.best_path(places, float(greedy.OPTIMUM.knobs[loosest]))
    drafted = np.isfinite(places["rank"]).sum(1)
    ended = np.array([own["ended"] for rounds in texts for own in rounds])
    expected = kept + 1 - (ended & (kept == drafted))
    assert sums.tokens[loosest].tolist() == expected.reshape(-1, 40).sum(1).tolist()
    found = sums.at(0.05)[0]
    for left, own in enumerate(found.left_out):
        others = greedy._Sums(greedy.OPTIMUM, texts[:left] + texts[left + 1 :], WIDTH).at(0.05)[0]
        assert own == pytest.approx(others.value, abs=1e-12)
