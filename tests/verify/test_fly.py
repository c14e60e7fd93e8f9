"""FLy's law by enumeration, by a program written from its documentation, and on Markov texts."""

import itertools
import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.kernels import has_kernel
from cactus_theory.traces import replay
from cactus_theory.verify import Assignment, Draft, Fly, find_verifier
from tests.amounts import amount
from tests.markov.pair import Setting, markov_pair
from tests.markov.places import follow_places
from tests.markov.texts import enumerate_texts

LOSSLESS = ct.policy("speculative")
GREEDY = ct.policy("relaxed:k=1,delta=0,recover=argmax")
EXACT = 1e-12


def rows(batch, width, vocab, seed, zeros=0.0, spread=1.0):
    source = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, batch, width + 1, vocab, generator=source).double()
    logits[1] += logits[0]
    if zeros:
        lost = torch.rand(logits.shape, generator=source) < zeros
        lost.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        logits = logits.masked_fill(lost, -math.inf)
    q, p = logits.softmax(-1)
    p = p[:, :width]
    ids = p.flatten(0, 1).multinomial(1, generator=source).view(batch, width)
    return q, p, ids


def documented(q, p, ids, uniform, window, entropy, k, greedy=False):
    """Return how many tokens of one draft are accepted, from the documentation, by plain loops."""
    width = len(ids)

    def native(i):
        if greedy:
            return ids[i] == max(range(len(q[i])), key=q[i].__getitem__)
        return uniform[i] < q[i][ids[i]] / p[i][ids[i]]

    for i in range(width):
        if native(i):
            continue
        top = sorted(q[i], reverse=True)[:k]
        gate = -sum(x * math.log(x) for x in top if x > 0) >= entropy
        room = i + window < width
        if not (gate and room and q[i][ids[i]] > 0):
            return i
        if not all(native(j) for j in range(i + 1, i + window + 1)):
            return i
    return width


CASES = [(5, 2, 0.3, 3), (5, 1, 0.0, 3), (4, 3, 0.5, 2), (6, 4, 0.3, 1), (3, 3, 0.0, 3)]


@pytest.mark.parametrize(("width", "window", "entropy", "k"), CASES)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_law_is_the_sum_over_native_decisions(width, window, entropy, k, zeros):
    q, p, ids = rows(amount(6, 60), width, 4, 3, zeros)
    verifier = Fly(window=window, entropy=entropy, k=k)
    law = verifier.law(Assignment((LOSSLESS,)), q, Draft(ids, [width] * len(ids), p))
    for row in range(len(ids)):
        drafted = ids[row].tolist()
        ratio = [min(1.0, float(q[row, i, n] / p[row, i, n])) for i, n in enumerate(drafted)]
        stop = [0.0] * (width + 1)
        for accepted in itertools.product((True, False), repeat=width):
            weight = math.prod(a if own else 1 - a for a, own in zip(ratio, accepted, strict=True))
            coins = [-1.0 if own else math.inf for own in accepted]
            own = q[row].tolist(), p[row].tolist()
            stop[documented(*own, drafted, coins, window, entropy, k)] += weight
        assert law.stop[row].tolist() == pytest.approx(stop, abs=EXACT)
    assert law.emitted is None and verifier.defers


