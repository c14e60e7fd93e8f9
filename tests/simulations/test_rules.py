"""Rules of engines and papers against their formulas in plain loops, and FLy by enumeration."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies.registry import POLICIES
from cactus_theory.testing import assert_policy_properties
from cactus_theory.traces import replay
from cactus_theory.verify import Assignment, Draft, find_verifier
from simulations.rules import FIELD, TOKENS, Fly, by_token, top
from tests.amounts import amount
from tests.rows import numpy_pairs

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-12
PAGE = ROOT / "paper_figures" / "results" / "engines.md"
LOSSLESS = Assignment((ct.policy("speculative"),))
# rule → its default, and others
KNOBS = {
    "cascade_chow": ("alpha", 0.2, -0.5, 0.0, 0.7, 1.0),
    "cascade_diff": ("alpha", 0.2, -0.1, 0.0, 0.5),
    "cascade_opt": ("alpha", 0.2, -2.0, -0.5, 0.0, 0.9, 1.5),
    "cascade_token_1": ("alpha", 0.2, -0.5, 0.0, 0.6, 1.0),
    "cascade_token_2": ("alpha", 0.2, -0.5, 0.0, 0.6, 1.0),
    "cascade_token_3": ("alpha", 0.95, -0.5, 0.0, 0.6, 1.0),
    "logit_comparison": ("eps", 1e-5, 0.0, 0.5, 3.0),
    "power_lenience": ("epsilon", 0.5, 0.1, 1.0),
    "top_k_of_cactus": ("k", 10, 1, 2, 3),
}
CASES = [(name, value) for name, (_, *values) in KNOBS.items() for value in values]


def formula(name, q, p, knob):
    """Return the emitted row, by loops over drafted tokens, from the papers' own statements."""
    tokens, draft, target = range(len(q)), list(p), list(q)

    def spread(row):
        return [x / sum(row) for x in row] if sum(row) > 0 else target

    left = spread([max(0.0, q[x] - p[x]) for x in tokens])
    if name in ("cascade_chow", "cascade_diff", "cascade_opt"):
        apart = sum(max(0.0, q[x] - p[x]) for x in tokens)
        least = {
            "cascade_chow": 1 - knob,
            "cascade_diff": max(q) - knob,
            "cascade_opt": max(q) - knob * apart - EXACT,
        }[name]
        return target if max(p) < least else draft
    out = [0.0] * len(q)
    for n in tokens:
        if p[n] == 0:
            continue
        if name.startswith("cascade_token"):
            deferred = {
                "1": p[n] < max(q) - knob, "2": q[n] < max(q) - knob,
                "3": q[n] < max(q) * (1 - knob),
            }[name[-1]]  # fmt: skip
            accepted, rest = 0.0 if deferred else 1.0, target
        elif name == "logit_comparison":
            accepted, rest = float(q[n] > 0 and math.log(p[n]) <= math.log(q[n]) + knob), target
        elif name == "power_lenience":
            accepted, rest = min(1.0, q[n] ** knob / p[n]), left
        else:
            kept = [q[x] > 0 and sum(y > q[x] for y in q) < knob for x in tokens]
            rest = spread([(1 - p[x]) * kept[x] for x in tokens])
            accepted = float(kept[n])
        for x in tokens:
            out[x] += p[n] * (accepted * (x == n) + (1 - accepted) * rest[x])
    return out


def same(rule, name, knob):
    q, p = numpy_pairs(amount(60, 600), 6, 5)
    law = ct.emitted_law(rule, q, p)
    expected = [formula(name, *rows, knob) for rows in zip(q.tolist(), p.tolist(), strict=True)]
    np.testing.assert_allclose(law, expected, atol=1e-11)


def of_file(name, knob=None):
    spec = f"simulations/rules.py:{name}"
    return ct.policy(spec if knob is None else f"{spec}:{KNOBS[name][0]}={knob}")


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("name", "knob"), CASES)
def test_a_rule_emits_what_its_source_says(name, knob):
    same(of_file(name, knob), name, knob)


