r"""Replay a policy and a verifier on logged rows; expectations over coins are exact.

For a round with drafted tokens x_1..x_K, :math:`P_i` is the probability that at least i tokens are
accepted (``VerdictLaw.alive``), and h_i is the emitted law at row i. A target call yields
:math:`1 + Σ_{i≥1} P_i` tokens and spends :math:`Σ_{i<K} P_i D(h_i‖q_i)`. The bonus token adds
:math:`P_K D(h_K‖q_K)`, which is 0 for most policies, because they draw it from q. Tokens after a
drafted end-of-text token do not count. A call without a draft yields one token.

Rounds start where the rounds of the logged decode started. So the estimates converge to the true
values (they are consistent) for the policy, verifier and K of that decode. For other settings the
estimates are for rounds at the same places, which makes settings comparable: paired errors are far
smaller than the error of each number.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.names import UNDRAFTED
from cactus_theory.base.threads import one_thread
from cactus_theory.decoding.setting import Setting
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.emitted import directions
from cactus_theory.optimum.bands import divergences_of
from cactus_theory.optimum.regret import RegretPath
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.regret import Regret
from cactus_theory.traces.estimate import Replay
from cactus_theory.traces.trace import ENTRIES, Batch, Trace
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Verifier, find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.node import Node, Nodes, ask_together, charge_nodes

OnCycles = Callable[[int], Any]
# signed quantities that a replay can add up like divergences: see cactus_theory.emitted.directions
SIGNED = "surprise", "agreement"
# quantities to add up, by name: a divergence, or None for a quantity of SIGNED
Metered = Mapping[str, Divergence | None]


def replay(
    trace: Trace | str | Path,
    policy: str | Policy,
    verifier: str | Verifier = defaults.VERIFIER,
    *,
    num_draft_tokens: int | None = None,
    divergences: Sequence[str | Divergence] = (),
    undrafted: str = "policy",
    on_cycles: OnCycles = int,
) -> Replay:
    """Compute tokens per target call and nats of a policy and a verifier on logged rounds.

    The expectations over coins are exact; nothing is sampled.

    Parameters
    ----------
    trace : a trace or its folder.
    policy : a Policy or a spec, such as ``"band:price=1"``.
    verifier : a Verifier or its name.
    num_draft_tokens : K, to which longer drafts are cut; None for all logged tokens.
    divergences : divergences to add up, and ``surprise`` or ``agreement``. By default KL, or regret
        on a trace of temperature 0.
    undrafted : from which row tokens that were not drafted are drawn: the row of the ``policy``, or
        q (``target``), which costs nothing and is how engines such as vLLM draw these tokens.
    on_cycles : called from time to time with the number of rounds that are done.

    Returns
    -------
    policy, verifier : specs.
    num_draft_tokens : K, the most drafted tokens of a round that were used.
    source : fingerprint of the trace.
    cycles : (T,), target calls of each text, with or without a draft.
    tokens : (T,), expected emitted tokens of each text.
    drafts : (T,), calls with a draft.
    drafted : (T,), drafted tokens.
    spent : by divergence (T,), the expected metered divergence (nats for KL).
    reached : (K, T), how often the token at place i of a draft is expected to be reached.
    accepted_at : (K, T), how often that token is expected to be accepted.

    Raises
    ------
    ValueError
        An unknown policy, verifier or divergence, a policy that the verifier does not support,
        more drafted tokens than were logged, a broken trace.
    NotImplementedError
        A verifier whose law cannot be computed.

    Examples
    --------
    >>> tokens = replay("simulations/data/trace", "speculative").tokens_per_call
    >>> print(f"{tokens.value:.2f} ± {tokens.standard_error:.2f} tokens a call")
    2.83 ± 0.10 tokens a call
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    options: dict[str, Any] = {"on_cycles": on_cycles, "undrafted": undrafted}
    replays = replay_widths(trace, policy, verifier, [num_draft_tokens], divergences, **options)
    (of_one_width,) = replays.values()
    return of_one_width


