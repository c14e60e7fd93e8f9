"""Exact laws of what an engine must emit, from a Hugging Face forward pass of the same models.

Token 1 comes from the prompt's own step, so it has the law q. A round then drafts K = 3 tokens:
tokens 2 to 4 stand at its first three places, or at the first places of later rounds after a
refusal. Under a chain, place does not matter: given the tokens before it, the law is the policy's
emitted law of the two rows there. Under a block it depends on the alive ratio, too (``after``).
Token 5 may be a bonus: it is looked at where the law is q anywhere.
"""

import functools
from collections import Counter
from pathlib import Path

import torch

import cactus_theory as ct
from cactus_theory.policies.policy import PathState
from tests.counts import p_value

PAIR = Path(__file__).resolve().parents[2] / "simulations" / "pair"
PROMPT = [259, 337, 290, 14, 915]  # "    return self.tk", after which few tokens are likely


@functools.cache
def models():
    from transformers import LlamaForCausalLM

    paths = [PAIR / name for name in ("target", "draft")]
    return [LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths]


@functools.cache
def logits(prefix: tuple[int, ...]):
    """Return float64 logits of target and draft after the prompt and these tokens."""
    ids = torch.tensor([[*PROMPT, *prefix]])
    with torch.no_grad():
        return [model(ids).logits[0, -1].double() for model in models()]


def target_row(prefix, temperature=1.0, top_k=0, top_p=1.0):
    scores = logits(prefix)[0] / temperature
    if top_k:
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        probs, order = scores.softmax(-1).sort(descending=True)
        out = probs.cumsum(-1) - probs >= top_p
        scores[order[out]] = -torch.inf
    return scores.softmax(-1)


def draft_row(prefix, temperature=1.0, deterministic=False, **_):
    """Return what the drafter draws from: its temperature is all it follows."""
    row = (logits(prefix)[1] / temperature).softmax(-1)
    return torch.nn.functional.one_hot(row.argmax(), len(row)).double() if deterministic else row


def chain_law(spec, deterministic=False, **sampling):
    def law(prefix):
        q, p = (
            target_row(prefix, **sampling),
            draft_row(prefix, deterministic=deterministic, **sampling),
        )
        return ct.emitted_law(ct.policy(spec), q, p)

    return law


def block_law(spec, **sampling):
    """Return the law of tokens 2 and 3 under a block whose bonus comes from the target."""
    rule = ct.policy(spec)

    def at(prefix, alive):
        q, p = target_row(prefix, **sampling)[None], draft_row(prefix, **sampling)[None]
        reached = PathState(torch.tensor([alive], dtype=torch.float64))
        return rule.target(q, p, reached)[0], p[0]

    def law(prefix):
        fresh, _ = at(prefix, 1.0)
        if len(prefix) == 1:
            return fresh
        before, drafted = at(prefix[:1], 1.0)
        h, p = float(before[prefix[1]]), float(drafted[prefix[1]])
        same_round = min(1.0, p / h)  # the node is reached with probability min(p, h)
        after, _ = at(prefix, min(1.0, h / p))
        return same_round * after + (1 - same_round) * fresh

    return law


def target_law(**sampling):
    return lambda prefix: target_row(prefix, **sampling)


def p_values(texts, law, places=(2, 3, 4)):
    """Return the chi-square p-value of each token after the commonest tokens before it."""
    found = []
    for place in places:
        prefix = Counter(tuple(text[: place - 1]) for text in texts).most_common(1)[0][0]
        own = [text[place - 1] for text in texts if tuple(text[: place - 1]) == prefix]
        found.append(chi_square(own, law(prefix)))
    return found


def chi_square(tokens, law):
    """Return the p-value of these tokens; 0 if one of them is impossible."""
    return p_value(torch.bincount(torch.tensor(tokens), minlength=len(law)), law)
