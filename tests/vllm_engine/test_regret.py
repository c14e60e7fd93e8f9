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
                     for seed in range(20, 28, 2))]  # fmt: skip
NEW, WIDTH, PRICE, SAMPLED = 32, 3, 2.0, 300
LOOSE, STRICT, BAND = f"regret:price={PRICE}", "regret:price=inf", "band:price=0.5"
LEAST = 1e-6  # of the p-values of a lawful run, three of them in each of two engines


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
def plain(run):
    """What the engine emits by itself."""
    job = {"engine": engine(), "requests": greedy()}
    return [text for (text,) in texts_of(run(job).answer, job)]


def greedy(policy=None):
    return [request(own, 1, policy, temperature=0.0, max_tokens=NEW) for own in PROMPTS]


def serve(run, folder, requests, **environment):
    """Return the texts of greedy requests, those sampled beside them, readings and the end."""
    file = folder / "readings.jsonl"
    job = {"engine": engine(), "requests": requests}
    ended = run(job, CACTUS_READINGS=str(file), **environment)
    *texts, sampled = texts_of(ended.answer, job)
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    readings.sort(key=lambda one: int(one["request"].split("-")[0]))
    return [text for (text,) in texts], sampled, readings, ended


@pytest.fixture(scope="module")
def chain(run, tmp_path_factory):
    """A server of a band that offers regret: greedy requests of all three, and sampled ones."""
    requests = [*greedy(), *greedy("strict"), *greedy("loose"), request(PROMPT, SAMPLED, "loose")]
    offered = {"CACTUS_POLICIES": f"loose={LOOSE};strict={STRICT}"}
    return serve(run, tmp_path_factory.mktemp("chain"), requests, CACTUS_POLICY=BAND, **offered)


@pytest.fixture(scope="module")
def block(run, tmp_path_factory):
    """A server of regret."""
    requests = [*greedy(), request(PROMPT, SAMPLED)]
    own = {"CACTUS_POLICY": LOOSE, "CACTUS_VERIFIER": "block"}
    return serve(run, tmp_path_factory.mktemp("block"), requests, **own)


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_texts_and_readings_are_those_of_a_loop_by_hand(chain, block, verifier):
    texts, sampled, readings, ended = chain if verifier == "chain" else block
    texts, spent = texts[-len(PROMPTS) :], 0.0
    readings = [own for own in readings if own["policy"] == LOOSE]
    for prompt, text, reading in zip(PROMPTS, texts, readings, strict=True):
        due, regret, accepted = by_hand(prompt, PRICE, verifier == "block", reading["num_drafts"])
        assert text == due[:NEW] and len(due) >= NEW
        assert reading["emitted_regret"] == pytest.approx(regret, abs=1e-3)
        assert reading["num_accepted_tokens"] == accepted
        spent += regret
    assert spent > 0.5
    counters = ended.answer["counters"]
    found = counters["cactus:emitted_divergence_nats_total"]
    assert found[LOOSE] == pytest.approx(spent, abs=1e-2) and not found.get("speculative")
    # an engine in one process does not tell the ends of its last step
    found = counters["cactus:answer_divergence_nats_sum"]
    assert 0 < found[LOOSE] < spent + 1e-2 and not found.get("speculative")
    assert "divergence regret" in ended.text
    assert min(p_values(sampled, target_law())) > LEAST
    assert ended.text.count("is for temperature 0; requests above it are judged without loss") == 1


def test_a_price_of_infinity_emits_what_the_engine_alone_does(plain, chain, block):
    texts, _, readings, _ = chain
    assert texts[len(PROMPTS) : 2 * len(PROMPTS)] == plain
    assert len({tuple(text) for text in plain}) > 1
    strict = [own for own in readings if own["policy"] == STRICT]
    assert [own["emitted_regret"] for own in strict] == [0.0] * len(PROMPTS)
    loose = [[own for own in found[2] if own["policy"] == LOOSE] for found in (chain, block)]
    share = [
        sum(own["num_accepted_tokens"] for own in found) / sum(own["num_drafts"] for own in found)
        for found in (strict, *loose)
    ]
    assert share[0] < min(share[1:])


def test_another_policy_is_strict_at_temperature_0_and_says_so_once(plain, chain):
    texts, _, readings, ended = chain
    assert texts[: len(PROMPTS)] == plain
    assert sum(own["policy"] is None for own in readings) == len(PROMPTS)
    assert ended.text.count(f"{BAND} relaxes nothing at temperature 0, where vLLM decides") == 1