@one_thread()
def replay_widths(
    trace: Trace,
    policy: str | Policy,
    verifier: str | Verifier,
    widths: Sequence[int | None],
    divergences: Sequence[str | Divergence] = (),
    on_cycles: OnCycles = int,
    undrafted: str = "policy",
) -> dict[int, Replay]:
    """Return replays by K, for several K; rows are read once where :func:`shares_rows` is true."""
    check.one_of("undrafted", undrafted, UNDRAFTED)
    rising = sorted({draft_width(trace, width) for width in widths})
    rule, verifier = charged_policy(trace, policy), find_verifier(verifier)
    divergences = divergences or (trace.unit,)
    signed = {str(name): None for name in divergences if name in SIGNED}
    unsigned = (read_divergence(name) for name in divergences if name not in SIGNED)
    kinds: Metered = {kind.spec: kind for kind in unsigned} | signed
    verifier.check(rule)
    # a single pass serves all K if cutting a draft leaves the law at its first places unchanged
    passes = [rising] if shares_rows(rule, verifier) else [[width] for width in rising]
    logged, names = trace.header.setting, {"policy": rule.spec, "verifier": verifier.spec}
    replays = {
        width: _begun(trace, replace(logged, num_draft_tokens=width, **names), kinds)
        for width in rising
    }
    # regret at a price, metered in regret alone: whole rows are not needed
    by_price = isinstance(rule, Regret) and rule.price is not None and [*kinds] == [REGRET.spec]
    if by_price and isinstance(verifier, Chain | Block):
        path = rule.look_ahead
        assert isinstance(path, RegretPath)
        for sums in replays.values():
            _replay_regret(trace, path, isinstance(verifier, Block), sums)
        on_cycles(len(trace))
        return replays
    for together in passes:
        done = 0
        for batch in trace.batches(ENTRIES, together[-1]):
            law = batch_law(batch, rule, verifier, kinds, trace.ends)
            charges: dict[str, Tensor] = {}  # undrafted tokens that are drawn from q cost nothing
            if undrafted == "policy" and rule.moves_undrafted:
                charges = _undrafted(rule, batch.target_probs, together, kinds)
            for width in together:
                replays[width].add(batch.text, *law, charges)
            done += len(batch.text)
            on_cycles(done)
    return replays


def _undrafted(rule: Policy, q: Tensor, widths: Sequence[int], kinds: Metered) -> dict[str, Tensor]:
    """Return by divergence the charge of an undrafted token after i accepted ones, (B, K + 1).

    Only the entries at the ends of drafts of ``widths`` tokens are computed; all others are 0.
    """
    ends = sorted({min(width, q.shape[1] - 1) for width in widths})
    rows = q[:, ends].flatten(0, 1)
    h, charges = rule.undrafted(rows), {}
    for spec, kind in kinds.items():
        charges[spec] = q.new_zeros(q.shape[:2], dtype=torch.float64)
        charges[spec][:, ends] = _of_rows(spec, kind, h, rows).reshape(len(q), -1)
    return charges


def _replay_regret(trace: Trace, path: RegretPath, ahead_counts: bool, sums: Replay) -> None:
    """Add all rounds of a trace to ``sums``, under a policy of regret.

    Only the regrets of the drafted tokens are read. They suffice because a token that is not
    accepted is replaced by its row's argmax, at regret 0. The general code writes whole rows and
    takes ten times as long or more. ``ahead_counts``: whether the tokens after a token count in the
    decision to keep it, as under a block.
    """
    for text, *whole in trace.losses:
        width = min(whole[0].shape[1], sums.num_draft_tokens)
        ids, lost, best = (rows[:, :width] for rows in whole)
        kept = path.kept(lost, best, ids.new_full((len(ids),), width), ahead_counts)
        alive = torch.cat([kept.new_ones(len(ids), 1), kept.cumprod(-1)], -1)
        spent = torch.where(kept > 0, lost, 0.0)
        sums.add(text, alive, _going(ids, trace.ends), {REGRET.spec: spent}, {})


