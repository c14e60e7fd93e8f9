r"""Run a policy and a verifier on logged rows, all coins integrated out.

Of a cycle with drafted tokens x_1..x_K let :math:`P_i` be the probability that at least i of
them are accepted (``VerdictLaw.alive``) and h_i the emitted law at row i. Then a target call
yields :math:`1 + Σ_{i≥1} P_i` tokens and spends :math:`Σ_{i<K} P_i D(h_i‖q_i)`; a bonus token
from q costs nothing. Tokens after a drafted end-of-text token count for nothing. A call without a
draft yields one token and spends nothing.

Cycles start where those of the logged lossless decode did. For that decode's own K, policy and
verifier the numbers are consistent; for others they are what these would do at the same places,
which is what makes them comparable, with paired errors far smaller than their own.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.base.arguments import whole_number
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.policies import FixedTarget, Policy, read_policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.policies._policy import accept_probability, one_hot
from cactus_theory.traces.estimate import Replay
from cactus_theory.traces.trace import ENTRIES, Batch, Trace
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Verifier, find_verifier
from cactus_theory.verify.draft import Assignment, Draft

OnCycles = Callable[[int], Any]


def replay(
    trace: Trace | str | Path,
    policy: str | Policy,
    verifier: str | Verifier = defaults.VERIFIER,
    *,
    num_draft_tokens: int | None = None,
    divergences: Sequence[str | Divergence] = ("kl",),
    on_cycles: OnCycles = int,
) -> Replay:
    """Replay a policy and a verifier on logged cycles; exact, nothing is sampled.

    Parameters
    ----------
    trace : a trace or its folder.
    policy : a Policy or a spec, such as ``"band:price=1"``.
    verifier : by name or a Verifier.
    num_draft_tokens : cut longer drafts to so many tokens; None for all that were logged.
    divergences : which ones the meter adds up.
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
    (one,) = replay_widths(trace, policy, verifier, widths, divergences, on_cycles).values()
    return one


@one_thread()
def replay_widths(
    trace: Trace,
    policy: str | Policy,
    verifier: str | Verifier,
    widths: Sequence[int | None],
    divergences: Sequence[str | Divergence] = ("kl",),
    on_cycles: OnCycles = int,
) -> dict[int, Replay]:
    """Return :func:`replay` at several K, in one pass where :func:`shares_rows` allows it."""
    checked = sorted({draft_width(trace, width) for width in widths})
    rule, verifier = read_policy(policy).at_ends(trace.ends), find_verifier(verifier)
    kinds = {kind.spec: kind for kind in map(read_divergence, divergences)}
    verifier.check(rule)
    passes = [checked] if shares_rows(policy, verifier) else [[width] for width in checked]
    replays = {width: _begun(trace, (rule.spec, verifier.spec, width), kinds) for width in checked}
    for together in passes:
        done = 0
        for batch in trace.batches(ENTRIES, together[-1]):
            law = batch_law(batch, rule, verifier, kinds, trace.ends)
            for width in together:
                replays[width].add(batch.text, *law)
            done += len(batch.text)
            on_cycles(done)
    return replays


def shares_rows(policy: str | Policy, verifier: str | Verifier) -> bool:
    """Return whether what happens at a place of a draft is the same however long the draft is.

    So it is unless a policy looks ahead along a deterministic draft.
    """
    verifier = find_verifier(verifier)
    return isinstance(verifier, Chain) or (
        isinstance(verifier, Block) and read_policy(policy).look_ahead is None
    )


def _begun(trace: Trace, names: tuple[str, str, int], kinds: Iterable[str]) -> Replay:
    """Return the sums before the first cycle."""
    reached, accepted_at = np.zeros((2, names[2], trace.texts))
    calls, tokens, drafts, drafted = np.zeros((4, trace.texts))
    spent = {spec: np.zeros(trace.texts) for spec in kinds}
    sums = calls, tokens, spent, reached, accepted_at, drafts, drafted
    return Replay(*names, trace.fingerprint, *sums)


def draft_width(trace: Trace, width: int | None) -> int:
    """Return K, all that were logged for None; ValueError for more."""
    logged = trace.num_draft_tokens
    if width is not None and whole_number("num_draft_tokens", width, 1) > logged:
        raise ValueError(f"num_draft_tokens: must be at most the {logged} logged; got {width}")
    return logged if width is None else width


def batch_law(
    batch: Batch,
    policy: Policy,
    verifier: Verifier,
    kinds: dict[str, Divergence],
    ends: Sequence[int],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return alive (B, K + 1), whether the text goes on (B, K + 1), and D(h_i‖q_i) (B, K)."""
    ids, q = batch.draft_token_ids, batch.target_probs
    going, width = _going(ids, ends), ids.shape[1]
    if not width:
        return q.new_ones(going.shape), going, dict.fromkeys(kinds, q.new_zeros(ids.shape))
    draft = Draft(ids, [width] * len(ids), batch.draft_probs)
    if isinstance(verifier, Chain | Block):
        alive, spent = _followed(policy, verifier, q, draft, kinds)
    else:
        law = verifier.law(Assignment((policy,)), q, draft)
        alive, rows = law.alive, (law.emitted[:, :width], q[:, :width])
        spent = {spec: kind.value(*rows) for spec, kind in kinds.items()}
    return alive, going, spent


def _going(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return (B, K + 1) whether none of so many tokens ends the text."""
    ended = torch.isin(ids, ids.new_tensor(ends)).cumsum(-1) > 0
    return torch.cat([ended.new_zeros(len(ids), 1), ended], -1).logical_not()


def _followed(
    policy: Policy, verifier: Chain | Block, q: Tensor, draft: Draft, kinds: dict[str, Divergence]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``alive`` (B, K + 1) and D(h_i‖q_i) (B, K).

    A chain and a block need neither residuals nor rows for them: they are asked node by node.
    """
    ids, raised = draft.token_ids, verifier.raised_entries(policy, q, draft)
    p = one_hot(ids, q) if draft.probs is None else draft.probs
    alive = q.new_ones(len(ids), ids.shape[1] + 1, dtype=torch.float64)
    spent = {spec: torch.zeros_like(alive[:, 1:]) for spec in kinds}
    for place, drafted in enumerate(ids.unbind(1)):
        reached, rows = alive[:, place], (q[:, place], p[:, place])
        path = PathState(reached, None if raised is None else raised[:, place])
        emitted = verifier.emitted(policy, *rows, path)
        for spec, kind in kinds.items():
            spent[spec][:, place] = emitted.charges(kind).spent
        if isinstance(verifier, Chain) and not isinstance(policy, FixedTarget):
            alive[:, place + 1] = reached * policy.acceptance(*rows, drafted[:, None])[:, 0]
            continue
        p_n, h_n = rows[1].gather(-1, drafted[:, None])[:, 0].double(), emitted.at(drafted)
        if isinstance(verifier, Chain):
            alive[:, place + 1] = reached * accept_probability(h_n, p_n)
        else:
            alive[:, place + 1] = accept_probability(reached * h_n, p_n)
    return alive, spent
