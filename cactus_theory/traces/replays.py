r"""Run a policy and a verifier on logged rows, all coins integrated out.

Of a cycle with drafted tokens x_1..x_K let :math:`P_i` be the probability that at least i of
them are accepted (``VerdictLaw.alive``) and h_i the emitted law at row i. Then a target call
yields :math:`1 + Σ_{i≥1} P_i` tokens and spends :math:`Σ_{i<K} P_i D(h_i‖q_i)` and, for the bonus
token, :math:`P_K D(h_K‖q_K)`: 0 where a policy leaves undrafted tokens to the target, as most do.
Tokens after a drafted end-of-text token count for nothing. A call without a draft yields one token.

Cycles start where those of the logged lossless decode did. For that decode's own K, policy and
verifier the numbers are consistent; for others they are what these would do at the same places,
which is what makes them comparable, with paired errors far smaller than their own.
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
# what a replay adds up beside divergences, signed (cactus_theory.emitted.directions)
SIGNED = "surprise", "agreement"
# what is added up by name: a divergence, or None for one of these
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
    """Replay a policy and a verifier on logged cycles; exact, nothing is sampled.

    Parameters
    ----------
    trace : a trace or its folder.
    policy : a Policy or a spec, such as ``"band:price=1"``.
    verifier : by name or a Verifier.
    num_draft_tokens : cut longer drafts to so many tokens; None for all that were logged.
    divergences : which ones the meter adds up; ``surprise`` and ``agreement``, too. Without any,
        KL, of a trace of temperature 0 regret.
    undrafted : who draws tokens that were not drafted: the ``policy``, or the ``target``, which
        costs nothing (an engine that draws them itself, such as vLLM).
    on_cycles : called with how many cycles are done, now and then.

    Returns
    -------
    policy, verifier : their specs.
    num_draft_tokens : K, the most tokens of a draft that were used.
    source : fingerprint of the trace.
    cycles, tokens : (T,) sums over each text's calls, those without a draft as well, of 1, and of
        the expected tokens of a call.
    drafts, drafted : (T,), calls with a draft, and the tokens that were drafted.
    spent : divergence → (T,), the expected metered divergence (nats for KL).
    reached, accepted_at : (K, T), how often place i of a draft is expected to be decided, and
        accepted.

    Raises
    ------
    ValueError
        An unknown policy, verifier or divergence, a policy that the verifier cannot follow,
        more drafted tokens than were logged, a broken trace.
    NotImplementedError
        A verifier whose law cannot be enumerated, or metered.

    Examples
    --------
    >>> tokens = replay("simulations/data/trace", "speculative").tokens_per_call
    >>> print(f"{tokens.value:.2f} ± {tokens.standard_error:.2f} tokens a call")
    2.83 ± 0.10 tokens a call
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    widths = [num_draft_tokens]
    given = trace, policy, verifier, widths, divergences, on_cycles, undrafted
    (one,) = replay_widths(*given).values()
    return one


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
    """Return :func:`replay` at several K, in one pass where :func:`shares_rows` allows it."""
    check.one_of("undrafted", undrafted, UNDRAFTED)
    checked = sorted({draft_width(trace, width) for width in widths})
    rule, verifier = charged_policy(trace, policy), find_verifier(verifier)
    divergences = divergences or (trace.unit,)
    signed = {str(name): None for name in divergences if name in SIGNED}
    named = map(read_divergence, (own for own in divergences if own not in SIGNED))
    kinds: Metered = {kind.spec: kind for kind in named} | signed
    verifier.check(rule)
    passes = [checked] if shares_rows(policy, verifier) else [[width] for width in checked]
    logged, names = trace.header.setting, {"policy": rule.spec, "verifier": verifier.spec}
    replays = {
        width: _begun(trace, replace(logged, num_draft_tokens=width, **names), kinds)
        for width in checked
    }
    by_price = isinstance(rule, Regret) and rule.price is not None and [*kinds] == [REGRET.spec]
    if by_price and isinstance(verifier, Chain | Block):
        path = rule.look_ahead
        assert isinstance(path, RegretPath)
        for replay in replays.values():
            _replay_regret(trace, path, isinstance(verifier, Block), replay)
        on_cycles(len(trace))
        return replays
    for together in passes:
        done = 0
        for batch in trace.batches(ENTRIES, together[-1]):
            law = batch_law(batch, rule, verifier, kinds, trace.ends)
            q, free = batch.target_probs, dict[str, Tensor]()
            if undrafted == "policy" and rule.moves_undrafted:
                ends = sorted({min(width, q.shape[1] - 1) for width in together})
                own = q[:, ends].flatten(0, 1)
                h = rule.undrafted(own)
                for spec, kind in kinds.items():
                    free[spec] = q.new_zeros(q.shape[:2], dtype=torch.float64)
                    free[spec][:, ends] = _of_rows(spec, kind, h, own).reshape(len(q), -1)
            for width in together:
                replays[width].add(batch.text, *law, free)
            done += len(batch.text)
            on_cycles(done)
    return replays


