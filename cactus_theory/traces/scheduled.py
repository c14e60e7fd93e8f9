"""Replay a policy that changes along the text: what a schedule knows is drawn, the rest exact."""

from typing import Any

import torch

from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule, check_followed
from cactus_theory.divergences import Divergence
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._lent import copied
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.contract import NO_ROW, Assignment, Draft, Verifier

# what a schedule knows of a text is drawn with this seed plus the text's number
SEED = 0


def replay_schedule(
    trace: Trace, schedule: Schedule, judge: Verifier, kinds: dict[str, Divergence], sums: Any
) -> None:
    """Add to ``sums`` what each cycle does under a schedule, as the cycles of one policy.

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
        ids, q = cycle.draft_token_ids[: sums.width], cycle.target_probs[: sums.width + 1]
        p = one_hot(ids, q) if cycle.draft_probs is None else cycle.draft_probs[: sums.width]
        choice = schedule.choose_by_rows(state, *copied((ids, q[:-1], p)))
        draft = Draft(ids[None], [len(ids)], None if cycle.draft_probs is None else p[None])
        law = judge.law(Assignment(schedule.rules, choice[None]), q[None], draft)
        if law.emitted is None:
            raise NotImplementedError(NO_ROW.format(judge.name))
        ended = torch.isin(ids, ends).cumsum(-1) > 0
        going = torch.cat([ended.new_zeros(1), ended]).logical_not()[None]
        emitted = law.emitted[:, : len(ids)]
        spent = {spec: kind.value(emitted, q[None, :-1]) for spec, kind in kinds.items()}
        sums.add(torch.tensor([text]), law.alive, going, spent)
        count = int(torch.multinomial(law.stop[0], 1, generator=source))
        token = int(torch.multinomial(law.last[0, count], 1, generator=source))
        rows = min(count + 1, len(ids))
        seen = VerifiedRows(q[:rows], p[:rows], ids[:rows], torch.arange(rows) < count)
        state = schedule.observe(state, *copied((seen,)))
        state = schedule.advance(state, [*ids[:count].tolist(), token])
