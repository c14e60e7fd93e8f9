"""What rules cost: FLy's nats against enumerated Markov texts, the command on the shipped pair."""

import itertools

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Trace, log_trace
from cactus_theory.verify import Fly
from simulations import fly_nats, rules
from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.markov import Setting, every_round, markov_pair
from simulations.rules import AT_ZERO, SAMPLED
from tests.amounts import thorough

EXACT = 1e-12
# float16 log-probabilities of the trace, and a float32 pass of the models
LOGGED = 2e-3


def exact_ahead(pair, states, depth):
    """Return v_0 … v_depth after every token at each state, added up over all drafts."""
    ratio = torch.minimum(pair.target, pair.draft)
    kept = [torch.ones(len(pair.target)).double()]
    for _ in range(depth):
        kept.append((ratio * kept[-1][pair.following]).sum(-1))
    return torch.stack([own[pair.following[states]] for own in kept], -1)


@pytest.mark.parametrize(("width", "window"), [(3, 1), (4, 2), (4, None), (4, 3)])
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_a_rows_law_is_that_of_all_drafts(width, window, zeros):
    pair = markov_pair(3, seed=2, distance=1.5, zeros=zeros)
    verifier = Fly(window=window, entropy=0.2)
    setting = Setting("speculative", width, width + 1, verifier)
    rounds = every_round(pair, setting)[0][0]
    for path in itertools.product(range(3), repeat=width):
        states = [pair.start]
        for token in path:
            states.append(int(pair.following[states[-1], token]))
        states = torch.tensor(states[:-1])
        q, p, ids = pair.target[states], pair.draft[states], torch.tensor(path)
        if not bool((p.gather(-1, ids[:, None]) > 0).all()):
            continue
        own = exact_ahead(pair, states, 6)
        node, chance = 0, 1.0
        for place, (reached, law) in enumerate(fly_nats.node_laws((q, p, ids), own, verifier)):
            assert chance * reached == pytest.approx(float(rounds.alive[place][0, node]), abs=EXACT)
            due = rounds.following[place][0, node]
            np.testing.assert_allclose(law, due, atol=EXACT / max(reached * chance, 1e-3))
            chance *= float(p[place, path[place]])
            node = 3 * node + path[place]


def test_a_logged_text_is_written_again_and_drafted_on(shipped, tmp_path):
    prompts = [[5, 9, 11], [7, 7]]
    sizes = {"num_draft_tokens": 3, "max_new_tokens": 6, "cycles": 3, "seed": 4}
    trace = log_trace(shipped.target, shipped.draft, prompts, tmp_path / "t", **sizes)
    for cycle in trace:
        prompt = prompts[cycle.text % 2]
        before = fly_nats.written(shipped, prompt, trace, cycle.text)[
            : len(prompt) + cycle.position
        ]
        rows = shipped.target(torch.tensor([before])).logits[0, -1].double().softmax(-1)
        assert (rows - cycle.target_probs[0]).abs().max() < LOGGED
    source = torch.Generator().manual_seed(0)
    for half in fly_nats.drafted_on(shipped, before, cycle.draft_probs[0], 2, source):
        assert half.shape == (trace.header.vocab_size, 3)
        assert (half[..., 0] == 1).all() and (half.diff(dim=-1) <= 1e-12).all() and half.min() >= 0


def test_greedy_rules_keep_exact_matches_and_count_changes():
    q = torch.tensor([[0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05], [1.0, 0, 0]]).double()
    ids, logits = torch.tensor([[1, 0, 1]]), (5 + (q / q.amax(-1, keepdim=True)).log())[None]
    found = {
        (own.engine, own.setting): int(rules.accepted(own.policy, own.verifier, ids, logits))
        for own in AT_ZERO
    }
    assert found["all engines", "exact match"] == found["TensorRT-LLM", "default k=1 δ=0"] == 0
    assert found["MAX, ATOM", "default k=10 δ=0.6"] == 2  # 0.05 < 0.9 − 0.6
    assert found["MARS", "θ=0.9"] == 2 and found["MARS", "θ=0.97"] == 0  # ln(0.5/0.4) = 0.22 < 0.5
    told = rules.counted(AT_ZERO[3].policy, "chain", [(ids, logits)] * 2, [], "two")
    assert told["tokens_per_call"].value == 3 and told["changed_calls"].value == 1
    assert told["tv_per_token"].value == pytest.approx(1 / 3)
    ended = rules.counted(
        AT_ZERO[3].policy, "chain", [(ids, logits)], [1], "one"
    )  # the first draft ends it
    assert ended["tokens_per_call"].value == ended["tv_per_token"].value == 1


@thorough
def test_the_command_prices_every_rule(tmp_path, capsys):
    out = tmp_path / "rules.csv"
    small = "--cycles 6 --ahead 2 --max-new-tokens 8 --num-draft-tokens 3 --greedy-prompts 2"
    words = ["table", "rules", *small.split(), "--work", str(tmp_path / "w"), "--out", str(out)]
    assert main(words) == 0
    rows, notes = read_csv(out)
    assert len(rows) == 2 * len(SAMPLED) + len(AT_ZERO) and "estimated" in notes["nats"]
    by = {(row["drafts"], row["temperature"], row["engine"], row["setting"]): row for row in rows}
    lossless = by["greedy", "1", "SGLang", "default 1, 1"]
    assert abs(float(lossless["kl_per_token"])) < 1e-9
    for row in rows:
        if row["temperature"] == "0":
            assert row["kl_per_token"] == row["block_kl_at_tokens"] == ""
        else:
            assert float(row["kl_per_token"]) >= -1e-9
    shown = capsys.readouterr().out
    assert "temperature 0, greedy drafts" in shown and "vLLM FLy" in shown
    assert main(["table", "rules", "--cycles", "0"]) == 2
    trace = Trace.open(tmp_path / "w" / "sampled")
    assert trace.num_draft_tokens == 3
    assert "synthetic" not in " ".join(rule.policy for rule in SAMPLED)


def test_every_setting_is_a_policy_that_its_verifier_follows():
    for rule in SAMPLED:
        ct.verify.find_verifier(rule.verifier).check(ct.policy(rule.policy))
