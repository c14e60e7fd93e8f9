"""Whole texts of tiny models under a schedule, enumerated: every draft, count and next token."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft

KL = ct.divergence("kl")
# entries of rows and sums of them, in another order
EXACT = 1e-12


@dataclass
class Texts:
    """What the decodes of a text come to, added up over all of them."""

    law: np.ndarray  # of texts
    most: float = 0.0  # nats of a text
    mean: float = 0.0
    rate: float = 0.0  # the most nats a token of any beginning, less the burst
    calls: float = 0.0  # rounds


def drafts_of(pair, state, width, deterministic):
    """Return every draft from a state with its chance; of a deterministic one there is one."""
    if not deterministic:
        for tokens in itertools.product(range(pair.vocab), repeat=width):
            states = [state, *tokens]
            chance = pair.draft[states[:width], tokens].prod() if width else torch.tensor(1.0)
            yield tokens, float(chance)
        return
    tokens, here = [], state
    for _ in range(width):
        here = int(pair.draft[here].argmax())
        tokens.append(here)
    yield tuple(tokens), 1.0


def texts_of(pair, schedule, length, width, verifier="chain", deterministic=False, burst=0.0):
    """Return what the decodes of a Markov pair come to, the coins of each round integrated out."""
    judge = find_verifier(verifier)
    found = Texts(np.zeros((pair.vocab,) * length))
    begun = [((), schedule.begin([0]), 1.0, 0.0)]
    while begun:
        text, state, mass, spent = begun.pop()
        if len(text) >= length:
            found.law[text[:length]] += mass
            found.most, found.mean = max(found.most, spent), found.mean + mass * spent
            continue
        found.calls += mass
        here, start = min(width, length - len(text) - 1), text[-1] if text else 0
        for tokens, chance in drafts_of(pair, start, here, deterministic):
            ids, states = torch.tensor([tokens], dtype=torch.int64), [start, *tokens]
            q, p = pair.target[states], pair.draft[states[:here]]
            draft = Draft(ids.reshape(1, here), [here], None if deterministic else p[None])
            choice, nodes = schedule.choose_by_nodes(state, q[None], draft, judge)
            assigned = Assignment(schedule.policies, choice[None])
            stop, last, paid = torch.ones(1), q, spent
            if here:
                law = judge.law(assigned, q[None], draft)
                stop, last = law.stop[0], law.last[0]
                if nodes and verifier == "block":
                    alive = q.new_tensor([nodes[place].alive for place in range(here)])
                    assert torch.allclose(alive, law.alive[0, :here], rtol=0, atol=EXACT)
            for kept in range(here + 1):
                if kept < here:
                    charge = float(KL.value(law.emitted[0, kept], q[kept]))
                    # rows that are never reached are charged nothing
                    paid += charge if law.alive[0, kept] > 0 else 0.0
                    if chance * float(law.alive[0, kept]) > 0:
                        rate = (paid - burst) / (len(text) + kept + 1)
                        found.rate = max(found.rate, rate)
                reached = mass * chance * float(stop[kept])
                if reached <= 0:
                    continue
                judged = [nodes[place] for place in range(kept + 1)] if nodes else []
                for token in np.flatnonzero(last[kept].numpy() > 0).tolist():
                    new = [*tokens[:kept], token]
                    after = schedule.advance(schedule.observe(state, judged), new)
                    begun.append(((*text, *new), after, reached * float(last[kept][token]), paid))
    return found


def target_of(pair, length):
    """Return the target's law of texts."""
    law = np.ones(())
    for place in range(length):
        rows = pair.target.numpy() if place else pair.target[0].numpy()
        law = law[..., None] * rows
    return law