@pytest.mark.parametrize("name", KNOBS)
def test_a_rule_has_its_default_and_every_property(name):
    rule = of_file(name)
    assert vars(rule) == {KNOBS[name][0]: KNOBS[name][1]}
    assert_policy_properties(rule, examples=amount(8, 500))


def test_a_token_rule_may_accept_less_at_a_larger_alpha():
    """So that ``direction`` is not declared of them; the accepted share falls from 0.82 to 0.78."""
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])
    shares = [ct.audit(of_file("cascade_token_2", a), q, p).acceptance for a in (0.1, 0.25)]
    assert shares[1] < shares[0] and of_file("cascade_token_2").declares.direction == 0


def drafted(row, n):
    return row.gather(-1, n[..., None])[..., 0].double()


@ct.rule(**TOKENS)
def strictly_above(q, p, *, alpha=0.2):
    return by_token(q, p, q.double() > top(q) - alpha)


@ct.rule(vectorised=True)
def of_the_draft(q, p, *, alpha=0.2):
    return torch.where(top(q) < top(p) - alpha, p, q)


@ct.rule(vectorised=True, residual=lambda q, p: p)
def draws_from_p(q, p, n, *, eps=1e-5):
    return (drafted(p, n) <= drafted(q, n) * math.exp(eps)).double()


@ct.rule(vectorised=True)
def squared(q, p, n, *, epsilon=0.5):
    return (drafted(q, n) / epsilon / drafted(p, n)).clamp(max=1.0)


@pytest.mark.parametrize(
    ("fault", "name", "knob"),
    [(ct.policy("strictly_above:alpha=0"), "cascade_token_2", 0.0),
     (of_the_draft, "cascade_diff", 0.2), (draws_from_p, "logit_comparison", 1e-5),
     (squared, "power_lenience", 0.5), (ct.policy("cascade_opt:alpha=0.3"), "cascade_opt", 0.2),
     (ct.policy("top_k:k=2"), "top_k_of_cactus", 2)],
)  # fmt: skip
def test_a_planted_fault_is_seen(fault, name, knob):
    with pytest.raises(AssertionError):
        same(fault, name, knob)


def test_the_published_recovery_of_top_k_by_hand():
    law = ct.emitted_law(of_file("top_k_of_cactus", 2), [0.5, 0.3, 0.2], [0.6, 0.1, 0.3])
    np.testing.assert_allclose(law, [0.6 + 0.3 * 0.4 / 1.3, 0.1 + 0.3 * 0.9 / 1.3, 0], atol=EXACT)


def test_the_field_has_every_policy_and_one_line_of_the_page_each():
    assert len(FIELD) >= 20
    names = {ct.policy(entry.policy).name for entry in FIELD.values()}
    ours = {name for name, kind in POLICIES.known.items() if kind.__module__.startswith("cactus_")}
    ours -= {"regret"}  # at temperature 1 there is none
    assert names >= ours | {*KNOBS} and len(ours) == 12
    page = PAGE.read_text(encoding="utf-8")
    q, p = numpy_pairs(30, 6)
    for name, entry in FIELD.items():
        (line,) = (row for row in page.splitlines() if row.startswith(f"| `{name}` |"))
        assert (
            f"`{getattr(entry.policy, 'name', entry.policy)}`" in line
            and entry.flag in line
            and entry.engine in line
        )
        assert entry.source in line
        verifier = find_verifier(entry.verifier)
        verifier.check(ct.policy(entry.policy))
        if verifier.name == "chain":
            assert np.isfinite(ct.audit(entry.policy, q, p).acceptance).all()
        else:
            assert f"`{verifier.spec}`" in line