@pytest.mark.parametrize("window", [1, 2, None])
def test_a_greedy_target_is_decided_without_coins(window):
    q, _, ids = rows(amount(40, 400), 5, 4, 5, spread=0.7)
    ids[:, ::2] = q.argmax(-1)[:, :5:2]
    verifier = Fly(window=window, entropy=0.4)
    draft = Draft(ids, [5] * len(ids), None)
    coins = torch.rand(len(ids), 5).double(), torch.rand(len(ids)).double()
    found = verifier.verify(Assignment((GREEDY,)), q, draft, *coins)
    chain = ct.verify_chain(GREEDY, q, None, ids, coins=coins)
    own = 4 if window is None else window
    due = [
        documented(q[i].tolist(), None, ids[i].tolist(), None, own, 0.4, 3, True)
        for i in range(len(ids))
    ]
    assert found.num_accepted.tolist() == due
    assert (found.num_accepted >= chain.num_accepted).all()
    assert bool((found.num_accepted > chain.num_accepted).any()) or window is None
    after = q.argmax(-1).gather(1, found.num_accepted[:, None])[:, 0]
    assert torch.equal(*(last[found.num_accepted < 5] for last in (found.last, after)))
    law = verifier.law(Assignment((GREEDY,)), q, draft)
    assert torch.equal(law.stop.argmax(-1), found.num_accepted) and (law.stop.amax(-1) == 1).all()


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_a_deterministic_draft_has_a_law_at_each_row(zeros):
    """By native decisions: a round that goes on emits the drafted token, one that ends its last."""
    q, _, ids = rows(amount(6, 60), 4, 4, 8, zeros)
    draft, assigned = Draft(ids, [4] * len(ids), None), Assignment((LOSSLESS,))
    lossless = Fly(window=3, entropy=9.0).law(assigned, q, draft)
    reached = lossless.alive[:, :-1] > 0
    assert torch.allclose(lossless.emitted[reached], q[:, :-1][reached], atol=EXACT)
    law = Fly(window=1, entropy=0.3).law(assigned, q, draft)
    reached = law.alive[:, :-1] > 0
    assert torch.allclose(law.emitted.sum(-1)[reached], torch.ones(()).double(), atol=EXACT)
    for row, place in itertools.product(range(len(ids)), range(4)):
        if not reached[row, place]:
            continue
        own = torch.zeros(4).double()
        for accepted in itertools.product((True, False), repeat=4):
            ratio = [float(q[row, i, n]) for i, n in enumerate(ids[row].tolist())]
            weight = math.prod(a if one else 1 - a for a, one in zip(ratio, accepted, strict=True))
            coins = [-1.0 if one else math.inf for one in accepted]
            deterministic = torch.eye(4).double()[ids[row]].tolist()
            stop = documented(q[row].tolist(), deterministic, ids[row].tolist(), coins, 1, 0.3, 3)
            if stop > place:
                own[ids[row, place]] += weight
            elif stop == place:
                own += weight * law.last[row, place]
        assert torch.allclose(law.emitted[row, place], own / own.sum(), atol=EXACT)


def test_it_is_lossy_on_a_lossless_policy_by_hand():
    """V = 2, K = 2, W = 1: h(0) = min(p, q) + (p − q) w, w the chance that token 2 is accepted."""
    q = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]).double()
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).double()
    emitted = torch.zeros(2).double()
    for path in itertools.product((0, 1), repeat=2):
        law = Fly(window=1, entropy=0.3).law(
            Assignment((LOSSLESS,)), q[None], Draft(torch.tensor([path]), [2], p[None])
        )
        chance = p[0, path[0]] * p[1, path[1]]
        emitted[path[0]] += chance * law.alive[0, 1]
        emitted += chance * law.stop[0, 0] * law.last[0, 0]
    # token 2 is accepted with 0.5 · 0.5 + 0.5 · 1 = 0.75
    assert emitted.tolist() == pytest.approx([0.5 + 0.25 * 0.75, 0.5 - 0.25 * 0.75], abs=EXACT)


@pytest.mark.parametrize("window", [1, 2])
def test_texts_cost_what_two_ways_say_and_the_meter_bounds_it(window):
    pair = markov_pair(3, seed=4)
    setting = Setting("speculative", 3, 5, Fly(window=window))
    texts, places = enumerate_texts(pair, setting), follow_places(pair, setting)
    assert texts.kl == pytest.approx(sum(places.kl), abs=EXACT)
    assert texts.meter.mean == pytest.approx(sum(places.metered), abs=EXACT)
    assert 1e-3 < texts.kl < texts.meter.mean
    lossless = enumerate_texts(pair, Setting("speculative", 3, 5))
    assert texts.calls.mean < lossless.calls.mean


def test_a_lawless_row_that_decides_ends_without_a_token():
    q, p, ids = rows(1, 3, 4, 2)
    coins = torch.full((1, 3), 0.999).double(), torch.tensor([0.5]).double()
    q[0, 1] = math.nan
    found = Fly(window=1, entropy=0).verify(Assignment((LOSSLESS,)), q, Draft(ids, [3], p), *coins)
    assert found.last.tolist() == [-1] and int(found.num_accepted[0]) <= 1


def test_what_it_cannot_do_raises():
    with pytest.raises(ValueError, match="fly overrides refusals of speculative.*got band"):
        Fly().check(ct.policy("band:price=1"))
    Fly().check(GREEDY)
    for bad in ("window=0", "entropy=-1", "k=0", "width=3"):
        with pytest.raises(ValueError):
            find_verifier(f"fly:{bad}")
    with pytest.raises(ValueError, match="fly defers.*give meter=False"):
        DecodeOptions(verifier="fly", max_new_tokens=4)
    assert (
        DecodeOptions(verifier="fly", max_new_tokens=4, meter=False).parsed_verifier.spec == "fly"
    )
    with pytest.raises(NotImplementedError, match="cannot be metered"):
        replay("simulations/data/trace", "speculative", "fly")
    assert find_verifier("fly:window=2,entropy=0.5,k=3").spec == "fly:window=2,entropy=0.5"
    assert not has_kernel(LOSSLESS, "fly")
