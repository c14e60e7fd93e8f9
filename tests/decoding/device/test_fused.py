"""Rounds verified by the fused kernels: what they decide, emit and charge, coin by coin."""

import copy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import DecodingError, device, generate
from cactus_theory.decoding.device import BY_KERNELS
from cactus_theory.decoding.device import round as device_round
from cactus_theory.divergences import read_divergence
from cactus_theory.verify import Assignment, Draft, find_verifier
from tests.amounts import some
from tests.decoding.device.test_same import ENDS, prompts
from tests.kernels.closed_forms import emitted, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
CASES = [("speculative", "chain"), ("cactus:delta=0.1", "chain"), ("band:price=1", "chain")]
CASES += [("cactus_exact:delta=0.2", "chain"), ("mixture:alpha=0.3", "chain")]
CASES += [("speculative", "block"), ("band:price=1,per_row=True", "block")]
# the meter's rows are float32
METERED = 1e-5
# alive ratios and rows of kernels are made of float32 logits
ALIVE = 1e-5
SEED = 1


def run(pair, given=None, **options):
    common = {"num_draft_tokens": 2, "max_new_tokens": 7, "eos_token_ids": ENDS, "seed": SEED}
    common |= {"device_loop": "kernels"}
    return generate(*pair, **(given or prompts(lengths=(4, 2))), **(common | options))


def recorded(monkeypatch):
    """Return the rounds to come, as (logits, verdict) in memory of their own."""
    rounds, make = [], device.kernel_step

    def recording(*args):
        step = make(*args)

        def verify(given):
            verdict = step(given)
            # or the text would outgrow its limit, and the decode not end
            assert bool((verdict.num_accepted <= given.drafted).all())
            rounds.append((_copied(given), _copied(verdict)))
            return verdict

        return verify

    monkeypatch.setattr(device, "kernel_step", recording)
    return rounds


def _copied(data):
    own = {field.name: getattr(data, field.name) for field in fields(data)}
    return replace(data, **{k: v.clone() for k, v in own.items() if isinstance(v, torch.Tensor)})


def first_numbers(batch, seed=SEED):
    """Return the seeds of the kernels: the first number of each row's own stream."""
    return torch.tensor(
        [int(np.random.default_rng(seed + b).random() * 2**53) for b in range(batch)]
    )


@pytest.mark.parametrize(("policy", "verifier"), some(CASES, 2))
def test_every_round_is_the_closed_forms_by_the_kernels_numbers(
    single, monkeypatch, interpreted, policy, verifier
):
    """Accepted counts, tokens, alive ratios, texts and the meter, from the logits of each round."""
    rounds, rule = recorded(monkeypatch), ct.policy(policy)
    result = run(single, policy=policy, verifier=verifier)
    assert result.loop == BY_KERNELS and len(rounds) == result.target_calls
    lengths, texts, charged = [4, 2], [[], []], []
    for given, verdict in rounds:
        place = torch.arange(given.token_ids.shape[1])
        ids = torch.where(place < given.drafted[:, None], given.token_ids, -1)
        rows = rows_of(given.target, given.draft, ids)
        expected = emitted(rule, verifier, rows, first_numbers(2), given.positions)
        draft = Draft(rows.ids, given.drafted.tolist(), rows.p)
        law = find_verifier(verifier).law(Assignment((rule,)), rows.q, draft)
        for row in range(2):
            if len(texts[row]) == result.row_lengths[row]:
                continue
            assert int(given.positions[row]) == lengths[row] + len(texts[row])
            count = int(verdict.num_accepted[row])
            new = [*given.token_ids[row, :count].tolist(), int(verdict.last[row])]
            assert new == [t for t in expected.output_token_ids[row].tolist() if t >= 0]
            new = new[: result.row_lengths[row] - len(texts[row])]
            texts[row] += new
            seen = slice(0, min(int(given.drafted[row]), len(new)))
            alive = torch.ones(seen.stop) if verifier == "chain" else law.alive[row, seen]
            if verifier == "block":
                assert verdict.alive[row, seen].numpy() == pytest.approx(alive.numpy(), rel=ALIVE)
            charged += zip(rows.q[row, seen], rows.p[row, seen], alive.tolist(), strict=True)
    assert texts == [[t for t in row if t >= 0] for row in result.output_token_ids.tolist()]
    assert_metered(result.reading, rule, charged)


