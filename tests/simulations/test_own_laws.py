"""Texts that a law writes itself: their rows, what policies do along them, calls foretold."""

import csv
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import FourBit
from simulations.__main__ import main
from simulations.common.walk import walked
from simulations.lengths import _row, _sums, expected_calls
from simulations.price_travels import BAND, OwnTexts, _solved
from tests.amounts import thorough
from tests.decoding.conftest import disturbed, random_llama

PROMPTS = [[1, 2, 3], [4], [5, 6]]


def coins(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pair():
    target = random_llama(eos_token_id=5)
    return SimpleNamespace(target=target, draft=disturbed(target))


def test_rows_along_texts_are_both_models_own_and_texts_end_where_they_end(pair):
    rule = ct.policy("band:price=1,hold=5")
    texts, rows = [list(prompt) for prompt in PROMPTS], {}
    for step in walked(pair, PROMPTS, rule, 12, coins(0)):
        laws = torch.stack([node.law for node in step.laws])
        assert torch.allclose(laws, rule.emitted(step.q, step.p))
        for at, number in enumerate(step.texts):
            rows[number, len(texts[number])] = step.q[at], step.p[at]
            texts[number].append(int(step.tokens[at]))
    new = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert all(5 not in own[:-1] and (own[-1] == 5 or len(own) == 12) for own in new)
    for number, text in enumerate(texts):
        for model, side in ((pair.target, 0), (pair.draft, 1)):
            whole = model(torch.tensor([text])).logits[0].softmax(-1)
            for place in range(len(PROMPTS[number]), len(text)):
                assert torch.allclose(rows[number, place][side], whole[place - 1])
    own = SimpleNamespace(target=pair.target, draft=FourBit())
    assert len(list(walked(own, PROMPTS, rule, 2, coins(0)))) == 2


def written(pair, count=6, width=3):
    kept = [[] for _ in range(count)]
    for step in walked(pair, PROMPTS * 2, ct.policy("speculative"), 8, coins(1)):
        for at, number in enumerate(step.texts):
            kept[number].append((step.tokens[at], step.q[at].float(), step.p[at].float()))
    return OwnTexts([tuple(map(torch.stack, zip(*own, strict=True))) for own in kept], [5], width)


@pytest.mark.parametrize("law", ["speculative", "speculative:tilt=0.6666666"])
@pytest.mark.parametrize("own", [True, False])
def test_a_replay_starts_a_draft_at_every_token(pair, law, own):
    """By loops: go on with min(p, h)/q of the text's token, and count what may be accepted next."""
    texts, shape, rule = written(pair), ct.policy(law), ct.policy("cactus:delta=0.05")
    found = texts.replay(rule, shape, own)
    for number, (ids, q_1, p_1) in enumerate(texts.texts):
        q, p = (shape.emitted(row, row).float().double() for row in (q_1, p_1))
        h = ct.emitted_law(rule, q, p, normalise=True)
        kept, base = torch.minimum(h, p), q if own else q_1.double()
        nats = (h * (h / base).log()).sum(-1)
        sums, ended = [0.0, 0.0, 0.0], int(ids[-1]) == 5
        for start in range(len(ids) if ended else len(ids) - 2):
            alive, sums[0], sums[1] = 1.0, sums[0] + 1, sums[1] + 1
            for place in range(start, min(start + 3, len(ids))):
                sums[1] += alive * float(kept[place].sum() - kept[place, 5])
                sums[2] += alive * float(nats[place])
                alive *= float(kept[place, ids[place]] / q_1[place, ids[place]])
        measured = found.cycles[number], found.tokens[number], found.spent["kl"][number]
        assert measured == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_a_knob_that_was_read_off_spends_the_nats(pair):
    texts, shape = written(pair), ct.policy("speculative")
    for row in _solved(texts, BAND, [0.02, 0.05], lambda own, rule: own.replay(rule, shape)):
        again = texts.replay(ct.policy("band", price=row["knob"]), shape)
        assert again.divergence_per_token().value == pytest.approx(row["level"], rel=0.05)
        assert again.tokens_per_call.value == pytest.approx(row["tokens_per_call"], rel=0.02)


@pytest.mark.parametrize("spec", ["speculative", "band:price=1", "cactus:delta=0.1"])
def test_sums_of_lengths_are_those_of_written_laws(pair, spec):
    rule, other = ct.policy(spec), ct.policy("band:price=0.5")
    args = SimpleNamespace(num_draft_tokens=3, together=1)
    steps = list(walked(pair, PROMPTS, rule, 12, coins(2)))
    sums = _sums(iter(steps), [5, 7], len(PROMPTS), args, [other])
    expected, chances = np.zeros((7, len(PROMPTS))), [[] for _ in PROMPTS]
    for step in steps:
        for at, text in enumerate(step.texts):
            q, p, n = step.q[at].double(), step.p[at].double(), int(step.tokens[at])
            h, h_other = (ct.emitted_law(one, q, p, normalise=True) for one in (rule, other))
            ends = [float(row[[5, 7]].sum()) for row in (q, h, h_other)]
            kl = float((h * (h / q).log()).sum())
            accepted = float(torch.minimum(h, p).sum())
            expected[:, text] += [1, accepted, kl, *ends[:2], n in (5, 7), ends[2]]
            chances[text].append(float(min(1, p[n] / h[n])))
    names = "tokens", "accepted", "kl", "end_target", "end_emitted", "ended", other.spec
    for name, own in zip(names, expected, strict=True):
        assert sums[name] == pytest.approx(own, rel=1e-5, abs=1e-6)
    assert sums["calls"] == pytest.approx([expected_calls(own, 3) for own in chances], rel=1e-5)


def test_calls_foretold_are_those_of_all_outcomes():
    chances, width, mean = (0.9, 0.2, 0.6, 0.5, 0.7), 2, 0.0
    for accepted in itertools.product((True, False), repeat=len(chances)):
        weight = math.prod(c if a else 1 - c for c, a in zip(chances, accepted, strict=True))
        calls = within = 0
        for one in accepted:
            calls += within == 0
            within = within + 1 if one and within < width else 0
        mean += weight * calls
    assert expected_calls(chances, width) == pytest.approx(mean)


def test_lengths_less_the_luck_of_ends_are_unbiased_and_nearer():
    """400 tables of 40 prompts; false alarm below 1e-4 (four standard errors, both signs)."""
    random, limit, prompts = np.random.default_rng(0), 60, 40

    def sums(rate: float) -> dict[str, np.ndarray]:
        chance = rate * random.uniform(0, 2, (prompts, limit)) * (random.random((prompts, 1)) + 0.5)
        came = random.random(chance.shape) < chance
        tokens = np.where(came.any(1), came.argmax(1) + 1, limit)
        inside = np.arange(limit) < tokens[:, None]
        own = {
            "tokens": tokens,
            "ended": 1.0 * came.any(1),
            "end_emitted": (chance * inside).sum(1),
        }
        ones = {name: np.ones(prompts) for name in ("accepted", "kl", "end_target", "answers")}
        return own | ones | {"calls": tokens / 2}

    drawn = [_row(sums(0.02), sums(0.04), "band:price=1") for _ in range(400)]
    raw, fair, error, calls = (np.array([row[name] for row in drawn])
        for name in ("length_ratio", "length_ratio_adjusted", "length_ratio_adjusted_se",
                     "calls_ratio_adjusted"))  # fmt: skip
    assert calls == pytest.approx(fair)
    assert fair.std() < 0.6 * raw.std()
    assert abs(fair.mean() - raw.mean()) < 4 * raw.std() / 20
    assert error.mean() == pytest.approx(fair.std(), rel=0.2)


def test_a_law_that_lossless_texts_were_not_asked_about_has_no_foretold_end():
    names = ("tokens", "accepted", "kl", "end_target", "end_emitted", "ended", "calls", "answers")
    lossless = {name: np.array([2.0, 3.0]) for name in names}
    other = {name: np.array([4.0, 5.0]) for name in names}
    column = "end_ratio_at_lossless_texts"
    assert _row(lossless, lossless, "speculative")[column] == 1
    assert _row(other, lossless, "band:price=1")[column] is None
    asked = lossless | {"band:price=1": np.array([1.0, 1.5])}
    assert _row(other, asked, "band:price=1")[column] == pytest.approx(0.5)


@thorough
def test_tables_are_of_the_journal_and_knobs_of_the_table(tmp_path, capsys):
    given = ["price-travels", "--num-prompts", "4", "--batch", "4", "--max-new-tokens", "6",
             "--laws", "speculative", "--policy", "band:price", "--nats", "0.05",
             "--elsewhere", "tempered", "--out", str(tmp_path / "p")]  # fmt: skip
    assert main(given) == 0
    tables = [
        (tmp_path / "p" / f"{name}.csv").read_text() for name in ("price_travels", "same_nats")
    ]
    assert main(given) == 0 and "writing" not in capsys.readouterr().err.splitlines()[-1]
    assert tables[0] == (tmp_path / "p/price_travels.csv").read_text()
    knobs = ["--knobs", str(tmp_path / "p/price_travels.csv"), "--num-prompts", "3"]
    given = ["table", "lengths", *knobs]
    given += "--answers 2 --together 2 --max-new-tokens 4".split()
    given += ["--eos-token-ids", "0", "--policy", "band:price", "--out", str(tmp_path / "l")]
    assert main(given) == 0
    lines = (tmp_path / "l/lengths.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if line[0] != "#"))
    assert [row["policy"].partition("=")[0] for row in rows] == ["speculative", *["band:price"] * 3]
    assert [row["policy"].partition(",")[2] for row in rows] == ["", "", "floor=0", "hold=0"]
    assert float(rows[0]["length_ratio"]) == 1 and float(rows[3]["end_ratio"]) == pytest.approx(1)
    foretold = [float(row["end_ratio_at_lossless_texts"]) for row in rows]
    assert foretold[::3] == pytest.approx([1, 1]) and foretold[2] >= max(1, foretold[1])
    assert main([*given, "--nats", "0.3"]) == 2
    said = "--knobs: price_travels.csv must hold band:price at 0.3 without another law; got no such"
    assert said in capsys.readouterr().err
