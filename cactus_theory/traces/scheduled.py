"""Replay a policy that changes along the text: what a schedule knows is drawn, the rest exact."""

from collections.abc import Callable

import torch

from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule, check_followed
from cactus_theory.divergences import Divergence
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._lent import copied
from cactus_theory.traces._cycle import Cycle
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.contract import Assignment, Draft, VerdictLaw, Verifier

# what a schedule knows of a text is drawn with generators of this seed and the text's number
SEED = 0
Judged = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
Add = Callable[[int, Judged], None]


def replay_schedule(
    trace: Trace,
    schedule: Schedule,
    judge: Verifier,
    kinds: dict[str, Divergence],
    width: int,
    add: Add,
) -> None:
    """Give ``add`` what each cycle does under a schedule, as the cycles of other policies.

    Given a schedule's state all coins of a cycle are integrated out. The state goes on with one
    outcome that is drawn: the rows that were verified, and the tokens that followed. It begins
    without the prompt, which a trace does not hold.
    """
    check_followed(schedule, judge)
    ends = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64)
    text, state, source = -1, None, torch.Generator()
    for cycle in trace:
        if cycle.text != text:
            text, state = cycle.text, schedule.begin([])
            source.manual_seed(SEED + text)
        ids, q = cycle.draft_token_ids[:width], cycle.target_probs[: width + 1]
        p = one_hot(ids, q) if cycle.draft_probs is None else cycle.draft_probs[:width]
        choice = schedule.choose_by_rows(state, *copied((ids, q[:-1], p)))
        draft = Draft(ids[None], [len(ids)], None if cycle.draft_probs is None else p[None])
        law = judge.law(Assignment(schedule.rules, choice[None]), q[None], draft)
        ended = torch.isin(ids, ends).cumsum(-1) > 0
        going = torch.cat([ended.new_zeros(1), ended]).logical_not()
        spent = {
            spec: kind.value(law.emitted[:, : len(ids)], q[None, :-1])
            for spec, kind in kinds.items()
        }
        add(text, (law.alive, going[None], spent))
        state = _after(schedule, state, cycle, law, source)


def _after(
    schedule: Schedule, state: object, cycle: Cycle, law: VerdictLaw, source: torch.Generator
) -> object:
    """Return the state after one outcome of a cycle."""
    count = int(torch.multinomial(law.stop[0], 1, generator=source))
    token = torch.multinomial(law.last[0, count], 1, generator=source)
    width = law.stop.shape[1] - 1
    rows, ids = min(count + 1, width), cycle.draft_token_ids
    q = cycle.target_probs[:rows]
    p = one_hot(ids[:rows], q) if cycle.draft_probs is None else cycle.draft_probs[:rows]
    seen = VerifiedRows(q, p, ids[:rows], torch.arange(rows) < count)
    state = schedule.observe(state, seen)
    return schedule.advance(state, [*ids[:count].tolist(), int(token)])
