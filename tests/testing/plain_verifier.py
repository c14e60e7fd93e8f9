"""Block verification written once more, naively, with a method for each step."""

import itertools

import torch

from cactus_theory.policies.policy import PathState, one_hot
from cactus_theory.verify import Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import pick


class Plain(Verifier):
    """Block verification of a path, step by step."""

    name = "plain"
    reaches_all_it_can = by_path = True

    def check(self, policy):
        """Follow any policy with a row of its own."""

    def ratio(self, mass, p):
        """Return P after a token of mass P h and probability p."""
        return torch.where(p > 0, mass / p.clamp(min=1e-300), 0.0).clamp(max=1.0)

    def left(self, alive, h, p, before):
        """Return what is proportional to the law of a recovered token."""
        return (alive[:, None] * h - p).clamp(min=0)

    def value(self, alive, missing):
        """Return what the coin before a row is compared with."""
        return torch.where(alive == 1, 1.0, missing / (missing + (1 - alive)))

    def last_value(self, alive, missing):
        """Return what the last coin is compared with; ``missing`` is of the row before."""
        return alive

    def passes(self, coin, value):
        return coin < value

    def accepted(self, passed):
        return (passed * torch.arange(1, passed.shape[-1] + 1)).amax(-1)

    def bonus(self, q, p, policy):
        return q

    def path(self, alive):
        return PathState(alive)

    def policy(self, assigned, place):
        """Return the number of each row's policy at a place."""
        if assigned.choice is None:
            return torch.zeros(1, dtype=torch.int64)
        return assigned.choice[:, place]

    def aim(self, assigned, place, q, p, path):
        number = self.policy(assigned, place)
        h = torch.zeros_like(p)
        for own, policy in enumerate(assigned.policies):
            h = torch.where((number == own)[:, None], policy.target(q, p, path), h)
        return h.double()

    def start(self, rows):
        return torch.ones(rows, dtype=torch.float64)

    def lengths(self, draft):
        return torch.as_tensor(draft.counts)

    def deterministic(self, ids, q):
        return one_hot(ids, q)

    def walk(self, assigned, q, draft):
        """Return alive, values, rows of the next token and h, node after node."""
        q, ids, counts = q.double(), draft.token_ids, self.lengths(draft)
        p = self.deterministic(ids, q) if draft.probs is None else draft.probs.double()
        batch, width = ids.shape
        alive = torch.zeros(batch, width + 1, dtype=torch.float64)
        values, rows, emitted = alive[:, 1:].clone(), torch.zeros_like(q), torch.zeros_like(p)
        alive[:, 0] = self.start(batch)
        missing = torch.zeros(batch, dtype=torch.float64)
        for i in range(width):
            on, now = (i < counts)[:, None], alive[:, i]
            h = self.aim(assigned, i, q[:, i], p[:, i], self.path(now))
            rest = self.left(now, h, p[:, i], p[:, max(i - 1, 0)])
            missing = torch.where(on[:, 0], (now[:, None] * h - p[:, i]).clamp(min=0).sum(-1), 0.0)
            if i:
                values[:, i - 1] = torch.where(on[:, 0], self.value(now, missing), values[:, i - 1])
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, q[:, i])
            rows[:, i] = torch.where(on, rest, 0.0)
            emitted[:, i] = torch.where(on, h, 0.0)
            at = ids[:, i : i + 1]
            mass, drafted = (part.gather(-1, at)[:, 0] for part in (now[:, None] * h, p[:, i]))
            alive[:, i + 1] = torch.where(on[:, 0], self.ratio(mass, drafted), 0.0)
            values[:, i] = torch.where(
                i == counts - 1, self.last_value(alive[:, i + 1], missing), values[:, i]
            )
        each = torch.arange(batch)
        last_p = p[each, (counts - 1).clamp(min=0)] if width else q[:, 0]
        rows[each, counts] = self.bonus(q[each, counts], last_p, assigned.policies[0])
        return alive, values, rows, emitted

    def verify(self, assigned, target_probs, draft, accept, draw):
        alive, values, rows, _ = self.walk(assigned, target_probs, draft)
        passed = self.passes(accept, values) & (values > -1)
        accepted = self.accepted(passed) if passed.shape[1] else torch.zeros_like(draw).long()
        last = pick(rows[torch.arange(len(rows)), accepted], draw)
        return Verdict(draft.token_ids, accepted, last, alive=alive[:, :-1])

    def law(self, assigned, target_probs, draft):
        alive, values, rows, emitted = self.walk(assigned, target_probs, draft)
        stop = torch.zeros_like(alive)
        for pattern in itertools.product((False, True), repeat=values.shape[1]):
            passed = torch.tensor(pattern).expand(values.shape)
            chance = torch.where(passed, values, 1 - values).prod(-1, keepdim=True)
            stop.scatter_add_(-1, self.accepted(passed)[:, None], chance)
        total = rows.sum(-1, keepdim=True)
        return VerdictLaw(stop, rows / torch.where(total > 0, total, 1.0), alive, emitted)