def _replay_regret(trace: Trace, path: RegretPath, ahead: bool, replay: Replay) -> None:
    """Add all cycles, from the regrets of drafted tokens alone: the rest is on each row's argmax.

    The general way, which writes rows, takes ten times as long or more.
    """
    for text, ids, lost, best in trace.losses:
        width = min(ids.shape[1], replay.num_draft_tokens)
        ids, lost, best = (own[:, :width] for own in (ids, lost, best))
        kept = path.kept(lost, best, ids.new_full((len(ids),), width), ahead)
        alive = torch.cat([kept.new_ones(len(ids), 1), kept.cumprod(-1)], -1)
        spent = torch.where(kept > 0, lost, 0.0)
        replay.add(text, alive, _going(ids, trace.ends), {REGRET.spec: spent}, {})


def _going(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return whether no drafted token before a place ended the text, (B, K + 1)."""
    ended = torch.isin(ids, ids.new_tensor(ends)).cumsum(-1) > 0
    return torch.cat([ended.new_zeros(len(ids), 1), ended], -1).logical_not()


def charged_policy(trace: Trace, policy: str | Policy) -> Policy:
    """Return a policy for a trace, at its ends: lossless sampling is strict at temperature 0.

    Raises ValueError for a policy that is charged in another unit than the trace.
    """
    rule = read_policy(policy).at_ends(trace.ends)
    if trace.unit == REGRET:
        return greedy_policy(rule)
    check_unit(rule.spec, rule.unit, trace.unit, f"temperature {trace.header.temperature:g}")
    return rule


def greedy_policy(policy: str | Policy) -> Policy:
    """Return a policy at temperature 0, where lossless sampling is strict greedy decoding.

    Raises ValueError for one that relaxes nothing there.
    """
    rule = read_policy(policy)
    if rule.spec == defaults.POLICY:
        return read_policy(defaults.STRICT)
    check_unit(rule.spec, rule.unit, REGRET, "temperature 0")
    return rule


def check_unit(spec: str, own: Divergence, unit: Divergence, where: str) -> None:
    """Raise ValueError unless a policy's tokens are charged in the unit of what it is used on."""
    if own != unit == REGRET:
        raise ValueError(
            f"policy: {spec} relaxes nothing at temperature 0, and regret does; got {where}"
        )
    if unit != own == REGRET:
        raise ValueError(f"policy: {spec} is for temperature 0; got {where}")


def shares_rows(policy: str | Policy, verifier: str | Verifier) -> bool:
    """Return whether what happens at a place of a draft is the same however long the draft is.

    So it is unless a policy looks ahead along a deterministic draft.
    """
    verifier = find_verifier(verifier)
    return isinstance(verifier, Chain) or (
        isinstance(verifier, Block) and read_policy(policy).look_ahead is None
    )


def _begun(trace: Trace, setting: Setting, kinds: Iterable[str]) -> Replay:
    """Return the sums before the first cycle."""
    reached, accepted_at = np.zeros((2, setting.num_draft_tokens, trace.texts))
    calls, tokens, drafts, drafted = np.zeros((4, trace.texts))
    spent = {spec: np.zeros(trace.texts) for spec in kinds}
    return Replay(
        **vars(setting), source=trace.fingerprint, cycles=calls, tokens=tokens, spent=spent,
        reached=reached, accepted_at=accepted_at, drafts=drafts, drafted=drafted,
    )  # fmt: skip


def draft_width(trace: Trace, width: int | None) -> int:
    """Return K, all that were logged for None; ValueError for more."""
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
    """Return alive (B, K + 1), whether the text goes on (B, K + 1), and D(h_i‖q_i) (B, K)."""
    ids, q = batch.draft_token_ids, batch.target_probs
    going = _going(ids, ends)
    assigned, width = Assignment((policy,)), ids.shape[1]
    draft = Draft(ids, [width] * len(ids), batch.draft_probs)
    if not isinstance(verifier, Chain | Block):
        law = verifier.law(assigned, q, draft)
        rows = law.emitted[:, :width], q[:, :width]
        return law.alive, going, {spec: _of_rows(spec, kind, *rows) for spec, kind in kinds.items()}
    # a chain and a block need neither residuals nor rows for them: each node is asked once
    at, by_path = Nodes(verifier, assigned, q, draft).at, verifier.by_path
    alive = q.new_zeros(len(ids), width + 1, dtype=torch.float64)
    alive[:, 0] = 1.0
    spent = {spec: torch.zeros_like(alive[:, 1:]) for spec in kinds}
    for place in range(width):
        # what is never reached costs nothing
        reached = {row: ratio for row, ratio in enumerate(alive[:, place].tolist()) if ratio > 0}
        rows = [*reached]
        nodes = [at(row, place, ratio if by_path else 1.0) for row, ratio in reached.items()]
        for spec, kind in kinds.items():
            spent[spec][rows, place] = alive.new_tensor(_of_nodes(spec, kind, nodes))
        after = alive.new_tensor([node.next_alive for node in ask_together(nodes)])
        alive[rows, place + 1] = after if by_path else alive[rows, place] * after
    return alive, going, spent


def _of_nodes(spec: str, kind: Divergence | None, nodes: Sequence[Node]) -> list[float]:
    if kind is None:
        return [node.directions[1 + SIGNED.index(spec)] for node in nodes]
    charge_nodes(nodes, kind)
    return [node.charge(kind).spent for node in nodes]


def _of_rows(spec: str, kind: Divergence | None, h: Tensor, q: Tensor) -> Tensor:
    if kind is None:
        return directions(h.double(), q.double())[1 + SIGNED.index(spec)]
    return divergences_of(kind, h, q)
