"""Audits of deterministic drafts: the emitted law is φ(n) e_n + (1 − φ) g."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.rows import pair
from tests.rules import RULES, SPECS

Q = pair(6, 7, seed=4)[0]
IDS = torch.tensor([0, 6, 2, 3, 3, 1])
HOT = torch.nn.functional.one_hot(IDS, 7).double()


@pytest.mark.parametrize("spec", SPECS[::3])
def test_the_law_is_what_acceptance_and_residual_say(spec: str) -> None:
    rule = RULES[spec]
    law = ct.emitted_law(rule, Q, None, draft_token_ids=IDS)
    phi = rule.acceptance(Q, HOT, IDS[:, None])
    expected = phi * HOT + (1 - phi) * rule.residual(Q, HOT, IDS)
    torch.testing.assert_close(law, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(law, ct.emitted_law(rule, Q, HOT), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["cactus:delta=0.25", "band:delta=0.1", "typical"])
def test_an_audit_equals_that_of_one_hot_rows(spec: str) -> None:
    rule = ct.policy(spec)
    found, rows = ct.audit(rule, Q, None, draft_token_ids=IDS), ct.audit(rule, Q, HOT)
    for name in ("acceptance", "optimum_acceptance", "optimum_divergence"):
        torch.testing.assert_close(getattr(found, name), getattr(rows, name), equal_nan=True)
    torch.testing.assert_close(found.divergences["kl"], rows.divergences["kl"])
    torch.testing.assert_close(found.acceptance, rule.acceptance(Q, HOT, IDS[:, None])[:, 0])


def test_kinds_of_ids_and_their_shapes() -> None:
    rule = ct.policy("speculative")
    law = ct.emitted_law(rule, Q[0].float().numpy(), None, draft_token_ids=2)
    assert isinstance(law, np.ndarray) and law.dtype == np.float64 and law.shape == (7,)
    assert ct.emitted_law(rule, Q, None, draft_token_ids=4).shape == (6, 7)
    several = ct.audit(rule, Q[0], None, draft_token_ids=[0, 1, 2])
    torch.testing.assert_close(several.acceptance, Q[0, :3])
    batch = Q.reshape(2, 3, 7), IDS.reshape(2, 3)
    assert ct.audit(rule, batch[0], None, draft_token_ids=batch[1]).acceptance.shape == (2, 3)


@pytest.mark.parametrize(
    ("draft", "ids", "kind", "said"),
    [
        (None, None, ValueError, "exactly one must be given; got neither of them"),
        (HOT, IDS, ValueError, "exactly one must be given; got both of them"),
        (None, [7] * 6, ValueError, r"draft_token_ids: must lie in \[0, 7\); got 7"),
        (None, -1, ValueError, r"draft_token_ids: must lie in \[0, 7\); got -1"),
        (None, [0.5] * 6, TypeError, "draft_token_ids: must hold whole numbers; got dtype"),
        (None, [1, 2], ValueError, r"must broadcast with the rows' \(6,\); got \(2,\)"),
    ],
)
@pytest.mark.parametrize("call", [ct.emitted_law, ct.audit])
def test_what_is_refused(call, draft, ids, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        call(ct.policy("speculative"), Q, draft, draft_token_ids=ids)