def test_defaults_of_engines_are_what_they_ship():
    """Typical acceptance as MTPLX and BiLD write it, Transformers' ensemble; by one row."""
    q, p = np.array([0.55, 0.4, 0.0499, 0.0001]), np.array([0.1, 0.2, 0.3, 0.4])
    entropy = -sum(x * math.log(x) for x in q)
    accepted = {
        "typical_mtplx": [x > min(1.0, 0.09 * math.exp(-entropy)) for x in q],
        "bild": [-math.log(x) <= 8 for x in q],
        "ensemble": [min(1, 0.3 + 0.7 * x / y) for x, y in zip(q, p, strict=True)],
        "cactus_hipfire": [
            min(1, (x + math.sqrt(2 * x * (1 - x))) / y) for x, y in zip(q, p, strict=True)
        ],
    }
    for name, expected in accepted.items():
        found = ct.policy(FIELD[name].policy).acceptance(
            torch.tensor(q), torch.tensor(p), torch.arange(4)
        )
        np.testing.assert_allclose(found, np.array(expected, dtype=float), atol=EXACT)


# FLy -----------------------------------------------------------------------------------------


def rows(batch, width, vocab, seed, zeros=0.0):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, batch, width + 1, vocab, generator=source).double()
    logits[1] += logits[0]
    if zeros:
        lost = torch.rand(logits.shape, generator=source) < zeros
        lost.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        logits = logits.masked_fill(lost, -math.inf)
    q, p = logits.softmax(-1)
    ids = p[:, :width].flatten(0, 1).multinomial(1, generator=source).view(batch, width)
    return q, p[:, :width], ids


def documented(q, ids, native, window, entropy, k):
    """Return how many tokens are accepted, given which pass natively, from vLLM's documentation."""
    for i in range(len(ids)):
        if native[i]:
            continue
        largest = sorted(q[i], reverse=True)[:k]
        unsure = -sum(x * math.log(x) for x in largest if x > 0) >= entropy
        if not (unsure and i + window < len(ids) and q[i][ids[i]] > 0):
            return i
        if not all(native[i + 1 : i + window + 1]):
            return i
    return len(ids)


def outcomes(q, p, ids):
    """Yield which tokens pass natively, and with what probability."""
    ratio = [min(1.0, float(q[i, n] / p[i, n])) for i, n in enumerate(ids)]
    for native in itertools.product((True, False), repeat=len(ids)):
        yield native, math.prod(a if on else 1 - a for a, on in zip(ratio, native, strict=True))


SETTINGS = [(5, 2, 0.3, 3), (5, 1, 0.0, 3), (4, 3, 0.5, 2), (6, 4, 0.3, 1), (3, 3, 0.0, 3)]


@pytest.mark.parametrize(("width", "window", "entropy", "k"), SETTINGS)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_flys_counts_are_the_sum_over_native_decisions(width, window, entropy, k, zeros):
    q, p, ids = rows(amount(6, 60), width, 4, 3, zeros)
    law = Fly(window, entropy, k).law(LOSSLESS, q, Draft(ids, [width] * len(ids), p))
    for row, drafted_ids in enumerate(ids.tolist()):
        stop = [0.0] * (width + 1)
        for native, weight in outcomes(q[row], p[row], drafted_ids):
            stop[documented(q[row].tolist(), drafted_ids, native, window, entropy, k)] += weight
        assert law.stop[row].tolist() == pytest.approx(stop, abs=EXACT)
        assert law.alive[row].tolist() == pytest.approx(
            [sum(stop[i:]) for i in range(width + 1)], abs=EXACT
        )