def assert_metered(reading, rule, charged):
    spent = expected = 0.0
    for q, p, alive in charged:
        law = rule.emitted(q[None], p[None])[0]
        spent += float(read_divergence("kl").value(law, q).clamp(min=0))
        expected += float(torch.minimum(p / alive, law).sum())
    assert reading.rows == len(charged) > 4
    assert reading.emitted_divergence == pytest.approx(spent, rel=METERED, abs=METERED)
    assert reading.expected_accepted == pytest.approx(expected, rel=METERED)


@pytest.mark.filterwarnings("ignore:policy. .* relaxes nothing at temperature 0")
@pytest.mark.parametrize(("policy", "verifier"), [CASES[0], CASES[-1]])
def test_greedy_texts_are_those_of_the_usual_loop(single, interpreted, policy, verifier):
    options = {"policy": policy, "verifier": verifier, "temperature": 0.0, "max_new_tokens": 5}
    found, usual = (run(single, **options, device_loop=on) for on in ("kernels", False))
    assert (found.loop, usual.loop) == (BY_KERNELS, "host")
    assert found.output_token_ids.equal(usual.output_token_ids)
    assert found.row_rounds == usual.row_rounds
    assert found.reading.emitted_divergence == pytest.approx(
        usual.reading.emitted_divergence, rel=METERED
    )


def test_plain_decoding_by_kernels(single, interpreted):
    options = prompts(lengths=(4, 2)) | {"max_new_tokens": 4, "temperature": 0.0}
    found, usual = (
        generate(single[0], None, **options, device_loop=on) for on in ("kernels", False)
    )
    assert found.loop == BY_KERNELS and found.output_token_ids.equal(usual.output_token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "verifier"), CASES)
def test_captured_kernels_are_those_that_were_captured(single, monkeypatch, policy, verifier):
    """A band, too, is verified inside the graph, and its replays decide as single launches do."""
    moved = [copy.deepcopy(model).cuda() for model in single]
    given = {name: part.cuda() for name, part in prompts(lengths=(4, 2)).items()}
    options = {"policy": policy, "verifier": verifier, "max_new_tokens": 21}
    found, inside = run(moved, given, **options, device_loop=None), []
    prepare = device_round.Round.prepare
    monkeypatch.setattr(
        device_round.Round,
        "prepare",
        lambda own, end: (prepare(own, end), inside.append(own.in_graph))[0],
    )
    assert run(moved, given, **options, device_loop=None).output_token_ids.equal(
        found.output_token_ids
    )
    assert found.loop == BY_KERNELS and all(inside)
    monkeypatch.setattr(device_round, "captures", lambda device: False)
    single_launches = run(moved, given, **options)
    assert single_launches.output_token_ids.equal(found.output_token_ids)
    assert found.reading.emitted_divergence == pytest.approx(
        single_launches.reading.emitted_divergence, rel=METERED, abs=METERED
    )


def test_logits_that_are_no_numbers_end_the_decode(single, interpreted):
    target = copy.deepcopy(single[0])
    with torch.no_grad():
        target.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DecodingError, match="target_model: new token 0 of text 0 has no law"):
        run((target, single[1]), policy="speculative")


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_ln_q_is_what_the_target_gives_the_tokens_of_the_kernels(single, in_torch, verifier):
    given = prompts(lengths=(4, 2))
    options = {"policy": "band:price=1,per_row=True", "verifier": verifier, "max_new_tokens": 20}
    result = run(single, given, **options, log_probs=True)
    assert result.loop == BY_KERNELS
    for row, length in enumerate(result.row_lengths):
        prompt = given["input_ids"][row][given["attention_mask"][row].bool()]
        new = result.output_token_ids[row, :length]
        text = torch.cat([prompt, new])[None]
        with torch.inference_mode():
            full = single[0](input_ids=text).logits[0].log_softmax(-1)
        expected = full[len(prompt) - 1 : -1].gather(-1, new[:, None])[:, 0].double()
        assert torch.allclose(result.log_probs.target[row, :length], expected, atol=1e-4)
    gain = (result.log_probs.emitted - result.log_probs.target).nan_to_num()
    assert (
        bool((gain[result.token_charges > 0] != 0).all()) and result.reading.emitted_divergence > 0
    )
