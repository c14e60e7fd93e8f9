"""Texts that the target writes: both models' rows along them, and what policies do there."""

from types import SimpleNamespace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import FourBit
from simulations.__main__ import main
from simulations.common.walk import walked
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
    texts, rows = [list(prompt) for prompt in PROMPTS], {}
    for step in walked(pair, PROMPTS, 12, coins(0)):
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
    assert len(list(walked(own, PROMPTS, 2, coins(0)))) == 2


def written(pair, count=6, width=3):
    kept = [[] for _ in range(count)]
    for step in walked(pair, PROMPTS * 2, 8, coins(1)):
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


@thorough
def test_tables_are_of_the_journal(tmp_path, capsys):
    given = ["price-travels", "--num-prompts", "4", "--batch", "4", "--max-new-tokens", "6",
             "--laws", "speculative", "--policy", "band:price", "--nats", "0.05",
             "--elsewhere", "tempered", "--out", str(tmp_path / "p")]  # fmt: skip
    assert main(given) == 0
    tables = [
        (tmp_path / "p" / f"{name}.csv").read_text() for name in ("price_travels", "same_nats")
    ]
    assert main(given) == 0 and "writing" not in capsys.readouterr().err.splitlines()[-1]
    assert tables[0] == (tmp_path / "p/price_travels.csv").read_text()
