"""What public functions are given and must not be is refused by name, rule and value."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory import losses
from cactus_theory.divergences import Divergence
from tests.rows import pair

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
ROWS = pair(6, 7, seed=4)[0]
HOT = torch.nn.functional.one_hot(torch.tensor([0, 6, 2, 3, 3, 1]), 7).double()
HALF, STRICT = [0.5, 0.5], ct.policy("speculative")
TARGET, DRAFT = torch.zeros(3, 5), torch.zeros(3, 5)


def priced(target=TARGET, draft=DRAFT, **options):
    return losses.at_price(target, draft, **options)


# fmt: off
VALUES = [
    # promises
    (lambda: ct.event_bounds(), "cap, per_token: must be one, .* got neither"),
    (lambda: ct.event_bounds(cap=1, per_token=1), "cap, per_token: .* got both"),
    (lambda: ct.event_bounds(per_token=0.1),
     "tokens: must be given with per_token, .* got per_token 0.1 alone"),
    (lambda: ct.event_bounds(cap=-1), "cap: must lie in"),
    (lambda: ct.event_bounds(cap=math.nan), "cap: must lie in"),
    (lambda: ct.event_bounds(cap=1, rate=1.5), "rate: must lie in"),
    (lambda: ct.event_bounds(cap=1, burst=1), "burst: must lie in"),
    (lambda: ct.event_bounds(per_token=1, tokens=0), "tokens: must be an integer of at least 1"),
    (lambda: ct.event_bounds(per_token=1, tokens=10**400),
     r"tokens: must be below 2\^63; got one of 1329 bits"),
    (lambda: ct.event_bounds(cap=1, lossless=-1), "lossless: must be an integer of at least 0"),
    (lambda: ct.confidence_bound([], 0.5), "readings: must be at least one"),
    (lambda: ct.confidence_bound([-0.1], 0.5), "readings: must lie in"),
    (lambda: ct.confidence_bound([0.6], 0.5), "readings: must lie in .*0.5]; got 0.6"),
    (lambda: ct.confidence_bound([math.nan], 0.5), "readings: must lie in"),
    (lambda: ct.confidence_bound([0.1], cap=math.inf), "cap: must lie in"),
    (lambda: ct.confidence_bound([0.1], 0.5, alpha=0), "alpha: must lie in"),
    # losses
    (lambda: priced(price=-1.0), r"price: must lie in \[0, inf\]; got -1.0"),
    (lambda: priced(price=[1.0, 2.0]), "price: must broadcast to the rows' batch shape"),
    (lambda: priced(price=1.0, divergence="total_variation"),
     "divergence: must be a smooth f-divergence"),
    (lambda: priced(price=1.0, divergence="renyi:a=0.5"),
     "divergence: must be a smooth f-divergence"),
    (lambda: priced(draft=DRAFT[:, :4], price=1.0), "draft_logits: shape must equal that of"),
    (lambda: priced(TARGET + torch.nan, price=1.0), "target_logits: every row"),
    (lambda: priced(draft=DRAFT - torch.inf, price=1.0), "draft_logits: every row"),
    (lambda: losses.along_block(torch.zeros(2, 3), torch.zeros(2, 2)),
     r"acceptance: shape must equal that of losses \(2, 3\)"),
    # divergences and specs
    (lambda: ct.divergence("nothing"), "divergence: must be one of kl, .*; got 'nothing'"),
    (lambda: ct.divergence("kl:a=2"), "divergence: kl takes no knobs; got 'kl:a=2'"),
    (lambda: ct.divergence("alpha"), "divergence: alpha needs exactly the knob a; got 'alpha'"),
    (lambda: ct.divergence("alpha:a"), "spec: knobs must read knob=value; got 'a' in 'alpha:a'"),
    (lambda: ct.divergence("alpha:a=1"), "a: must not be 0 or 1 .*; got '1'"),
    (lambda: ct.divergence("alpha:a=0"), "a: must not be 0 or 1 .*; got '0'"),
    (lambda: ct.divergence("alpha:a=17"), r"a: must lie in \[-16, 16\]; got '17'"),
    (lambda: ct.divergence("alpha:a=nan"), "a: must lie in .*; got 'nan'"),
    (lambda: ct.divergence("renyi:a=1"), "a: must not be 1 .*; got '1'"),
    (lambda: ct.divergence("renyi:a=0"), r"a: must lie in \(0, 16\]; got '0'"),
    (lambda: ct.divergence("renyi:a=x"), "a: must be a number; got 'x'"),
    (lambda: ct.divergence("renyi:a=２"), "a: must be written in the digits 0 to 9"),
    (lambda: ct.divergence("total_variation").slope_inverse(torch.tensor([0.1])),
     "no inverse slope"),
    (lambda: ct.policy("top_k", k=10**400), r"k: must be below 2\^63; got one of 1329 bits"),
    (lambda: ct.policy("top_k:k=99999999999999999999"), "k: must be a whole number; got"),
    (lambda: ct.policy("band:price=١"), "price: must be written in the digits 0 to 9"),
    (lambda: ct.policy("top_k:k=٣"), "k: must be written in the digits 0 to 9; got '٣'"),
    (lambda: ct.policy("band"), "delta, price: exactly one must be given; got none of them"),
    (lambda: ct.policy("band:price=1,divergence=max_divergence"),
     "price: max_divergence has no one-to-one price; name delta= instead; got"),
    (lambda: ct.selection_law(Q, P, k=10**400), r"k: must be below 2\^63"),
    (lambda: ct.frontier(Q, P, points=10**30), r"points: must be below 2\^63"),
]
TYPES = [
    (lambda: priced(draft=DRAFT.long(), price=1.0), "draft_logits: must be a tensor of"),
    (lambda: ct.divergence(3), "divergence: must be a spec string or a Divergence; got 3"),
]
# of emitted_law and of audit
OF_ROWS = [
    (ValueError, STRICT, (HALF, [0.5, 0.6]), None, "draft_probs: every row must sum to 1"),
    (TypeError, "cactus", (HALF, HALF), None, "policy: must be a Policy, .*; got 'cactus'"),
    (ValueError, STRICT, (ROWS, None), None, "exactly one must be given; got neither of them"),
    (ValueError, STRICT, (ROWS, HOT), [0] * 6, "exactly one must be given; got both of them"),
    (ValueError, STRICT, (ROWS, None), [7] * 6, r"draft_token_ids: must lie in \[0, 7\); got 7"),
    (ValueError, STRICT, (ROWS, None), -1, r"draft_token_ids: must lie in \[0, 7\); got -1"),
    (TypeError, STRICT, (ROWS, None), [0.5] * 6,
     "draft_token_ids: must hold whole numbers; got dtype"),
    (ValueError, STRICT, (ROWS, None), [1, 2], r"must broadcast with the rows' \(6,\); got \(2,\)"),
]
# fmt: on
CASES = [(*own, ValueError) for own in VALUES] + [(*own, TypeError) for own in TYPES]


@pytest.mark.parametrize(("call", "said", "kind"), CASES, ids=[own[1] for own in CASES])
def test_what_is_wrong_is_refused_by_name(call, said, kind):
    with pytest.raises(kind, match=said):
        call()


@pytest.mark.parametrize(("kind", "rule", "rows", "ids", "said"), OF_ROWS)
@pytest.mark.parametrize("call", [ct.emitted_law, ct.audit])
def test_rules_and_rows_that_are_none_are_refused(call, kind, rule, rows, ids, said):
    given = {} if ids is None else {"draft_token_ids": ids}
    with pytest.raises(kind, match=said):
        call(rule, *rows, **given)


def test_a_divergence_has_a_value_of_its_own():
    with pytest.raises(NotImplementedError):
        Divergence().value(torch.ones(1), torch.ones(1))
