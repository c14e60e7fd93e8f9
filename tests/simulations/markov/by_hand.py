"""The token-wise decode loop spelled out: one text, one draft and one token at a time."""

import itertools
from collections import Counter

import torch

import cactus_theory as ct


def walk(pair, spec, width, length, end=None):
    """Return {text: probability}, expected calls, and the expected meter, from φ and g."""
    rule, kl = ct.policy(spec), ct.divergence("kl")
    done, calls, meter = Counter(), 0.0, 0.0
    open_texts = {(): 1.0}
    while open_texts:
        text, mass = open_texts.popitem()
        calls += mass
        for own, share, spent in one_round(
            pair, rule, kl, text, min(width, length - len(text) - 1)
        ):
            cut = own if end not in own else own[: own.index(end) + 1]
            meter += mass * share * sum(spent[: len(cut)])
            longer = text + cut
            if len(longer) == length or end in cut:
                done[longer] += mass * share
            elif mass * share:
                open_texts[longer] = open_texts.get(longer, 0.0) + mass * share
    return done, calls, meter


def one_round(pair, rule, kl, text, width):
    """Yield (tokens, probability, charges of the rows read) of a round after ``text``."""
    for draft in itertools.product(range(pair.vocab), repeat=width):
        share, spent = 1.0, []
        for place, token in enumerate(draft):
            q, p = rows(pair, text + draft[:place])
            spent.append(float(kl.value(rule.emitted(q, p), q)))
            share *= float(p[0, token])
            phi = float(rule.acceptance(q, p, torch.tensor([[token]])))
            recovered = rule.residual(q, p, torch.tensor([token]))[0].tolist()
            rest = later(pair, text, draft, place + 1)
            for x, chance in enumerate(recovered):
                yield (*draft[:place], x), share * (1 - phi) * rest * chance, list(spent)
            share *= phi
        for x, chance in enumerate(rows(pair, text + draft)[0][0].tolist()):
            yield (*draft, x), share * chance, list(spent)


def later(pair, text, draft, place):
    """Return the probability of drafting what follows ``place``."""
    found = 1.0
    for at in range(place, len(draft)):
        found *= float(rows(pair, text + draft[:at])[1][0, draft[at]])
    return found


def rows(pair, text):
    """Return both models' rows (1, V) after a text."""
    state = pair.start
    for token in text:
        state = int(pair.following[state, token])
    return pair.target[state : state + 1], pair.draft[state : state + 1]