@pytest.mark.parametrize("window", [1, 2, None])
def test_fly_decides_as_documented_and_drafts_may_end_early(window):
    q, p, ids = rows(amount(40, 400), 5, 4, 5, 0.2)
    counts = [1 + row % 5 for row in range(len(ids))]
    source = torch.Generator().manual_seed(1)
    coins = torch.rand(ids.shape, generator=source).double()
    draw = torch.rand(len(ids), generator=source).double()
    verifier, draft = Fly(window, 0.2), Draft(ids, counts, p)
    found, law = (
        verifier.verify(LOSSLESS, q, draft, coins, draw),
        verifier.law(LOSSLESS, q, draft),
    )
    for row, count in enumerate(counts):
        own = ids[row, :count].tolist()
        native = [coins[row, i] < q[row, i, n] / p[row, i, n] for i, n in enumerate(own)]
        width = window or max(1, min(6, count - 1))
        due = documented(q[row].tolist(), own, native, width, 0.2, 3)
        assert int(found.num_accepted[row]) == due
        assert law.last[row, due, found.last[row]] > 0
    ends = law.stop.sum(-1), law.stop[torch.arange(6) > torch.tensor(counts)[:, None]]
    assert torch.allclose(ends[0], torch.ones(()).double()) and not ends[1].any()


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_fly_has_an_exact_law_at_each_row_of_a_deterministic_draft(zeros):
    q, _, ids = rows(amount(6, 60), 4, 4, 8, zeros)
    law = Fly(1).law(LOSSLESS, q, Draft(ids, [4] * len(ids), None))
    p = torch.eye(4).double()[ids]
    for row, place in itertools.product(range(len(ids)), range(4)):
        own = torch.zeros(4).double()
        for native, weight in outcomes(q[row], p[row], ids[row].tolist()):
            stop = documented(q[row].tolist(), ids[row].tolist(), native, 1, 0.3, 3)
            if stop > place:
                own[ids[row, place]] += weight
            elif stop == place:
                own += weight * law.last[row, place]
        if own.sum() > 0:
            assert torch.allclose(law.emitted[row, place], own / own.sum(), atol=EXACT)


def test_fly_is_lossy_by_hand():
    """V = 2, K = 2, W = 1: h(0) = min(p, q) + (p − q) w, w the chance that token 2 is accepted."""
    q = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]).double()
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).double()
    counted, stated = torch.zeros(2, 2).double()
    for path in itertools.product((0, 1), repeat=2):
        draft = Draft(torch.tensor([path]), [2], p[None])
        law = Fly(1).law(LOSSLESS, q[None], draft)
        chance = p[0, path[0]] * p[1, path[1]]
        counted[path[0]] += chance * law.alive[0, 1]
        counted += chance * law.stop[0, 0] * law.last[0, 0]
        stated += chance * law.emitted[0, 0]
    # token 2 is accepted with 0.5 · 0.5 + 0.5 · 1 = 0.75; here it is so whatever token 1 is
    expected = [0.5 + 0.25 * 0.75, 0.5 - 0.25 * 0.75]
    assert counted.tolist() == pytest.approx(expected, abs=EXACT)
    assert stated.tolist() == pytest.approx(expected, abs=EXACT)


def test_flys_replay_costs_nats_and_accepts_more():
    done = {
        name: replay("simulations/data/trace", entry.policy, entry.verifier, num_draft_tokens=4)
        for name, entry in FIELD.items()
        if entry.policy == "speculative"
    }
    tokens = {name: each.tokens_per_call.value for name, each in done.items()}
    nats = {name: each.spent["kl"].sum() / each.tokens.sum() for name, each in done.items()}
    assert tokens["fly_2"] > tokens["fly"] > tokens["lossless"]  # min(6, K − 1) is 3
    assert nats["fly_2"] > nats["fly"] > 0.01 and nats["lossless"] == 0
    assert tokens["fly_4"] == pytest.approx(tokens["lossless"]) and nats["fly_4"] < EXACT


def test_what_fly_cannot_do_raises():
    for bad in ("window=0", "entropy=-1", "k=0", "width=3"):
        with pytest.raises(ValueError):
            find_verifier(f"simulations/rules.py:Fly:{bad}")
    assert find_verifier("simulations/rules.py:Fly:window=2").spec.endswith("window=2")
    with pytest.raises(ValueError, match="fly overrides rejections of speculative; got band"):
        Fly().check(ct.policy("band:price=1"))
    with pytest.raises(NotImplementedError, match="give meter=False"):
        Fly().emitted(ct.policy("speculative"))
