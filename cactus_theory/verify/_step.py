"""One verification step on trusted rows: nothing is checked, only what is needed is read.

Drafted tokens are decided from gathered entries; one recovery or bonus row is built a row of
the batch. On a CPU flags are read on the host, which costs nothing there and spares the rows
that nobody asked for; elsewhere everything stays on the device and the step never waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._base import keep_probability
from cactus_theory.policies._per_proposal import PerProposal
from cactus_theory.policies.speculative import Speculative
from cactus_theory.verify._draw import pick

Recover = Callable[[Any], Tensor]
Decision = tuple[Float[Tensor, "batch K"], Recover]


# rules that decide from the drafted entries of the rows alone
GATHERED = (PerProposal, Speculative)


def decide(
    rule: Policy,
    q: Float[Tensor, "batch K vocab"],
    p: Float[Tensor, "batch K vocab"] | None,
    ids: Int[Tensor, "batch K"],
    accept: Float[Tensor, "batch K"],
    lengths: Sequence[int] | None = None,
) -> Decision:
    """Return what a rule decides, asking it only about tokens that need asking.

    A rule that solves something per row and never keeps less than lossless sampling is asked
    where lossless sampling would refuse, and not behind a row's first refusal; elsewhere φ
    is the lossless one.
    """
    screened = rule.declares.at_least_speculative and not isinstance(rule, GATHERED)
    if q.is_cuda or not screened:
        return rule.decide(q, p, ids)
    return _Screened(rule, q, p, ids, accept, lengths).decision()


class _Screened:
    """Rows of a batch on their way to their first refusal."""

    def __init__(
        self,
        rule: Policy,
        q: Float[Tensor, "batch K vocab"],
        p: Float[Tensor, "batch K vocab"] | None,
        ids: Int[Tensor, "batch K"],
        accept: Float[Tensor, "batch K"],
        lengths: Sequence[int] | None,
    ) -> None:
        self.rule, self.q, self.p, self.ids, self.accept = rule, q, p, ids, accept
        self.recovered: dict[int, Tensor] = {}
        q_n = q.gather(-1, ids[..., None])[..., 0].double()
        if p is None:
            self.phi = q_n
        else:
            self.phi = keep_probability(q_n, p.gather(-1, ids[..., None])[..., 0].double())
        batch, width = ids.shape
        drafted = [width] * batch if lengths is None else lengths
        doubts = (accept >= self.phi).tolist()
        self.left = {
            row: [place for place in range(drafted[row]) if doubts[row][place]]
            for row in range(batch)
        }

    def decision(self) -> Decision:
        """Ask about each row's first doubt, then about the next one of rows that go on."""
        while waiting := [row for row, places in self.left.items() if places]:
            at = torch.tensor(waiting), torch.tensor([self.left[row].pop(0) for row in waiting])
            own_p = None if self.p is None else self.p[at]
            phi, recover = self.rule.decide(self.q[at], own_p, self.ids[at])
            self.phi[at] = phi
            refused = self.accept[at] >= phi
            if bool(refused.any()):
                stopped = [row for row, stop in zip(waiting, refused.tolist(), strict=True) if stop]
                self.recovered |= dict(zip(stopped, recover(refused), strict=True))
                for row in stopped:
                    self.left[row] = []
        return self.phi, self.recover

    def recover(self, at: tuple[Any, Any]) -> Tensor:
        """Return the recovery rows at each row's first refusal."""
        rows = [0] if isinstance(at[0], slice) else at[0].tolist()
        return torch.stack([self.recovered[row] for row in rows])


def decide_mixed(
    rules: tuple[Policy, ...],
    choice: Int[Tensor, "batch K"] | None,
    q: Float[Tensor, "batch K vocab"],
    p: Float[Tensor, "batch K vocab"] | None,
    ids: Int[Tensor, "batch K"],
) -> Decision:
    """Return φ of every drafted token and a function from an index to recovery rows.

    Token i of row b is judged by ``rules[choice[b, i]]``; without ``choice`` by the only rule.
    """
    if choice is None:
        return rules[0].decide(q, p, ids)
    decisions = [rule.decide(q, p, ids) for rule in rules]
    phi = torch.stack([own for own, _ in decisions]).gather(0, choice[None])[0]

    def recover(at: Any) -> Tensor:
        which = choice[at]
        rows = decisions[0][1](at)
        for number, (_, own) in enumerate(decisions[1:], 1):
            rows = torch.where((which == number)[:, None], own(at).to(rows.dtype), rows)
        return rows

    return phi, recover