def _going(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return (B, K + 1), whether none of the first i drafted tokens ends the text."""
    ended = torch.isin(ids, ids.new_tensor(ends)).cumsum(-1) > 0
    return torch.cat([ended.new_zeros(len(ids), 1), ended], -1).logical_not()


def charged_policy(trace: Trace, policy: str | Policy) -> Policy:
    """Return a policy with the trace's end tokens for ``eos``.

    At temperature 0 the policy is that of :func:`greedy_policy`. Raises ValueError for a
    policy that is charged in a different unit from the trace's.
    """
    rule = read_policy(policy).at_ends(trace.ends)
    if trace.unit == REGRET:
        return greedy_policy(rule)
    check_unit(rule.spec, rule.unit, trace.unit, f"temperature {trace.header.temperature:g}")
    return rule


def greedy_policy(policy: str | Policy) -> Policy:
    """Return a policy for temperature 0; ``speculative`` becomes strict greedy decoding.

    Raises ValueError for a policy that relaxes nothing at temperature 0.
    """
    rule = read_policy(policy)
    if rule.spec == defaults.POLICY:
        return read_policy(defaults.STRICT)
    check_unit(rule.spec, rule.unit, REGRET, "temperature 0")
    return rule


def check_unit(spec: str, of_policy: Divergence, charged: Divergence, where: str) -> None:
    """Raise ValueError if only one of two units, the policy's and the charged one, is regret."""
    if of_policy != charged == REGRET:
        raise ValueError(
            f"policy: {spec} relaxes nothing at temperature 0, and regret does; got {where}"
        )
    if charged != of_policy == REGRET:
        raise ValueError(f"policy: {spec} is for temperature 0; got {where}")


def shares_rows(policy: str | Policy, verifier: str | Verifier) -> bool:
    """Return whether cutting a draft leaves the law at its first places unchanged.

    True for a chain, and for a block in which h does not depend on the later drafted tokens.
    """
    verifier = find_verifier(verifier)
    return isinstance(verifier, Chain) or (
        isinstance(verifier, Block) and read_policy(policy).look_ahead is None
    )


def _begun(trace: Trace, setting: Setting, kinds: Iterable[str]) -> Replay:
    """Return a replay with all sums 0."""
    reached, accepted_at = np.zeros((2, setting.num_draft_tokens, trace.texts))
    calls, tokens, drafts, drafted = np.zeros((4, trace.texts))
    spent = {spec: np.zeros(trace.texts) for spec in kinds}
    return Replay(
        **vars(setting), source=trace.fingerprint, cycles=calls, tokens=tokens, spent=spent,
        reached=reached, accepted_at=accepted_at, drafts=drafts, drafted=drafted,
    )  # fmt: skip


def draft_width(trace: Trace, width: int | None) -> int:
    """Return how many drafted tokens of a round to use: ``width``, or all logged ones for None.

    Raises ValueError if fewer were logged.
    """
    logged = trace.num_draft_tokens
    if width is not None and check.whole_number("num_draft_tokens", width, 1) > logged:
        raise ValueError(f"num_draft_tokens: must be at most the {logged} logged; got {width}")
    return logged if width is None else width


def batch_law(
    batch: Batch,
    policy: Policy,
    verifier: Verifier,
    kinds: Metered,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return for a batch of rounds three arguments of :meth:`Replay.add`.

    ``alive``: the probability that at least i drafted tokens are accepted; ``going``: whether none
    of the first i ends the text; ``spent``: the divergence at each position.
    """
    ids, q = batch.draft_token_ids, batch.target_probs
    going = _going(ids, ends)
    assigned, width = Assignment((policy,)), ids.shape[1]
    draft = Draft(ids, [width] * len(ids), batch.draft_probs)
    if not isinstance(verifier, Chain | Block):
        law = verifier.law(assigned, q, draft)
        rows = law.emitted[:, :width], q[:, :width]
        return law.alive, going, {spec: _of_rows(spec, kind, *rows) for spec, kind in kinds.items()}
    # for a chain and a block no residual is needed, only each node's next ratio and divergence
    node_at, by_path = Nodes(verifier, assigned, q, draft).at, verifier.by_path
    alive = q.new_zeros(len(ids), width + 1, dtype=torch.float64)
    alive[:, 0] = 1.0
    spent = {spec: torch.zeros_like(alive[:, 1:]) for spec in kinds}
    for place in range(width):
        # rows and alive ratios P; a node that is never reached spends nothing and is not solved
        reached = {row: ratio for row, ratio in enumerate(alive[:, place].tolist()) if ratio > 0}
        rows = [*reached]
        nodes = [node_at(row, place, ratio if by_path else 1.0) for row, ratio in reached.items()]
        for spec, kind in kinds.items():
            spent[spec][rows, place] = alive.new_tensor(_of_nodes(spec, kind, nodes))
        # P after the token in a block; in a chain, whose nodes have P = 1, the token's φ
        after = alive.new_tensor([node.next_alive for node in ask_together(nodes)])
        alive[rows, place + 1] = after if by_path else alive[rows, place] * after
    return alive, going, spent


def _of_nodes(spec: str, kind: Divergence | None, nodes: Sequence[Node]) -> list[float]:
    """Return by node the divergence ``kind``; if None, surprise or agreement, as ``spec`` says."""
    if kind is None:
        # directions are entropy, surprise and agreement
        return [node.directions[1 + SIGNED.index(spec)] for node in nodes]
    charge_nodes(nodes, kind)
    return [node.charge(kind).spent for node in nodes]


def _of_rows(spec: str, kind: Divergence | None, h: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of rows h from rows q, or (``kind`` None) surprise or agreement."""
    if kind is None:
        _, *signed = directions(h.double(), q.double())  # without the entropy
        return signed[SIGNED.index(spec)]
    return divergences_of(kind, h, q)
