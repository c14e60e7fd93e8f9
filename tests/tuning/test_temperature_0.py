"""Temperature 0: traces, replays, comparisons and tuning in regret."""

import json
import math
from copy import deepcopy
from itertools import product

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.divergences.regret import REGRET
from cactus_theory.traces import Cycle, Trace, log_trace, replay, save_trace
from cactus_theory.traces.expected_acceptance import expect
from cactus_theory.traces.noise_floor import noise_floor
from cactus_theory.tuned import load_tuned
from cactus_theory.tuning import Costs, save_tuned, tune
from cactus_theory.tuning.knobs import STEP
from cactus_theory.tuning.report import sentence, table

VOCAB, WIDTH, END = 12, 4, 11
PRICES = 0.7, 3.0, 40.0, math.inf


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> Trace:
    """Twelve texts of 20 cycles; drafted tokens are near the best ones, one has no probability."""
    source = torch.Generator().manual_seed(8)
    texts = []
    for text in range(12):
        cycles = []
        for place in range(20):
            logits = 2 * torch.randn(WIDTH + 1, VOCAB, generator=source, dtype=torch.float64)
            noise = torch.randn(WIDTH, VOCAB, generator=source, dtype=torch.float64)
            ids = (logits[:-1] + noise).argmax(-1)
            rows = logits.softmax(-1)
            if place == 3:
                rows[1, ids[1]] = 0
            if place == 5:  # two likeliest tokens: the drafted one is the second of them
                rows[0] = 0
                rows[0, [2, 7]], ids[0] = 0.5, 7
            cycles.append(Cycle(text, 3 * place, ids, rows / rows.sum(-1, keepdim=True), None))
        texts.append(cycles)
    folder = tmp_path_factory.mktemp("cold") / "trace"
    sizes = {"vocab_size": VOCAB, "num_draft_tokens": WIDTH, "eos_token_ids": [END]}
    return save_trace(folder, texts, temperature=0.0, **sizes)


def kept(cycle: Cycle, price: float, verifier: str) -> int:
    """Return how many tokens of a cycle are kept, by brute force over all stops."""
    costs = []
    for row, token in zip(cycle.target_probs, cycle.draft_token_ids.tolist(), strict=False):
        lost = float(row.max().log() - row[token].log())
        free = int(row.argmax()) == token if math.isinf(price) else lost == 0
        costs.append(0.0 if free else price * lost if lost else math.inf)
    if verifier == "chain":
        return next((i for i, cost in enumerate(costs) if cost > 1), len(costs))
    worth = [n - sum(costs[:n]) for n in range(len(costs) + 1)]
    return max(range(len(worth)), key=lambda n: (worth[n], n))


@pytest.mark.parametrize(("price", "verifier"), [*product(PRICES, ("chain", "block"))])
def test_replays_are_brute_force_over_all_stops(cold, price, verifier) -> None:
    done = replay(cold, f"regret:price={price:g}", verifier)
    tokens, spent = np.zeros((2, cold.texts))
    for cycle in cold:
        ids, count = cycle.draft_token_ids.tolist(), kept(cycle, price, verifier)
        ended = END in ids[:count]
        used = ids.index(END) + 1 if ended else count
        tokens[cycle.text] += used + (not ended)
        lost = [float(row.max().log() - row[token].log())
                for row, token in zip(cycle.target_probs, ids[:used], strict=False)]  # fmt: skip
        spent[cycle.text] += sum(lost)
    assert done.tokens == pytest.approx(tokens, abs=1e-12)
    assert done.spent["regret"] == pytest.approx(spent, abs=1e-9)
    rows = replay(cold, done.policy, verifier, divergences=(REGRET, "surprise"))  # by rows
    assert rows.tokens == pytest.approx(tokens, abs=1e-12)
    assert rows.spent["regret"] == pytest.approx(spent, abs=1e-9)