def settle(
    decision: Decision,
    q: Float[Tensor, "batch K1 vocab"],
    ids: Int[Tensor, "batch K"],
    lengths: Int[Tensor, "batch"] | None,
    accept: Float[Tensor, "batch K"],
    draw: Float[Tensor, "batch"],
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch"]]:
    """Return (B, K + 1) emitted ids padded with −1 and (B,) accepted counts.

    ``lengths`` (B,) tells how many tokens each row drafted, None stands for K everywhere.
    """
    phi, recover = decision
    kept = accept < phi
    if lengths is not None:
        kept &= _steps(ids) < lengths[:, None]
    if ids.is_cuda:
        return _on_device(recover, kept, q, ids, lengths, draw)
    drafted = None if lengths is None else lengths.tolist()
    counts, last = on_host(recover, kept, q, drafted, draw)
    accepted = torch.tensor(counts)
    output = torch.full((len(ids), ids.shape[1] + 1), -1, dtype=torch.int64)
    output[:, :-1] = torch.where(_steps(ids) < accepted[:, None], ids, -1)
    return output.scatter_(1, accepted[:, None], last[:, None]), accepted


def emit(
    decision: Decision,
    q: Float[Tensor, "batch K1 vocab"],
    ids: Int[Tensor, "batch K"],
    drafted: Sequence[int],
    accept: Float[Tensor, "batch K"],
    draw: Float[Tensor, "batch"],
) -> tuple[list[list[int]], Int[Tensor, "batch"]]:
    """Return the ids each row emits, as lists, and the last of them as a (B,) tensor.

    What :func:`settle` returns, with the least traffic: one transfer from a device.
    """
    width = ids.shape[1]
    full = min(drafted) == width
    lengths = None if full else torch.tensor(drafted, device=ids.device)
    if ids.is_cuda:
        output, accepted = settle(decision, q, ids, lengths, accept, draw)
        last = output.gather(1, accepted[:, None])[:, 0]
        return [[token for token in row if token >= 0] for row in output.tolist()], last
    phi, recover = decision
    kept = accept < phi
    if lengths is not None:
        kept &= _steps(ids) < lengths[:, None]
    counts, last = on_host(recover, kept, q, drafted, draw)
    rows = zip(ids.tolist(), counts, last.tolist(), strict=True)
    return [[*own[:count], token] for own, count, token in rows], last


def on_host(
    recover: Recover,
    kept: Bool[Tensor, "batch K"],
    q: Float[Tensor, "batch K1 vocab"],
    drafted: Sequence[int] | None,
    draw: Float[Tensor, "batch"],
) -> tuple[list[int], Int[Tensor, "batch"]]:
    """Return accepted counts and the (B,) tokens that follow them."""
    counts = [(flags + [False]).index(False) for flags in kept.tolist()]
    if drafted is None:
        drafted = [kept.shape[1]] * len(counts)
    if len(counts) == 1:  # views instead of copies
        at: Any = slice(0, 1), counts[0]
        return counts, pick((recover if counts[0] < drafted[0] else q.__getitem__)(at), draw)
    refused = [row for row, count in enumerate(counts) if count < drafted[row]]
    passed = [row for row, count in enumerate(counts) if count >= drafted[row]]
    last = torch.empty(len(counts), dtype=torch.int64)
    for rows, build in ((refused, recover), (passed, q.__getitem__)):
        if rows:
            at = torch.tensor(rows), torch.tensor([counts[row] for row in rows])
            last[at[0]] = pick(build(at), draw[at[0]])
    return counts, last


def _on_device(
    recover: Recover,
    kept: Bool[Tensor, "batch K"],
    q: Float[Tensor, "batch K1 vocab"],
    ids: Int[Tensor, "batch K"],
    lengths: Int[Tensor, "batch"] | None,
    draw: Float[Tensor, "batch"],
) -> tuple[Tensor, Tensor]:
    width = ids.shape[1]
    accepted = kept.long().cumprod(-1).sum(-1)
    rows = torch.arange(len(ids), device=ids.device)
    refused = accepted < (width if lengths is None else lengths)
    recovered = recover((rows, accepted.clamp(max=width - 1)))
    bonus = q[rows, accepted].to(recovered.dtype)
    output = torch.full((len(ids), width + 1), -1, dtype=torch.int64, device=ids.device)
    output[:, :width] = torch.where(_steps(ids) < accepted[:, None], ids, -1)
    token = pick(torch.where(refused[:, None], recovered, bonus), draw)
    return output.scatter(1, accepted[:, None], token[:, None]), accepted


def _steps(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)
