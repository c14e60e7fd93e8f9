"""ln q and ln h of every token, from the rows of its round, by definition."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Callbacks, ModelDrafter, NGram, generate
from cactus_theory.policies._decisions import Path
from tests.amounts import some
from tests.decoding.test_ragged import padded, prompts

# float64 rows of one decode, computed twice
ROUNDING = 1e-9
DRAFTERS = {
    "model": lambda draft: draft,
    "greedy": lambda draft: ModelDrafter(draft, greedy=True),
    "ngram": lambda draft: NGram(2, 1),
}
CASES = [
    (policy, verifier, drafter)
    for drafter in DRAFTERS
    for verifier in ("chain", "block")
    for policy in ("cactus:delta=0.1", "band:price=0.7", "band:price=0.7,per_row=True", "typical")
    if policy != ("band:price=0.7,per_row=True" if verifier == "chain" else "typical")
]


class Rounds:
    """The rows of every round of every text, with how many new tokens the text had before."""

    def __init__(self, batch):
        self.texts = [[] for _ in range(batch)]

    def __call__(self, q, draft, places, before):
        for row, (place, made) in enumerate(zip(places, before, strict=True)):
            count = draft.lengths[row]
            ids = draft.token_ids[row, :count].tolist()
            p = None if draft.probs is None else draft.probs[row, :count].clone()
            self.texts[place].append((made, ids, q[row, : count + 1].clone(), p))


def looking_ahead(q, ids, place, price):
    """Return the row that knows its later rows, by the recursion as it is written."""
    follows = math.exp(1 / price)
    for later in range(len(ids) - 1, place, -1):
        q_n = float(q[later, ids[later]])
        follows = math.exp(1 / price) * (1 - q_n + q_n * follows)
    row = q[place].double().clone()
    row[ids[place]] *= follows
    return row / row.sum()


def emitted(rule, verifier, ids, q, p, i, alive):
    """Return h at drafted place i, by definition."""
    deterministic = p is None
    if deterministic:
        p = torch.nn.functional.one_hot(torch.tensor(ids), q.shape[-1]).double()
    if verifier == "chain":
        return ct.emitted_law(rule, q[i], p[i]), 1.0
    if deterministic and rule.look_ahead is not None:
        h = looking_ahead(q, ids, i, rule.price)
    else:
        path = Path(torch.tensor([alive], dtype=torch.float64))
        h = rule.target(q[i : i + 1], p[i : i + 1], path)[0]
    return h, min(1.0, alive * float(h[ids[i]] / p[i, ids[i]]))


@pytest.mark.parametrize(("policy", "verifier", "drafter"), some(CASES, 5))
def test_every_token_has_the_values_of_its_row(tiny, policy, verifier, drafter):
    ids, mask = padded(prompts(seed=3))
    rounds, rule = Rounds(len(ids)), ct.policy(policy)
    found = generate(
        tiny[0], DRAFTERS[drafter](tiny[1]), ids, attention_mask=mask, policy=policy, seed=5,
        verifier=verifier, max_new_tokens=30, num_draft_tokens=3, eos_token_ids=(7, 13),
        log_probs=True, callbacks=Callbacks(on_rows=rounds),
    )  # fmt: skip
    kinds = {"accepted": 0, "recovered": 0, "bonus": 0}
    for row, (own, length) in enumerate(zip(rounds.texts, found.row_lengths, strict=True)):
        text = found.output_token_ids[row].tolist()
        ends = [made for made, *_ in own[1:]] + [length]
        for (made, drafted, q, p), end in zip(own, ends, strict=True):
            alive = 1.0
            for i, token in enumerate(text[made:end]):
                h = q[i]
                if i < len(drafted):
                    h, alive = emitted(rule, verifier, drafted, q, p, i, alive)
                    kinds["accepted" if token == drafted[i] else "recovered"] += 1
                else:
                    kinds["bonus"] += 1
                assert found.log_probs.target[row, made + i] == pytest.approx(
                    math.log(q[i, token]), abs=ROUNDING
                )
                assert found.log_probs.emitted[row, made + i] == pytest.approx(
                    math.log(h[token]), abs=ROUNDING
                )
        assert found.log_probs.target[row, length:].isnan().all()
        assert found.log_probs.emitted[row, length:].isnan().all()
    assert min(kinds.values()) > 1, kinds
