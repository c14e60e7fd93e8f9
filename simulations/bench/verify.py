"""Time one verification step at a large vocabulary, compared with the simple dense way."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding.meter import Meter
from cactus_theory.verify import find_verifier
from cactus_theory.verify.node import nodes_of_rows

from .theory import clocked

# texts, drafted tokens, and the vocabulary of Qwen 3
BATCH, WIDTH, VOCAB = 8, 8, 151_936
# budget in nats of the dense Cactus step that the other steps are compared with
DELTA = 0.1
# every policy whose step is timed; add a spec and it is in the table
POLICIES = (
    "speculative",
    "cactus:delta=0.1",
    "cactus_exact:delta=0.1",
    "band:delta=0.1",
    "band:price=1",
    "band:price=2",
    "band:price=2,divergence=reverse_kl",
    "typical",
    "mixture:alpha=0.5",
    "fuzzy:threshold=0.5",
    "lenience:lenience=0.5",
)
# policies whose meter is timed, row by row
METERED = ("band:price=1", "band:delta=0.1", "cactus:delta=0.1", "lenience:lenience=0.5")
# policy timed in block verification → policy whose chain step is the comparison
BLOCKS = {
    "speculative": "speculative",
    "band:price=1": "band:price=1",
    "band:price=1,per_row=True": "band:price=1",
    "cactus:delta=0.1": "cactus:delta=0.1",
}
RIVALS = {f"verify_block, {spec}": f"verify_chain, {rival}" for spec, rival in BLOCKS.items()}
HEADS = {
    "draft": "draft", "job": "job", "milliseconds": "ms", "softmaxes": "softmaxes",
    "times_faster_than_dense": "× faster\nthan dense", "times_chain": "× chain",
    "accepted": "accepted", "refused_rows": "rows\nrefused",
}  # fmt: skip
SOFTMAX, DENSE = "softmax of the target rows", "dense, cactus:delta=0.1"
# standard deviation of the noise in the draft's logits: for usual acceptance, for almost none
NOISES = {"usual draft": 1.0, "poor draft": 4.0}


def dense_step(
    q: Tensor, p: Tensor, ids: Tensor, delta: float, coins: Tensor
) -> tuple[Tensor, ...]:
    """Verify a chain under Cactus the simple way: build h and (h − p)₊ at all positions (B, K, V).

    A recovered token is drawn at every position, whether it is used or not.
    """
    n = ids[..., None]
    target = q[:, :-1]
    q_n, p_n = target.gather(-1, n), p.gather(-1, n)
    raised = (q_n + (2 * delta * q_n * (1 - q_n)).sqrt()).clamp(max=1.0)
    h = (target * ((1 - raised) / (1 - q_n))).scatter(-1, n, raised)
    kept = (coins < (raised / p_n)[..., 0]).long().cumprod(-1)
    residual = (h - p).clamp(min=0.0)
    total = residual.sum(-1, keepdim=True)
    residual = torch.where(total > 0, residual / total, h)
    recovered = torch.multinomial(residual.flatten(0, 1), 1).view(ids.shape)
    bonus = torch.multinomial(q[:, -1], 1)
    accepted = kept.sum(-1)
    last = torch.cat([recovered, bonus], -1).gather(-1, accepted[:, None])
    return torch.where(kept > 0, ids, -1), last, accepted


def rows(
    vocab: int, batch: int, seed: int, width: int, noise: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return float32 rows of target and draft, drafted tokens and coins.

    ``noise`` is the standard deviation of the noise in the draft's logits.
    """
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, width + 1, vocab, generator=source)
    stray = noise * torch.randn(batch, width, vocab, generator=source)
    q, p = logits.softmax(-1), (logits[:, :-1] + stray).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).view(batch, width)
    coins = torch.rand(batch, width + 1, generator=source, dtype=torch.float64)
    return q, p, ids, (coins[:, :width], coins[:, width])


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    for kind, noise in NOISES.items():
        yield from _measured(kind, noise, repeats)


def _measured(kind: str, noise: float, repeats: int) -> Iterator[dict[str, Any]]:
    jobs = _jobs(*rows(VOCAB, BATCH, 0, WIDTH, noise))
    with torch.inference_mode():
        times, last = clocked(jobs, repeats)
    medians = {name: each["milliseconds"] for name, each in times.items()}
    for name, spread in times.items():
        kept = getattr(last[name], "num_accepted", None)
        yield {
            "draft": kind,
            "job": name,
            "batch": BATCH,
            "drafted": WIDTH,
            "vocabulary": VOCAB,
            **spread,
            "times_faster_than_dense": medians[DENSE] / medians[name],
            "softmaxes": medians[name] / medians[SOFTMAX],
            "times_chain": medians[name] / medians[RIVALS[name]] if name in RIVALS else "",
            "accepted": "" if kept is None else int(kept.sum()),
            "refused_rows": "" if kept is None else int((kept < WIDTH).sum()),
        }


def _jobs(
    q: Tensor, p: Tensor, ids: Tensor, coins: tuple[Tensor, Tensor]
) -> dict[str, Callable[[], Any]]:
    logits, memory = q.log(), torch.empty_like(q)  # so that the softmax allocates nothing
    jobs: dict[str, Callable[[], Any]] = {
        SOFTMAX: lambda: torch.softmax(logits, -1, out=memory),
        DENSE: lambda: dense_step(q, p, ids, DELTA, coins[0]),
    }
    given = {"coins": coins, "validate": False}
    for spec in POLICIES:
        step = partial(ct.verify_chain, ct.policy(spec), q, p, ids, **given)
        jobs[f"verify_chain, {spec}"] = step
    for spec in METERED:
        charge = partial(_metered, ct.policy(spec), q[:, 1:].flatten(0, 1), p.flatten(0, 1))
        jobs[f"meter of {BATCH * WIDTH} rows, {spec}"] = charge
    for spec in BLOCKS:
        step = partial(ct.verify_block, ct.policy(spec), q, p, ids, **given)
        jobs[f"verify_block, {spec}"] = step
    return jobs


def _metered(policy: ct.Policy, q: Tensor, p: Tensor) -> None:
    Meter().add(nodes_of_rows(find_verifier("chain"), policy, q, p))
