"""Decodes with sampled paths that have certain siblings: greedy text, law, batches, meter."""

from dataclasses import dataclass

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Drafter, Ledger, generate, generate_plain
from cactus_theory.decoding.drafters import Drafting
from cactus_theory.policies._records import Path
from cactus_theory.verify import Draft
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.draw import pick_one
from tests.amounts import amount
from tests.decoding.test_law import FALSE_ALARM, PROMPT, four_tokens, next_law, p_value  # noqa: F401

TEXTS = torch.tensor([[1, 5, 9], [4, 4, 2], [7, 0, 3]])
# sums of some dozen float64 terms
ROUNDING = 1e-9


@dataclass(frozen=True)
class Siblings(Drafter):
    """Draws a path from a table of rows by last token; the likeliest token is always there, too."""

    vocab: int
    temperature: float = 2.0

    def table(self):
        source = torch.Generator().manual_seed(3)
        rows = torch.randn(self.vocab, self.vocab, generator=source, dtype=torch.float64)
        return (self.temperature * rows).softmax(-1)

    def begin(self, setting):
        return Drawn(setting.texts, self.table())


class Drawn(Drafting):
    def __init__(self, texts, table):
        self.texts, self.table = texts, table

    def propose(self, wanted, coins):
        trees = [self.tree(row, most, coins[row]) for row, most in enumerate(wanted)]
        width = max(len(tree) for tree in trees)
        table = [[*tree, *[(0, -1, False, False)] * (width - len(tree))] for tree in trees]
        columns = [torch.tensor([[own[k] for own in tree] for tree in table]) for k in range(4)]
        ids, parents, sampled, certain = (c.reshape(len(trees), width) for c in columns)
        last = torch.tensor([self.texts.ids[row][-1] for row in range(len(trees))])
        node = torch.cat([last[:, None], ids], 1)[:, :width]
        for offset in range(width):
            self.texts.propose(offset, ids[:, offset])
        return Draft(
            ids.long(), [len(tree) for tree in trees], self.table[node], parents.long(),
            [(most + 1) // 2 for most in wanted], sampled.bool(), certain.bool(),
        )  # fmt: skip

    def tree(self, row, most, coins):
        """Return (token, parent, sampled, certain) of a path and the likeliest beside it."""
        nodes, parent, last = [], -1, self.texts.ids[row][-1]
        for step in range((most + 1) // 2):
            token = pick_one(self.table[last], float(coins[step]))
            sure = int(self.table[last].argmax())
            if token != sure and len(nodes) + 1 < most:
                nodes.append((sure, parent, False, True))
            nodes.append((token, parent, True, token == sure))
            parent, last = len(nodes) - 1, token
        return nodes

    def keep(self, rows):
        pass


def decoded(target, ids, **options):
    shared = {"num_draft_tokens": 6, "verifier": "tree", "max_new_tokens": 20} | options
    return generate(target, Siblings(target.config.vocab_size), ids, **shared)


@pytest.mark.parametrize("runs", ["tree", "tree:runs=chain"])
@pytest.mark.parametrize("eos", [None, 3])
def test_greedy_output_is_the_plain_one(tiny, runs, eos):
    options = {"temperature": 0.0, "max_new_tokens": 24, "eos_token_ids": eos}
    plain = generate_plain(tiny[0], TEXTS, **options)
    found = decoded(tiny[0], TEXTS, policy="band:price=1", verifier=runs, **options)
    assert found.output_token_ids.equal(plain.output_token_ids)


def test_a_batch_is_as_alone_and_the_meter_as_recomputed(tiny):
    rounds = []
    for spec in ("soft_band:price=1", "cactus:delta=0.3"):
        both = decoded(tiny[0], TEXTS, policy=spec, seed=7, record_rows=True)
        kl, caught = 0.0, 0
        for row in range(len(TEXTS)):

            def see(q, draft, texts, before):
                rounds.append((q.clone(), draft))

            alone = decoded(tiny[0], TEXTS[row : row + 1], policy=spec, seed=7 + row, on_rows=see)
            assert alone.output_token_ids[0].equal(both.output_token_ids[row])
            kl += alone.meter.kl
            caught += alone.num_accepted
        assert both.meter.kl == pytest.approx(kl, abs=ROUNDING) and kl > 0 and caught > 10
        rows = both.rows.target_probs, both.rows.draft_probs
        if not ct.policy(spec).needs_path:  # the recorded rows are those that h is made of
            spent = ct.divergence("kl").value(ct.emitted_law(ct.policy(spec), *rows), rows[0])
            assert float(spent.sum()) == pytest.approx(kl, abs=ROUNDING)
    q, draft = rounds[0]
    fixed = draft.fixed(0)[0]
    law = draft.offers(0, [0], q[0, :1])
    expected = ct.selection_law(q[0, 0], draft.probs[0, 0], kind="certain+sampled", certain=fixed)
    assert torch.allclose(law[0], expected, atol=ROUNDING)


def test_text_has_the_target_law_and_the_first_token_the_emitted_one(four_tokens):  # noqa: F811
    target = four_tokens[0]
    source = torch.Generator().manual_seed(5)
    for spec in ("speculative", "band:price=0.5"):
        counts = torch.zeros(16, dtype=torch.float64)
        for _ in range(amount(40, 600)):
            found = decoded(
                target, PROMPT, policy=spec, generator=source, max_new_tokens=3,
                num_draft_tokens=2, meter=False,
            )  # fmt: skip
            first, second = found.output_token_ids[0, :2].tolist()
            counts[4 * first + second] += 1
        q = next_law(target)
        table = Siblings(4).table()[int(PROMPT[0, -1])]
        drawn = {"kind": "certain+sampled", "certain": [int(table.argmax())]}
        law = ct.selection_law(q.double(), table, **drawn)
        one = Path(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
        h = ct.policy(spec).target_in_block(q.double()[None], law[None], one)[0]
        assert p_value(counts.reshape(4, 4).sum(-1), h) > FALSE_ALARM
        if spec == "speculative":
            pairs = torch.cat([q[x] * next_law(target, x) for x in range(4)])
            assert p_value(counts, pairs) > FALSE_ALARM


def test_processors_see_ancestors_only(tiny):
    """A penalty on used tokens makes the text depend on all that is shown to it."""
    from transformers import RepetitionPenaltyLogitsProcessor

    options = {"temperature": 0.0, "max_new_tokens": 24}
    options["logits_processor"] = [RepetitionPenaltyLogitsProcessor(1.8)]
    plain = generate_plain(tiny[0], TEXTS, **options)
    found = decoded(tiny[0], TEXTS, policy="speculative", **options)
    assert found.output_token_ids.equal(plain.output_token_ids)
    assert found.num_accepted > 0


def test_what_cannot_follow_a_tree_says_so(tiny):
    class Other(Chain):
        drafts = ("chain", "tree")

    with pytest.raises(ValueError, match="Ledger needs one that verifies one drafted path, or"):
        Ledger("band:price=1", 0.1).check(Other())
    with pytest.raises(ValueError, match="must declare which tokens were sampled"):
        options = {"policy": "speculative", "verifier": "tree", "max_new_tokens": 4}
        generate(tiny[0], Undeclared(24), TEXTS, **options)


@dataclass(frozen=True)
class Undeclared(Siblings):
    def begin(self, setting):
        drawn = super().begin(setting)
        propose = drawn.propose

        def silent(wanted, coins):
            draft = propose(wanted, coins)
            return Draft(draft.token_ids, draft.counts, draft.probs, draft.parents)

        drawn.propose = silent
        return drawn


@pytest.mark.parametrize("runs", ["tree", "tree:runs=chain"])
def test_the_cap_of_a_ledger_holds_on_trees(tiny, runs):
    """After every token of every text, and what is booked is what the meter charges."""
    capped, free = (
        decoded(tiny[0], TEXTS, policy=policy, seed=3, verifier=runs, max_new_tokens=40)
        for policy in (Ledger("band:price=0.1", 0.02), "band:price=0.1")
    )
    allowed = 0.02 * torch.arange(1, 41)
    assert bool((capped.token_kl.cumsum(-1) <= allowed + ROUNDING).all())
    assert 0 < capped.meter.kl < free.meter.kl
    assert bool((free.token_kl.cumsum(-1) > allowed).any())
    assert capped.meter.kl > 0.5 * 0.02 * capped.token_kl.numel()  # and not by being lossless
