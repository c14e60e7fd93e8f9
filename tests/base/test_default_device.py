"""Every tensor made inside names its device: another default than that of the rows changes nothing.

The meta device stands for a GPU: what is made there has no values. Every public function has a
case; a new one without a case fails.
"""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import cactus_theory as ct
import tests.kernels.conftest  # noqa: F401  (kernels that are loaded now stay interpreted)
from cactus_theory import decoding, kernels, losses, traces
from cactus_theory.decoding.result import Seconds
from tests.decoding.conftest import disturbed, random_llama

Q = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)[None]
P = torch.tensor([[0.1, 0.1, 0.8]] * 2, dtype=torch.float64)[None]
IDS, PARENTS = torch.tensor([[2, 2]]), torch.tensor([[-1, 0]])
FIXED, PROMPT = torch.tensor([[False, True]]), torch.tensor([[1, 2, 3]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
AT = {"seeds": torch.tensor([7]), "positions": torch.tensor([12])}
LOGITS = Q.float().log(), P.float().log()
ROWS = Q[0], Q[0].flip(-1)
PRICED = "band:price=1"


@ct.rule
def lossless(q, p, n):
    return min(1, q[n] / p[n])


POLICIES = [
    ct.policy(PRICED),
    ct.policy("band:delta=0.1,divergence=max_divergence,head=0.5"),
    ct.policy("band:price=1,hold=1,floor=2"),
    ct.policy("cactus:delta=0.1"),
    lossless,
]
OF_BLOCKS = [policy for policy in POLICIES if policy is not lossless]


def sources():
    yield torch.Generator().manual_seed(0)
    yield [torch.Generator().manual_seed(0)]


def verified(verify, policies, *others, **more):
    return [
        verify(policy, Q, draft, IDS, *others, generator=source, **more)
        for policy in policies
        for draft in (P, None)
        for source in sources()
    ]


def tree(_):
    both = {"sampled": ~FIXED, "deterministic": FIXED}
    yield verified(ct.verify_tree, OF_BLOCKS, PARENTS)
    for policy in OF_BLOCKS:
        yield ct.verify_tree(
            policy, Q, P, IDS, PARENTS, generator=torch.Generator().manual_seed(0), **both
        )


def pair():
    target = random_llama()
    return target, disturbed(target)


PAIR = pair()


def decoded(_):
    own = {"num_draft_tokens": 3, "max_new_tokens": 6, "seed": 0}
    drafters = {
        "chain": PAIR[1],
        "block": PAIR[1],
        "tree": decoding.Siblings(decoding.ModelDrafter(PAIR[1]), m=2),
    }
    for verifier, draft in drafters.items():
        for more in ({}, {"fast_forward": False}, {"log_probs": True, "record_rows": True}):
            for policy in (PRICED, "speculative", decoding.Ledger(ct.policy(PRICED), 0.05)):
                options = {"policy": policy, "verifier": verifier} | own | more
                yield ct.generate(PAIR[0], draft, PROMPT, **options)
    for draft in (decoding.NGram(), decoding.EarlyExit(1)):
        yield ct.generate(PAIR[0], draft, PROMPT, policy=PRICED, **own)
    two = own | {"attention_mask": MASK, "policy": [PRICED, "speculative"], "seed": [0, 1]}
    yield ct.generate(*PAIR, PROMPT.repeat(2, 1), **two, eos_token_ids=5)
    yield ct.generate(*PAIR, PROMPT, policy=PRICED, temperature=0.0, **own)
    yield ct.generate(*PAIR, PROMPT, policy=PRICED, device_loop="torch", **own)


def hooked(_):
    from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

    config = GenerationConfig(max_length=9, do_sample=True, eos_token_id=5, pad_token_id=0)
    yield decoding.speculative_generate(
        PAIR[0], PROMPT, [RepetitionPenaltyLogitsProcessor(1.2)], generation_config=config,
        draft_model=PAIR[1], policy=PRICED, seed=0,
    )  # fmt: skip


def saved(folder, name="own"):
    cycles = [[traces.Cycle(text, 0, IDS[0], Q[0], P[0])] * 3 for text in range(4)]
    return traces.save_trace(
        folder / name, cycles, vocab_size=3, num_draft_tokens=2, eos_token_ids=[1]
    )


def logged(folder):
    lengths = {"num_draft_tokens": 2, "max_new_tokens": 5}
    for verifier in ("chain", "block"):
        options = {"policy": PRICED, "verifier": verifier, "eos_token_ids": 5}
        yield traces.log_trace(*PAIR, [[1, 2]] * 3, folder / verifier, **lengths, **options)


def programs(function, *asked):
    return lambda _: [function(*ROWS, **own) for own in asked]


def lost(function):
    return lambda _: function(Q[0].log(), ROWS[1].log())


ASKED = {"delta": 0.1}, {"price": 1.0}, {"acceptance": 0.9}
CASES = {
    ct.audit: lambda _: [ct.audit(policy, *ROWS) for policy in POLICIES],
    ct.emitted_law: lambda _: [
        [ct.emitted_law(policy, *ROWS) for policy in POLICIES],
        [ct.emitted_law(policy, Q[0], None, draft_token_ids=[0, 1, 2]) for policy in POLICIES],
    ],
    ct.optimal_acceptance: programs(ct.optimal_acceptance, *ASKED),
    ct.pooled_acceptance: programs(ct.pooled_acceptance, *ASKED),
    ct.pooled_frontier: programs(ct.pooled_frontier, {"points": 4}),
    ct.selection_law: programs(
        ct.selection_law,
        {"kind": "iid"},
        {"kind": "deterministic+sampled", "deterministic": [2, 2, 2]},
    ),
    ct.verify_chain: lambda _: verified(ct.verify_chain, POLICIES),
    ct.verify_block: lambda _: verified(ct.verify_block, OF_BLOCKS),
    ct.verify_tree: tree,
    ct.generate: decoded,
    decoding.speculative_generate: hooked,
    traces.save_trace: lambda folder: list(saved(folder)),
    traces.log_trace: lambda folder: map(list, logged(folder)),
    traces.replay: lambda folder: [
        traces.replay(saved(folder, verifier), PRICED, verifier) for verifier in ("chain", "block")
    ],
    traces.expect: lambda folder: [traces.expect(saved(folder), PRICED)],
    kernels.verify_logits: lambda _: [
        kernels.verify_logits(ct.policy(PRICED), LOGITS[0], draft, IDS, **AT, verifier=verifier)
        for draft in (LOGITS[1], None)
        for verifier in ("chain", "block")
    ],
    **{getattr(losses, name): lost(getattr(losses, name)) for name in losses.__all__},
}
# why a function has no case
OF_TRANSFORMERS = "transformers reads models, and refuses meta as the default by name"
EXCEPTIONS = {
    decoding.load_pair: OF_TRANSFORMERS,
    decoding.read_drafter: OF_TRANSFORMERS,
    **dict.fromkeys(  # fmt: skip
        (
            ct.confidence_bound,
            ct.divergence,
            ct.list_policies,
            ct.load_tuned,
            ct.policy,
            ct.register,
            ct.register_divergence,
            ct.rule,
            kernels.has_kernel,
        ),
        "takes no tensor and gives none",
    ),
}


def public():
    modules = (ct, decoding, traces, kernels, losses)
    every = [getattr(module, name) for module in modules for name in module.__all__]
    return set(filter(inspect.isfunction, every))


def leaves(answer):
    """Yield what an answer holds but seconds, as arrays, numbers or words."""
    if isinstance(answer, torch.Tensor | np.ndarray | np.generic):
        yield torch.as_tensor(answer, device="cpu").detach().numpy()
    elif isinstance(answer, Seconds):
        return
    elif dataclasses.is_dataclass(answer):
        yield from leaves([getattr(answer, field.name) for field in dataclasses.fields(answer)])
    elif isinstance(answer, dict):
        yield from leaves(list(answer.values()))
    elif isinstance(answer, str) or not hasattr(answer, "__iter__"):
        yield answer if isinstance(answer, (str, int, float, bool)) else str(type(answer))
    else:
        for one in answer:
            yield from leaves(one)


def test_every_public_function_has_a_case():
    assert public() == CASES.keys() ^ EXCEPTIONS.keys()


@pytest.mark.parametrize("function", CASES, ids=lambda one: f"{one.__module__}.{one.__name__}")
def test_another_default_device_changes_nothing(function, tmp_path):
    found = []
    for device in (None, "meta"):
        (tmp_path / str(device)).mkdir()
        torch.set_default_device(device)
        try:
            found.append([*leaves(CASES[function](tmp_path / str(device)))])
        finally:
            torch.set_default_device(None)
    np.testing.assert_equal(*found)