def test_units_are_those_of_the_temperature(cold, trace) -> None:
    strict = replay(cold, "speculative")
    assert strict.policy == "regret:price=inf" and strict.spent["regret"].sum() == 0
    assert (strict.tokens == replay(cold, strict.policy, "block").tokens).all()
    with pytest.raises(ValueError, match="band:price=1.0 relaxes nothing at temperature 0, and r"):
        replay(cold, "band:price=1")
    with pytest.raises(ValueError, match="regret:price=20.0 is for temperature 0; got tempe"):
        replay(trace, "regret:price=20")
    with pytest.raises(ValueError, match="nats: are of regret at temperature 0; give regret"):
        ct.compare(["regret"], cold, nats=0.05)
    with pytest.raises(ValueError, match="regret: must be of a trace of temperature 0; got other"):
        ct.solve_knob("band", trace, regret=0.05)
    with pytest.raises(ValueError, match="lenience relaxes nothing at temperature 0"):
        ct.compare(["lenience"], cold, regret=0.05)
    with pytest.raises(ValueError, match="surprise: must not be given at temperature 0; got 0"):
        tune(cold, Costs.ratios(0.1), 0.05, surprise=0.0)
    with pytest.raises(ValueError, match="regret is for temperature 0; got nats of kl"):
        tune(trace, Costs.ratios(0.1), 0.05, policies=["regret"])


def test_expectations_are_those_of_replays(cold) -> None:
    for policy, verifier in (("speculative", "chain"), ("regret:price=2", "block")):
        due = replay(cold, policy, verifier)
        found = expect(cold, policy, verifier)
        assert found.tokens_per_call.value == pytest.approx(due.tokens_per_call.value, abs=1e-12)
    with pytest.raises(ValueError, match="lenience.* relaxes nothing at temperature 0"):
        expect(cold, "lenience:lenience=0.5")


def test_a_comparison_spends_what_is_asked_or_the_last_step_before(cold) -> None:
    found = ct.compare(None, cold, regret=[0.02, 0.1], verifiers=["chain", "block"])
    assert found.solved and found.notes["divergence"] == "regret"
    names = [line["policy"].partition("=")[0] for line in found.lines]
    assert names == ["regret:price"] * 6
    for line in found.lines:
        own = replay(cold, line["policy"], line["verifier"])
        assert line["tokens_per_call"] == own.tokens_per_call.value
        assert line["nats"] == own.divergence_per_token("regret").value
        if line["held"]:
            assert (1 - STEP) * line["asked"] <= line["nats"] <= line["asked"] * 1.0005
            assert line["over_lossless"] > 1
    by = {(line["verifier"], line["asked"]): line["tokens_per_call"] for line in found.lines}
    assert by["block", 0.02] > by["chain", 0.02] and by["block", 0.1] > by["chain", 0.1]
    assert "surprise" not in str(found).split("±")[0]
    solved = ct.solve_knob("regret", cold, regret=0.1, verifier="block")
    assert solved.spec in {line["policy"] for line in found.lines}
    budget = ct.solve_knob("regret:delta", cold, regret=0.1)
    assert budget.delta > 0  # a budget a row spends a little everywhere, by a coin


def test_tuning_finds_a_setting_that_the_file_brings_back(cold, tmp_path) -> None:
    tuned = tune(cold, Costs.ratios(0.05), 0.1)
    assert tuned.divergence == "regret" and tuned.best is not None
    keys = [choice.family.key for choice in tuned.of_families()]
    assert {*keys} == {"regret:price=inf@chain", "regret:price@chain", "regret:price@block"}
    assert keys[0] == "regret:price@block"
    for choice in tuned.choices:
        assert choice.replay.divergence_per_token("regret").value <= 0.1 * 1.002
    assert "nats of regret per token" in sentence(tuned) and "regret/token" in table(tuned)
    save_tuned(tuned, tmp_path / "tuned.json")
    setting = load_tuned(tmp_path / "tuned.json")
    assert setting.temperature == 0 and setting.divergence == "regret"
    assert setting.options["policy"].unit == ct.policy("regret:price=1").unit


