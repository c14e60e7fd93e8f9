"""A tree drafter and a tree verifier of one file each dock without a change to the loop."""

from dataclasses import dataclass, fields

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ByPosition, Drafter, ModelDrafter, generate, generate_plain
from cactus_theory.decoding.drafters import Drafting
from cactus_theory.verify import Assignment, Chain, Draft, Verdict, Verifier
from cactus_theory.verify.draft import Verified

PROMPT = torch.tensor([[1, 5, 9], [4, 4, 2]])
EOS = 3


@dataclass(frozen=True)
class Oracle(Drafter):
    """Drafts a tree of two branches: junk, and greedy tokens of a known text, one wrong."""

    texts: tuple[tuple[int, ...], ...]
    depth: int = 3

    def begin(self, setting):
        return OracleDrafting(setting.texts, self)


class OracleDrafting(Drafting):
    def __init__(self, texts, options):
        self.texts, self.known, self.depth = texts, list(options.texts), options.depth

    def propose(self, wanted, coins):
        rows, parents, counts = [], [], []
        for row, room in enumerate(wanted):
            length = self.texts.lengths[row]
            depth = min(self.depth, room // 2)
            right = list(self.known[row][length : length + depth])
            if length % 2 and len(right) > 1:
                right[-1] = (right[-1] + 1) % 10  # a refusal now and then
            ids, own = [], []
            for place, token in enumerate(right):  # branches interleaved: 0, 2, 4 and 1, 3, 5
                ids += [(token + 7) % 20, token]
                own += [2 * place - 2, 2 * place - 1] if place else [-1, -1]
            rows.append(ids)
            parents.append(own)
            counts.append(len(ids))
        width = max(counts)
        pad = [row + [0] * (width - len(row)) for row in rows]
        follow = [own + [-1] * (width - len(own)) for own in parents]
        ids = torch.tensor(pad, dtype=torch.int64).reshape(len(rows), width)
        for offset in range(width):
            self.texts.propose(offset, ids[:, offset])
        return Draft(ids, counts, None, torch.tensor(follow).reshape(ids.shape))

    def keep(self, rows):
        self.known = [self.known[row] for row in rows]


class GreedyTree(Verifier):
    """Follows the target's likeliest tokens down the tree."""

    name = "greedy_tree"
    drafts = ("tree",)

    def coins(self, drafted):
        return 0

    def verify(self, assigned, target_probs, draft, accept, draw):
        ids, parents = draft.token_ids, draft.parents
        path = torch.full_like(ids, -1)
        accepted, last, charged = [], [], []
        for row, count in enumerate(draft.lengths):
            at, kept, rows = -1, [], [0]
            while True:
                best = int(target_probs[row, at + 1].argmax())
                following = [
                    i
                    for i in range(count)
                    if int(parents[row, i]) == at and int(ids[row, i]) == best
                ]
                if not following:
                    break
                at = following[0]
                kept.append(at)
                rows.append(at + 1)
            path[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
            accepted.append(len(kept))
            last.append(best)
            charged.append(rows)
        return Verdict(ids, torch.tensor(accepted), torch.tensor(last), path, charged)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("eos", [None, EOS])
def test_a_tree_decodes_the_greedy_text(tiny, fast, eos):
    target, _ = tiny
    options = {"max_new_tokens": 30, "temperature": 0.0, "eos_token_ids": eos}
    plain = generate_plain(target, PROMPT, **options)
    whole = generate_plain(target, PROMPT, max_new_tokens=40, temperature=0.0)
    texts = tuple(
        tuple(prompt + own)
        for prompt, own in zip(PROMPT.tolist(), whole.output_token_ids.tolist(), strict=True)
    )
    found = generate(
        target,
        Oracle(texts),
        PROMPT,
        policy="speculative",
        num_draft_tokens=6,
        verifier=GreedyTree(),
        fast_forward=fast,
        meter=False,
        **options,
    )
    assert found.output_token_ids.tolist() == plain.output_token_ids.tolist()
    assert found.tokens_per_call > 2


@dataclass(frozen=True)
class Bush(Drafter):
    """Drafts with a model, and beside each of its tokens one that the verifier passes over."""

    model: object
    greedy: bool

    def begin(self, setting):
        return BushDrafting(setting, ModelDrafter(self.model, self.greedy).begin(setting))


def trunk_nodes(drafted):
    """Return the nodes of a bush of so many tokens that its trunk goes through."""
    return [0, *range(1, drafted, 2)]


class BushDrafting(Drafting):
    def __init__(self, setting, inner):
        self.texts, self.inner = setting.texts, inner

    def propose(self, wanted, coins):
        trunk = self.inner.propose([own // 2 for own in wanted], coins)
        width = trunk.token_ids.shape[1]
        both = torch.stack([trunk.token_ids, (trunk.token_ids + 1) % 24], -1)
        ids = both.reshape(len(wanted), 2 * width)
        for offset in range(2 * width):
            self.texts.propose(offset, ids[:, offset])
        parents = torch.arange(-2, 2 * width - 2, 2).clamp(min=-1).repeat_interleave(2)
        probs = trunk.probs
        if probs is not None:  # there is no law of the nodes that nothing follows
            probs = torch.full((*ids.shape, 24), torch.nan, dtype=probs.dtype)
            probs[:, trunk_nodes(2 * width)[:-1]] = trunk.probs
        counts = [2 * count for count in trunk.lengths]
        return Draft(ids, counts, probs, parents.expand(len(ids), -1))

    def keep(self, rows):
        self.inner.keep(rows)

    def settle(self):
        self.inner.settle()


class Trunk(Verifier):
    """Verifies every other token as a chain; notes rows, ids, flags and policies."""

    name = "trunk"
    drafts = ("tree",)

    def __init__(self):
        self.noted = []

    def coins(self, drafted):
        return drafted // 2

    def verify(self, assigned, target_probs, draft, accept, draw):
        nodes = trunk_nodes(draft.token_ids.shape[1])
        q, ids = target_probs[:, nodes], draft.token_ids[:, ::2]
        p = None if draft.probs is None else draft.probs[:, nodes[:-1]]
        choice = None if assigned.choice is None else assigned.choice[:, nodes[:-1]]
        chain = Draft(ids, [count // 2 for count in draft.lengths], p)
        own = Chain().verify(Assignment(assigned.policies, choice), q, chain, accept, draw)
        path, charged = torch.full_like(draft.token_ids, -1), []
        p = torch.nn.functional.one_hot(ids, q.shape[-1]).to(q) if p is None else p
        for row, (kept, count) in enumerate(
            zip(own.num_accepted.tolist(), chain.lengths, strict=True)
        ):
            path[row, :kept] = 2 * torch.arange(kept)
            judged = min(kept + 1, count)
            charged.append(nodes[:judged])
            flags = torch.arange(judged) < kept
            which = torch.zeros(judged).long() if choice is None else choice[row, :judged]
            parts = q[row, :judged], p[row, :judged], ids[row, :judged], flags, which
            self.noted.append([part.clone() for part in parts])
        return Verdict(draft.token_ids, own.num_accepted, own.last, path, charged)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_tree_is_charged_node_by_node(tiny, greedy, late):
    """The trunk of a tree costs what a chain of the same rows costs, whatever grows beside it."""
    band, strict = ct.policy("band:price=1"), ct.policy("speculative")
    policy = ByPosition([(0, strict), (7, band)]) if late else band
    options = {"policy": policy, "max_new_tokens": 17, "num_draft_tokens": 6, "log_probs": True}
    alone = []
    for row, prompt in enumerate(PROMPT):
        verifier = Trunk()
        found = generate(
            tiny[0],
            Bush(tiny[1], greedy),
            prompt[None],
            verifier=verifier,
            seed=7 + row,
            record_rows=True,
            **options,
        )
        check_charges(found, verifier.noted, band, late)
        text = torch.cat([prompt, found.output_token_ids[0]])
        logits = tiny[0](input_ids=text[None], use_cache=False).logits[0, 2:-1]
        likely = logits.log_softmax(-1).gather(-1, text[3:, None])[:, 0]
        assert torch.allclose(found.log_probs.target[0], likely)
        alone.append(found)
    both = generate(tiny[0], Bush(tiny[1], greedy), PROMPT, verifier=Trunk(), seed=7, **options)
    assert both.output_token_ids.equal(torch.cat([own.output_token_ids for own in alone]))
    assert torch.allclose(both.token_kl, torch.cat([own.token_kl for own in alone]))


def check_charges(found, noted, band, late):
    """Compare what the loop has recorded and metered with what the verifier was shown."""
    assert 0 < found.num_accepted < found.num_tokens
    q, p, ids, flags, which = (torch.cat(parts) for parts in zip(*noted, strict=True))
    for name, expected in zip(fields(found.rows)[:4], (q, p, ids, flags), strict=True):
        assert torch.allclose(getattr(found.rows, name.name), expected)
    relaxed = which == 1 if late else torch.ones_like(flags)
    spent = ct.divergence("kl").value(ct.emitted_law(band, q, p), q)
    assert found.meter.kl == pytest.approx(float(spent[relaxed].sum()), abs=1e-9)
    assert found.token_kl.sum() == pytest.approx(found.meter.kl) and found.meter.kl > 0
    position = 0
    for *_, kept, own in noted:
        at = position + torch.arange(len(own))
        assert own.tolist() == (at >= 7).long().tolist() or not late
        position += int(kept.sum()) + 1


def test_tokens_are_looked_up_by_node():
    """Nodes of a tree: 0 is followed by tokens 0 and 1, token 1 (node 2) by 2 and 3."""
    ids, parents = torch.tensor([[7, 8, 5, 6]]), torch.tensor([[-1, -1, 1, 1]])
    draft, rows = Draft(ids, [4], None, parents), torch.full((1, 5, 9), 1 / 9)
    strict = Assignment((ct.policy("speculative"),))
    path, last = torch.tensor([[1, -1, -1, -1]]), torch.tensor([3])
    seen = Verified(strict, rows, draft, Verdict(ids, torch.tensor([1]), last, path, [[0, 2]]))
    assert seen.judged(0, [0, 2]) == [1, 2]  # the accepted one, then the first that was refused
    with pytest.raises(ValueError, match="charged: tokens must follow each node; got none after 3"):
        seen.judged(0, [0, 3])
    assert [draft.path(0, place) for place in range(4)] == [[0], [1], [1, 2], [1, 3]]
    chain = Draft(ids, [4], None)
    assert chain.node(0, 2) == 2 and chain.path(0, 2) == [0, 1, 2]
