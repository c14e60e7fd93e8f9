"""A tree drafter and a tree verifier of one file each dock without a change to the loop."""

from dataclasses import dataclass

import pytest
import torch

from cactus_theory.decoding import Drafter, generate, generate_plain
from cactus_theory.decoding.drafters import Drafting
from cactus_theory.verify import Draft, Verdict, Verifier

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
