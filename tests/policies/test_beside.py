"""What policies say of a node with certain tokens, compared with their row of the selection law."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.optimum.selection import offered
from cactus_theory.policies._records import Node, Path
from tests.amounts import amount

# edges found by two searches, each settled to some roundings; bands of KL on float32 rows are
# settled to a step of 2e-5 in their edges
CLOSE = {np.float64: 1e-11, np.float32: 3e-5}
RULES = {
    "speculative": ct.policy("speculative"),
    "band": ct.policy("band:price=1"),
    "cheap band": ct.policy("band:price=0.05"),
    "reverse": ct.policy("band:price=2,divergence=reverse_kl"),
    "chi": ct.policy("band:price=1,divergence=pearson_chi2"),
    "hellinger": ct.policy("band:price=3,divergence=squared_hellinger"),
    "soft": ct.policy("soft_band:price=1"),
    "soft reverse": ct.policy("soft_band:price=1,divergence=reverse_kl"),
    "lossless soft": ct.policy("soft_band:price=inf"),
}
# rows, certain tokens and the drafted one: certain or not, out of reach, tied in p°/q
CASES = {
    "beside": lambda q, r: (q, r, [0, 1], 2),
    "joint": lambda q, r: (q, r, [0, 1], 1),
    "likeliest": lambda q, r: (q, r, np.argsort(-r)[:3].tolist(), int(r.argmax())),
    "off": lambda q, r: (q, _without(r, [0, 1]), [0, 1], 2),
    "out of reach": lambda q, r: (_without(q, [0, 1]), r, [0, 1], 2),
    "in part": lambda q, r: (_without(q, [0]), r, [0, 1], 0),
    "all": lambda q, r: (q, r, list(range(len(q))), 1),
    "ties": lambda q, r: (np.full_like(q, 1 / len(q)), np.full_like(q, 1 / len(q)), [0, 1], 3),
    "equal": lambda q, r: (q, q, [2], 1),
}


def _without(row, tokens):
    row = row.copy()
    row[tokens] = 0
    return row / row.sum()


def dense(rule, q, r, certain, n, alive, left):
    """Return P h_n/r_n and (P h − r)₊ from the row h of the selection law."""
    law = torch.from_numpy(offered(q, r, certain))
    path = Path(torch.tensor([alive], dtype=torch.float64), torch.tensor([left]))
    h = rule.target_in_block(torch.from_numpy(q)[None], law[None], path)[0].double().numpy()
    raised = alive * h[n]
    ratio = raised / r[n] if r[n] else math.inf * (raised > 0)
    return ratio, np.maximum(alive * h - r, 0)


def test_what_is_drafted_beyond_its_share_is_not_kept_at_any_price():
    """Where nothing is cut the sums that decide are 0 but for rounding, whatever its sign."""
    rule = ct.policy("soft_band:price=0.001,divergence=pearson_chi2")
    for seed in range(40):
        q, r = np.random.default_rng(seed).dirichlet(np.full(8, 5.0), 2)
        n = int((r / q).argmax())
        certain = [token for token in np.argsort(-q).tolist() if token != n][:2]
        ratio, _ = dense(rule, q, r, certain, n, 1.0, 0)
        found, *_ = rule.follow_row(Node(q, r, q[n], r[n], 1.0, 0, False, certain))
        assert found == pytest.approx(ratio, abs=CLOSE[np.float64]) and ratio < 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RULES)
def test_certain_tokens_are_raised_as_the_selection_law_says(name, case):
    rule, source = RULES[name], np.random.default_rng(len(name) + len(case))
    for number in range(amount(2, 40)):
        vocab = (6, 40)[number % 2]
        drawn = (source.dirichlet(np.full(vocab, 0.6)) for _ in range(2))
        q, r, certain, n = CASES[case](*drawn)
        alive, left = source.choice([1.0, 0.6, 0.05]), number % 2
        ratio, residual = dense(rule, q, r, certain, n, alive, left)
        for dtype, close in CLOSE.items():
            own_q, own_r = q.astype(dtype), r.astype(dtype)
            entries = float(own_q[n]), float(own_r[n])
            rest = own_q, own_r, *entries, alive, left
            found, scale, level = rule.follow_row(Node(*rest, True, certain, n in certain))
            assert min(found, 1) == pytest.approx(min(ratio, 1), abs=close)
            if ratio < 1 - close or scale is not None:
                left_over = np.maximum(scale * q - r, 0)
                reached = [token for token in certain if q[token] > 0]
                left_over[reached] = np.maximum(level * q[reached] - r[reached], 0)
                assert np.abs(left_over - residual).max() <= close
            bound = rule.highest * alive
            assert level is None or not q[certain].any() or level <= bound * (1 + close)
            passing = rule.follow_row(Node(*rest, False, certain, n in certain))[0]
            assert min(passing, 1) == pytest.approx(min(ratio, 1), abs=close)
