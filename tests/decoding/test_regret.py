"""Relaxed greedy texts are those of loops by hand, and strict ones at a price of ∞."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.rows import greedy, softmax_in_order
from cactus_theory.cli import main
from cactus_theory.decoding import Between, Ledger, ModelDrafter, NGram, Siblings
from cactus_theory.decoding.hugging_face import speculative_generate
from cactus_theory.decoding.truncation import Cuts
from cactus_theory.divergences.regret import REGRET
from cactus_theory.testing import assert_policy_properties
from cactus_theory.traces import replay
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Draft
from cactus_theory.verify.node import nodes_of_rows
from tests.amounts import amount

transformers = pytest.importorskip("transformers")

NEW, WIDTH = 32, 7
PROMPTS = ("def f(x):", "class A:\n", "import os\n\n", "for i in range(")
PAIR = ["--target", "simulations/pair/target", "--draft", "simulations/pair/draft"]


def encoded(shipped, text):
    return shipped.tokenizer(text, return_tensors="pt").input_ids


def regret_of(row, token):
    """Return max ln q − ln q_n of logits, by hand."""
    logs = row.double().log_softmax(-1)
    return float(logs.max() - logs[token])


def stop_of(costs, price, whole):
    """Return how many drafted tokens are kept: by threshold, or all stops tried."""
    if not whole:
        return next((at for at, cost in enumerate(costs) if price * cost > 1), len(costs))
    worth = [stop - price * sum(costs[:stop]) for stop in range(len(costs) + 1)]
    return max(stop for stop, value in enumerate(worth) if value >= max(worth) - 1e-9)


@torch.inference_mode()
def by_hand(target, draft, prompt, price, whole):
    """Decode with every row of the target read anew, and drafts one by one."""
    text, calls, spent = prompt[0].tolist(), 0, 0.0
    first = len(text)
    while (room := first + NEW - len(text)) > 0:
        drafted = []
        for _ in range(min(WIDTH, room - 1)):
            logits = draft(torch.tensor([text + drafted])).logits[0, -1]
            drafted.append(int(logits.argmax()))
        rows = target(torch.tensor([text + drafted])).logits[0, len(text) - 1 :]
        costs = [regret_of(row, token) for row, token in zip(rows, drafted, strict=False)]
        stop = stop_of(costs, price, whole)
        text += [*drafted[:stop], int(rows[stop].argmax())]
        calls, spent = calls + 1, spent + sum(costs[:stop])
    return text[first:], calls, spent


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("price", [2.0, 5.0, 20.0])
def test_whole_texts_are_those_of_loops_by_hand(shipped, price, verifier):
    relaxed = 0
    for text in PROMPTS[: amount(2, 4)]:
        prompt = encoded(shipped, text)
        due, calls, spent = by_hand(
            shipped.target, shipped.draft, prompt, price, verifier == "block"
        )
        options = {"policy": f"regret:price={price}", "verifier": verifier, "eos_token_ids": ()}
        options |= {"num_draft_tokens": WIDTH, "max_new_tokens": NEW, "temperature": 0}
        got = ct.generate(shipped.target, shipped.draft, prompt, log_probs=True, **options)
        assert got.output_token_ids[0].tolist() == due and got.target_calls == calls
        assert got.reading.emitted_divergence == pytest.approx(spent, abs=1e-4)
        assert got.token_charges.sum() == pytest.approx(spent, abs=1e-4)
        assert got.log_probs.emitted.abs().max() == 0  # every row was one-hot
        relaxed += spent > 0
    assert relaxed


def test_a_price_of_infinity_is_the_library_s_greedy_search(shipped):
    for text in PROMPTS:
        inputs = shipped.tokenizer(text, return_tensors="pt")
        options = {"max_new_tokens": NEW, "do_sample": False}
        strict = shipped.target.generate(**inputs, **options)
        for verifier in ("chain", "block"):
            ours = {"custom_generate": speculative_generate, "draft_model": shipped.draft}
            ours |= {"policy": "regret:price=inf", "verifier": verifier, "num_draft_tokens": WIDTH}
            assert torch.equal(shipped.target.generate(**inputs, **options, **ours), strict)
        ours["policy"] = "regret:price=2"
        output = shipped.target.generate(**inputs, **options, **ours, return_dict_in_generate=True)
        assert output.result.reading.divergence == "regret"
        with pytest.raises(ValueError, match=r"^temperature: must be 0 with regret:price=2\.0"):
            shipped.target.generate(**inputs, **ours, do_sample=True, max_new_tokens=4)


@pytest.mark.parametrize("name", ["model", "ngram", "siblings", "ledger"])
def test_batches_keep_the_strict_text_at_a_price_of_infinity(tiny, name):
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 24, (8, 6), generator=source)
    options = {"max_new_tokens": 24, "temperature": 0, "eos_token_ids": 6}
    strict = ct.generate(tiny[0], None, ids, **options).output_token_ids
    draft = {"ngram": NGram(), "siblings": Siblings(ModelDrafter(tiny[1]), 3)}.get(name, tiny[1])
    policy = Ledger("regret:price=2", 0.0) if name == "ledger" else "regret:price=inf"
    for verifier in ("tree",) if name == "siblings" else ("chain", "block"):
        asked = options | {"policy": policy, "verifier": verifier}
        got = ct.generate(tiny[0], draft, ids, **asked)
        assert torch.equal(got.output_token_ids, strict)
        assert got.reading.emitted_divergence == 0 and got.num_accepted > 0
    loose = ct.generate(tiny[0], draft, ids, **asked | {"policy": "regret:price=0"})
    assert loose.reading.emitted_divergence > 0
    for row in range(3):  # a text behaves as if it were alone
        alone = ct.generate(
            tiny[0], draft, ids[row : row + 1], **asked | {"policy": "regret:price=0"}
        )
        length = loose.row_lengths[row]
        assert torch.equal(alone.output_token_ids[0], loose.output_token_ids[row, :length])


def test_a_ledger_s_cap_is_kept_at_every_length(tiny):
    tight, spending = 0, 0
    for run in range(amount(15, 60)):
        ids = torch.randint(0, 24, (1, 5), generator=torch.Generator().manual_seed(run))
        cap, burst = (0.005, 0.05, 0.3)[run % 3], 0.1 * (run % 2)
        price = (0.3, 2.0, 20.0)[run // 3 % 3]
        policy = Ledger(
            f"regret:price={price}" if run % 5 else "regret:delta=0.2", cap, burst=burst
        )
        draft = NGram() if run % 7 == 3 else tiny[1]
        options = {"temperature": 0, "max_new_tokens": 24, "verifier": ("chain", "block")[run % 2]}
        got = ct.generate(tiny[0], draft, ids, policy=policy, num_draft_tokens=5, **options)
        spent = got.token_charges[0].cumsum(-1)
        allowed = cap * torch.arange(1, len(spent) + 1) + burst
        assert (spent <= allowed + 1e-9).all(), run
        tight += bool((spent > 0).any())
        tree = Siblings(ModelDrafter(tiny[1], greedy=True), 2, deterministic=True)
        got = ct.generate(tiny[0], tree, ids, policy=policy, **options | {"verifier": "tree"})
        spent = got.token_charges[0].cumsum(-1)
        assert (spent <= cap * torch.arange(1, len(spent) + 1) + burst + 1e-9).all(), run
        spending += bool((spent > 0).any())
    assert min(tight, spending) >= amount(2, 20)


def test_a_ledger_stops_where_no_stop_that_it_can_pay_is_worth_more():
    """By brute force over all stops; the recursion cut off at the cap would keep a token here."""
    source, stops = torch.Generator().manual_seed(6), []
    cases = [(1.0, 0.0, 1.6, 0.0, [1.5, 0.2])] + [
        (*own, (2 * torch.rand(4, generator=source, dtype=torch.float64)).tolist())
        for _ in range(200) for own in ((0.5, 0.0, 1.5, 0.0), (1.0, 0.2, 1.0, 0.0),
                                        (0.2, 0.0, 3.0, 1.0), (0.1, 0.2, 2.0, 0.7))
    ]  # fmt: skip
    for price, cap, burst, spent, lost in cases:
        best = 1 / (1 + torch.tensor(lost, dtype=torch.float64).neg().exp())
        q = torch.stack([best, 1 - best], -1)[None]
        q = torch.cat([q, q.new_tensor([[[0.9, 0.1]]])], 1)
        ids, count = torch.ones(1, len(lost), dtype=torch.int64), len(lost)
        ledger = Ledger(f"regret:price={price}", cap, burst=burst)
        draft, state = Draft(ids, [count], None), replace(ledger.begin([1]), spent=spent)
        numbers, nodes = ledger.choose_by_nodes(state, q, draft, find_verifier("block"))
        kept = next(n for n in range(count + 1) if n == count or not nodes[n].exceeds(0.5))
        nu = price * max(4 * cap / (cap + burst - spent), 1) ** 0.5
        worth = {n: n - nu * sum(lost[:n]) for n in range(count + 1)
                 if all(spent + sum(lost[:i]) <= cap * i + burst
                        for i in range(n + 1))}  # fmt: skip
        assert kept == max(worth, key=lambda n: (worth[n], n)), (price, cap, lost)
        stops.append(kept)
    assert stops[0] == 0 and {*stops} == {0, 1, 2, 3, 4}


def test_what_is_masked_or_cut_is_never_emitted(shipped):
    prompt = encoded(shipped, PROMPTS[0])
    options = {"policy": "regret:price=0", "verifier": "block", "temperature": 0}
    options |= {"max_new_tokens": 24, "eos_token_ids": ()}
    free = ct.generate(shipped.target, shipped.draft, prompt, **options).output_token_ids
    banned = free[0].unique().tolist()[:4]
    masked = transformers.SuppressTokensLogitsProcessor(banned, device="cpu")
    drafter = ModelDrafter(shipped.draft)
    got = ct.generate(
        shipped.target, NGram(), prompt.repeat(1, 3), logits_processor=[masked], **options
    )
    assert not {*got.output_token_ids[0].tolist()} & {*banned}
    assert 0 < got.num_accepted and got.reading.emitted_divergence < math.inf
    strict = ct.generate(shipped.target, None, prompt, **options).output_token_ids
    one = Cuts(top_k=1).options(0.0, soft=True)
    del options["temperature"]
    got = ct.generate(shipped.target, drafter, prompt, **options | one).output_token_ids
    assert torch.equal(got, strict) and not torch.equal(free, strict)


def test_rows_of_any_precision_ties_and_rows_of_nan():
    q = torch.tensor([[0.375, 0.375, 0.25, 0.0]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for verifier in (ct.verify_chain, ct.verify_block):
            rows = q.to(dtype).expand(4, 2, 4)
            ids, coins = torch.arange(4)[:, None], (torch.full((4, 1), 0.99), torch.full((4,), 0.5))
            for spec, kept in (("price=inf", 1), ("price=1e9", 2), ("price=2", 3), ("price=0", 3)):
                got = verifier(f"regret:{spec}", rows, None, ids, coins=coins).output_token_ids
                assert got[:kept].tolist() == [[token, 0] for token in range(kept)]
                assert got[kept:].tolist() == [[0, -1]] * (4 - kept)
    lawless = torch.full((1, 2, 3), math.nan)
    with pytest.raises(ValueError, match="must be distributions; got NaN"):
        ct.verify_block("regret:price=1", lawless, None, ids[:1], validate=False)
    (node,) = nodes_of_rows(find_verifier("chain"), ct.policy("regret:delta=0.1"), q, q)
    assert node.charge().spent == pytest.approx(0.1) == node.charge(REGRET).spent
    assert node.charge(ct.divergence("kl")).spent != pytest.approx(0.1)


def test_soft_rows_have_the_first_argmax_of_their_scores():
    base = torch.zeros(3, 5)
    base[0, 3], base[1, 1], base[2, 4] = 1e-9, 1e-9, 1e-9  # lost in a softmax of float32
    base[1, 4] = 1e-9
    rows = softmax_in_order(base)
    assert torch.equal(greedy(rows), greedy(base)) and (rows.sum(-1) - 1).abs().max() < 1e-6
    assert not torch.equal(greedy(base.softmax(-1)), greedy(base))
    base[2] = math.nan
    assert softmax_in_order(base)[2].isnan().all()


def test_what_does_not_go_together_is_said_by_name(tiny):
    ids, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 6, "temperature": 0}
    for policy in (
        ["regret:price=2", "speculative"],
        Between("regret:price=2", opening=5, closing=6),
    ):
        with pytest.raises(
            ValueError, match=r"^policy: regret:price=2\.0 is charged in regret, and"
        ):
            ct.generate(*tiny, ids.repeat(2, 1), policy=policy, **options)
    for warm in ({"temperature": 1}, {"temperature": 0.1, "policy": Ledger("regret:price=2", 0.1)}):
        with pytest.raises(ValueError, match="^temperature: must be 0 with"):
            ct.generate(None, None, ids, **{"policy": "regret:price=2", "max_new_tokens": 6} | warm)
    with pytest.raises(
        ValueError, match="device_loop: .* regret:price=2.0 relaxes greedy decoding"
    ):
        ct.generate(*tiny, ids, policy="regret:price=2", device_loop=True, **options)
    with pytest.warns(
        UserWarning, match="band:price=1.0 relaxes nothing at temperature 0.* regret:"
    ):
        ct.generate(*tiny, ids, policy="band:price=1", **options)
    inner = Between("regret:price=2", outside="regret:price=inf", opening=5, closing=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in ("speculative", "regret:price=2", inner):
            ct.generate(*tiny, ids, policy=policy, **options)
    for spec in ("regret", "regret:price=1,delta=1"):
        with pytest.raises(ValueError, match="price, delta: exactly one must be given"):
            ct.policy(spec)


def test_the_command_prints_regret(capsys):
    asked = [
        "generate",
        *PAIR,
        "--temperature",
        "0",
        "--max-new-tokens",
        "16",
        "--verifier",
        "block",
    ]
    asked += ["--prompt", PROMPTS[0], "--policy"]
    assert main([*asked, "regret:price=2", "--top-p", "0.9", "--cap", "0.5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["emitted_regret"] > 0 and "emitted_kl" not in said and "event_bounds" not in said
    assert main([*asked, "regret:price=2"]) == 0
    assert "nats of regret, " in capsys.readouterr().err
    assert main([*asked, "band:price=1"]) == 0
    assert "band:price=1 relaxes nothing at temperature 0" in capsys.readouterr().err


@pytest.mark.thorough
def test_it_is_what_it_declares():
    for spec in ("regret:price=2", "regret:delta=0.1"):
        assert_policy_properties(ct.policy(spec))


def test_a_trace_at_another_temperature_refuses_it():
    with pytest.raises(ValueError, match="regret:price=20.0 is for temperature 0; got temp"):
        replay("simulations/data/trace", "regret:price=20")
