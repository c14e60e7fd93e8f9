"""Batches as the runner hands them over, and what each request alone would emit."""

import torch

from cactus_theory.verify import find_verifier
from cactus_theory.verify.draw import pick
from cactus_theory.vllm.batch import FlatBatch

VOCAB = 7


def random_batch(seed, counts, deterministic=False, vocab=VOCAB, holes=0.2, **more):
    """Return a batch with −∞ logits (``holes``: how many) and tokens drawn from their rows."""
    g = torch.Generator().manual_seed(seed)
    total, width = sum(counts), max(counts, default=0)
    logits = 2 * torch.randn(total, vocab, generator=g)
    excluded = torch.rand(total, vocab, generator=g) < holes
    excluded[:, 0] = False
    probs = torch.randn(total, vocab, generator=g).softmax(-1)
    ids = torch.multinomial(probs, 1, generator=g)[:, 0].int() if total else torch.zeros(0).int()
    bonus = torch.randint(vocab, (len(counts),), generator=g).int()
    own = {"greedy": None, "generators": {}} | more
    return FlatBatch(
        ids,
        list(counts),
        width,
        None if deterministic else probs,
        logits.masked_fill(excluded, -torch.inf),
        bonus,
        **own,
    )


def random_coins(seed, batch):
    g = torch.Generator().manual_seed(seed)
    rows, width = len(batch.drafted), max(batch.counts)
    accept = torch.rand(rows, width, dtype=torch.float64, generator=g)
    return accept, torch.rand(rows, dtype=torch.float64, generator=g)


def alone(verify, rule, batch, row, coins):
    """Return what one request emits, by the function on padded tensors, as a list."""
    start, count = sum(batch.counts[:row]), batch.counts[row]
    own = slice(start, start + count)
    logits, ids = batch.target_logits[own], batch.ids[own].long()
    bonus = int(batch.bonus[row])
    if not count:
        return [bonus]
    if batch.greedy is not None and batch.greedy[row]:
        return greedy(logits, ids.tolist(), bonus)
    q = logits.softmax(-1)
    drafted = next((i for i, token in enumerate(ids.tolist()) if token < 0), count)
    accept, draw = coins
    if row in batch.unknown or not drafted:
        return [int(pick(q[:1], draw))]
    # a row for the bonus that is not drawn from: the engine has drawn it
    rows = torch.cat([q[:drafted], q[drafted : drafted + 1] if drafted < count else q[:1]])
    p = None if batch.draft_probs is None else batch.draft_probs[own][None, :drafted]
    ends = torch.tensor([[*ids[:drafted].tolist()]])
    out = verify(rule, rows[None], p, ends, coins=(accept[None, :drafted], draw), validate=False)
    found = [token for token in out.output_token_ids[0].tolist() if token >= 0]
    return [*found[:-1], bonus] if len(found) == count + 1 else found


def greedy(logits, ids, bonus):
    found = []
    for row, token in zip(logits, ids, strict=True):
        found.append(int(row.argmax()))
        if token != found[-1]:
            return found
    return [*found, bonus]


def emitted(output):
    return [[token for token in row if token >= 0] for row in output.tolist()]


CHAIN, BLOCK = find_verifier("chain"), find_verifier("block")