def test_logged_texts_are_those_of_strict_greedy_decoding(tiny, tmp_path) -> None:
    prompts = [[1, 2, 3], [5], [7, 7]]
    sizes = {"num_draft_tokens": 3, "max_new_tokens": 12, "eos_token_ids": ()}
    cold = log_trace(*tiny, prompts, tmp_path / "trace", temperature=0, **sizes)
    assert cold.header.dtype == "float32" and not cold.manifest.total("draft_rows")
    assert cold.header.setting.policy == "regret:price=inf"
    for text, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        plain = ct.generate(tiny[0], None, ids, max_new_tokens=16, temperature=0, eos_token_ids=())
        new = plain.output_token_ids[0].tolist()
        for cycle in (cycle for cycle in cold if cycle.text == text):
            assert int(cycle.target_probs[0].argmax()) == new[cycle.position]
            assert cycle.target_probs[0].max() < 0.99  # of temperature 1, not one-hot


def test_a_policy_object_is_read_like_its_spec_and_others_are_refused(tiny, tmp_path) -> None:
    sizes = {"num_draft_tokens": 2, "max_new_tokens": 4, "temperature": 0}
    cold = log_trace(*tiny, [[1, 2]], tmp_path / "a", policy=ct.policy("speculative"), **sizes)
    assert cold.header.setting.policy == "regret:price=inf"
    assert next(iter(cold)).target_probs.max() < 0.99
    with pytest.raises(ValueError, match="band:price=1.0 relaxes nothing at temperature 0"):
        log_trace(*tiny, [[1, 2]], tmp_path / "b", policy="band:price=1", **sizes)


def test_the_commands(cold, trace, tmp_path, capsys) -> None:
    out = tmp_path / "tuned.json"
    asked = ["--cost-ratio", "0.05", "--num-draft-tokens", "2", "4"]
    assert main(["tune", "--trace", str(cold.folder), "--regret", "0.1", *asked,
                 "--out", str(out)]) == 0  # fmt: skip
    assert json.loads(out.read_text())["divergence"] == "regret"
    capsys.readouterr()
    plot = tmp_path / "plot.png"
    assert main(["compare", str(cold.folder), "--regret", "0.05", "--verifier", "block",
                 "--plot", str(plot), "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["divergence"] == "regret" and plot.exists()
    refused = {
        ("tune", "--trace", str(cold.folder), "--nats", "0.1", *asked): "nats: are of regret",
        ("tune", "--trace", str(trace.folder), "--regret", "0.1", *asked): "regret: must be of a",
        ("tune", "--trace", str(cold.folder), *asked): "--nats, --regret: exactly one must",
        ("tune", "--trace", str(cold.folder), "--regret", "0.1", "--surprise", "0", *asked):
            "--surprise: must not be given with --regret",
        ("tune", "--target", "a", "--draft", "b", "--prompts", "c", "--regret", "1"):
            "--temperature: at temperature 0 --regret must be given, above it --nats; got 1",
        ("compare", str(cold.folder), "--policy", "band"): "band relaxes nothing at temperature 0",
    }  # fmt: skip
    for arguments, words in refused.items():
        assert main([*arguments]) == 2
        assert words in capsys.readouterr().err, arguments


def test_the_noise_floor(tiny) -> None:
    """Float64 rounds to 1e-16 of logits of order 10; the same passes are the same bits."""
    target, prompts = tiny[0], [[1, 2, 3], [4, 5]]
    floor = noise_floor(target, prompts, width=4, max_new_tokens=12)
    assert 0 <= floor.per_token < 1e-14 and floor.rows == 24 and floor.dtype == "float64"
    assert floor.divergence == "kl" and floor.changed == 0
    assert noise_floor(target, prompts, width=1, max_new_tokens=6).per_token == 0
    single = noise_floor(deepcopy(target).float(), prompts, width=4, max_new_tokens=12)
    assert floor.per_token < single.per_token < 1e-6 and single.dtype == "float32"
    half = deepcopy(target).bfloat16()
    cold = [noise_floor(half, prompts * 4, width=4, max_new_tokens=24, temperature=0, seed=seed)
            for seed in range(2)]  # fmt: skip
    assert cold[0] == cold[1] and cold[0].divergence == "regret"  # greedy texts take no coin
    assert (cold[0].per_token > 0) == (cold[0].changed > 0)
    for wrong in ({"width": 0}, {"temperature": -1}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            noise_floor(target, prompts, **wrong)
    with pytest.raises(ValueError, match="prompts_ids"):
        noise_floor(target, [[]])
