"""Greedy requests under a policy that is charged in regret, in real engines.

Texts are compared with a loop by hand over forward passes of the same models: drafted tokens are
kept by their regret, one by one or as the best stop of the whole draft.
"""

import json

import pytest
import torch

from tests.vllm_engine.jobs import engine, request, texts_of
from tests.vllm_engine.laws import PROMPT, models, p_values, target_law

PROMPTS = [PROMPT, *([seed, *(7 * seed + step * step for step in range(1, 6))]
                     for seed in range(20, 34, 2))]  # fmt: skip
NEW, WIDTH, PRICE, SAMPLED = 32, 3, 2.0, 400
LEAST = 1e-6  # of the p-values of a lawful run, three of them in each of three engines


def rows_of(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0].double()


def by_hand(prompt, price, whole, rounds):
    """Return the text after so many rounds of a draft, its regret, and the accepted tokens."""
    target, draft = models()
    text = [*prompt, int(rows_of(target, prompt)[-1].argmax())]
    spent, accepted = 0.0, 0
    for _ in range(rounds):
        drafted = []
        for _ in range(WIDTH):
            drafted.append(int(rows_of(draft, text + drafted)[-1].argmax()))
        rows = rows_of(target, text + drafted)[len(text) - 1 :]
        costs = [float(row.max() - row[token]) for row, token in zip(rows, drafted, strict=False)]
        stop = next((at for at, cost in enumerate(costs) if price * cost > 1), WIDTH)
        if whole:
            worth = [at - price * sum(costs[:at]) for at in range(WIDTH + 1)]
            stop = max(at for at, value in enumerate(worth) if value >= max(worth) - 1e-9)
        text += [*drafted[:stop], int(rows[stop].argmax())]
        spent, accepted = spent + sum(costs[:stop]), accepted + stop
    return text[len(prompt) :], spent, accepted


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """Return a function that serves greedy requests, beside sampled ones, once for each setting."""
    known = {}

    def serve(policy, verifier="chain"):
        if (policy, verifier) not in known:
            file = tmp_path_factory.mktemp("readings") / "readings.jsonl"
            requests = [request(own, 1, temperature=0.0, max_tokens=NEW) for own in PROMPTS]
            requests += [request(PROMPT, SAMPLED)]
            job = {"engine": engine(), "requests": requests}
            asked = {"CACTUS_READINGS": str(file), "CACTUS_VERIFIER": verifier}
            ended = run(job, **({"CACTUS_POLICY": policy} | asked if policy else {}))
            texts = texts_of(ended.answer, job)
            lines = file.read_text().splitlines() if policy else []
            readings = [one for one in map(json.loads, lines) if one["policy"] == policy]
            readings.sort(key=lambda one: int(one["request"].split("-")[0]))
            known[policy, verifier] = [own for (own,) in texts[:-1]], texts[-1], readings, ended
        return known[policy, verifier]

    return serve


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_texts_and_readings_are_those_of_a_loop_by_hand(served, verifier):
    texts, sampled, readings, ended = served(f"regret:price={PRICE}", verifier)
    assert len(readings) == len(texts) == len(PROMPTS)
    spent = 0.0
    for prompt, text, reading in zip(PROMPTS, texts, readings, strict=True):
        due, regret, accepted = by_hand(prompt, PRICE, verifier == "block", reading["num_drafts"])
        assert text == due[:NEW] and len(due) >= NEW
        assert reading["emitted_regret"] == pytest.approx(regret, abs=1e-3)
        assert reading["num_accepted_tokens"] == accepted
        spent += regret
    assert spent > 0.5
    counters = ended.answer["counters"]
    for name in ("emitted_divergence_nats_total", "answer_divergence_nats_sum"):
        found = counters[f"cactus:{name}"]
        assert found[f"regret:price={PRICE}"] == pytest.approx(spent, abs=1e-2)
        assert not found.get("speculative")
    assert "divergence regret" in ended.text
    assert min(p_values(sampled, target_law())) > LEAST
    assert ended.text.count("is for temperature 0; requests above it are judged without loss") == 1


def test_a_price_of_infinity_emits_what_the_engine_alone_does(served):
    strict, plain = served("regret:price=inf"), served(None)
    assert strict[0] == plain[0] and len({tuple(text) for text in strict[0]}) > 1
    assert {one["emitted_regret"] for one in strict[2]} == {0.0}
    assert min(p_values(strict[1], target_law())) > LEAST
    for verifier in ("chain", "block"):
        accepted = [
            sum(one["num_accepted_tokens"] for one in readings)
            / sum(one["num_drafts"] for one in readings)
            for readings in (strict[2], served(f"regret:price={PRICE}", verifier)[2])
        ]
        assert accepted[0] < accepted[1]


def test_another_policy_is_strict_at_temperature_0_and_says_so_once(served):
    texts, _, _, ended = served("band:price=0.5")
    assert texts == served(None)[0]
    assert ended.text.count("band:price=0.5 relaxes nothing at temperature 0, where vLLM") == 1
