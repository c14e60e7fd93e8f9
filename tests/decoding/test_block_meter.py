"""What a decode by blocks reports, recomputed from every row and token that it saw."""

import math

import pytest
import torch

from cactus_theory.decoding import ByPosition, ModelDrafter, generate
from cactus_theory.divergences import divergence
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._records import Path
from tests.amounts import some
from tests.decoding.test_ragged import padded, prompts

POLICIES = ["speculative", "band:price=1.5", "cactus:delta=0.4", "soft_band:price=1"]
NEW, WIDTH, LEAST = 24, 5, 20
# sums of some hundred terms of float64 rows
ROUNDING = 1e-9


class Log:
    """Every row of every round, and from how many new tokens on: a text's own, in order."""

    def __init__(self, batch):
        self.texts = [[] for _ in range(batch)]
        self.certain = False

    def __call__(self, q, draft, places, before):
        for row, (place, made) in enumerate(zip(places, before, strict=True)):
            count = draft.lengths[row]
            ids = draft.token_ids[row, :count].tolist()
            own_q = q[row, :count].clone()
            if draft.probs is None:
                self.certain = self.certain or count > 0
                own_p = torch.nn.functional.one_hot(
                    draft.token_ids[row, :count], q.shape[-1]
                ).double()
            else:
                own_p = draft.probs[row, :count].clone()
            self.texts[place].append((made, ids, own_q, own_p))


def looking_ahead(q, ids, place, price):
    """Return the row that knows its later rows, by the recursion as it is written."""
    follows = math.exp(1 / price)
    for later in range(len(ids) - 1, place, -1):
        q_n = float(q[later, ids[later]])
        follows = math.exp(1 / price) * (1 - q_n + q_n * follows)
    row = q[place].double().clone()
    row[ids[place]] *= follows
    return row / row.sum()


def recomputed(log, lengths, choose):
    """Return rows, KL, the largest row's KL and expected tokens, following P by its definition."""
    spent, expected = [], 0.0
    for rounds, length in zip(log.texts, lengths, strict=True):
        ends = [made for made, *_ in rounds[1:]] + [length]
        for (made, ids, q, p), end in zip(rounds, ends, strict=True):
            alive = 1.0
            for i in range(min(end - made, len(ids))):
                path = Path(
                    torch.tensor([alive], dtype=torch.float64), torch.tensor([len(ids) - 1 - i])
                )
                rule = choose(made + i)
                h = rule.target_in_block(q[i : i + 1], p[i : i + 1], path)[0]
                if log.certain and getattr(rule, "ahead", False):
                    h = looking_ahead(q, ids, i, rule.price)
                spent.append(float(divergence("kl").value(h, q[i])))
                expected += float(torch.minimum(p[i], alive * h).sum() / alive)
                alive = min(1.0, alive * float(h[ids[i]] / p[i, ids[i]]))
    return len(spent), sum(spent), max(spent), expected


def check_meter(found, log, choose):
    rows, kl, largest, expected = recomputed(log, found.row_lengths, choose)
    assert found.meter.rows == rows > LEAST
    assert found.meter.kl == pytest.approx(kl, abs=ROUNDING)
    assert found.meter.largest_row_kl == pytest.approx(largest, abs=ROUNDING)
    assert found.meter.expected_accepted == pytest.approx(expected, abs=ROUNDING)
    assert found.meter.accepted == found.num_accepted


KINDS = [(False, None), (True, None), (False, (15, 22)), (True, (15, 22))]


@pytest.mark.parametrize(("certain", "ends"), some(KINDS, 2))
@pytest.mark.parametrize("policy", [*some(POLICIES, 3), "valued"])
def test_the_meter_equals_a_recomputation(tiny, policy, certain, ends, values_file):
    spec = f"soft_band:price=1,values={values_file}" if policy == "valued" else policy
    ids, mask = padded(prompts(seed=3)[:4])
    log, rule = Log(len(ids)), find_policy(spec)
    found = generate(
        tiny[0], ModelDrafter(tiny[1], greedy=certain), ids, attention_mask=mask, policy=spec,
        num_draft_tokens=WIDTH, max_new_tokens=NEW, eos_token_ids=ends, verifier="block",
        on_rows=log, seed=2,
    )  # fmt: skip
    check_meter(found, log, lambda position: rule)
    assert (found.meter.kl > 0.01) == (spec != "speculative")
    assert (len(set(found.row_lengths)) > 1) == (ends is not None)


def test_the_meter_follows_a_schedule_inside_a_block(tiny):
    """Policies change in the middle of blocks; P goes on through the change."""
    rules = [find_policy(spec) for spec in ("soft_band:price=0.5", "speculative", "band:price=1")]
    steps = ByPosition([(0, rules[0]), (7, rules[1]), (12, rules[2])])
    log = Log(1)
    found = generate(
        *tiny, torch.tensor([[1, 5, 9]]), policy=steps, num_draft_tokens=WIDTH,
        max_new_tokens=2 * NEW, verifier="block", on_rows=log, seed=2,
    )  # fmt: skip
    check_meter(found, log, lambda at: rules[0 if at < 7 else 1 if at < 12 else 2])


def test_the_recorded_rows_are_those_charged(tiny):
    log = Log(1)
    found = generate(
        *tiny, torch.tensor([[1, 5, 9]]), policy="soft_band:price=1", num_draft_tokens=WIDTH,
        max_new_tokens=NEW, verifier="block", on_rows=log, record_rows=True, seed=1,
    )  # fmt: skip
    rounds = log.texts[0]
    ends = [made for made, *_ in rounds[1:]] + [NEW]
    charged = [
        (q[i], p[i], ids[i], i < end - made - 1)
        for (made, ids, q, p), end in zip(rounds, ends, strict=True)
        for i in range(min(end - made, len(ids)))
    ]
    q, p, ids, kept = zip(*charged, strict=True)
    assert torch.allclose(found.rows.target_probs, torch.stack(q), atol=ROUNDING)
    assert torch.allclose(found.rows.draft_probs, torch.stack(p), atol=ROUNDING)
    assert found.rows.draft_token_ids.tolist() == list(ids)
    assert found.rows.accepted.tolist() == list(kept)
