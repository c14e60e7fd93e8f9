"""Assign a policy to each drafted token of a batch, as each text's schedule chooses."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding.schedule import OnePolicy, Schedule, Spec
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.node import Node


class Rule:
    """The policy or schedule of one text, with the current state of the schedule."""

    def __init__(self, policy: Spec | Schedule, prompt: Sequence[int]) -> None:
        self.schedule = policy if isinstance(policy, Schedule) else OnePolicy(policy)
        self.policies = self.schedule.policies
        self.observes = type(self.schedule).observe is not Schedule.observe
        self.state = self.schedule.begin(list(prompt))

    def observe(self, nodes: Sequence[Node]) -> None:
        """If the schedule overrides ``observe``, pass it the nodes at which tokens were emitted."""
        if self.observes:
            self.state = self.schedule.observe(self.state, self.schedule.shown(nodes))

    def advance(self, new_ids: Sequence[int]) -> None:
        """Advance the schedule's state by the text's new ids."""
        self.state = self.schedule.advance(self.state, list(new_ids))


def policies_of(rules: Sequence[Rule]) -> tuple[Policy, ...]:
    """Return the policies of all texts, each once."""
    policies: list[Policy] = []
    for rule in rules:
        policies += [policy for policy in rule.policies if policy not in policies]
    return tuple(policies)


def assigned(
    rules: Sequence[Rule],
    policies: tuple[Policy, ...],
    q: Float[Tensor, "batch K1 vocab"],
    draft: Draft,
    verifier: Verifier,
) -> Assignment:
    """Return the policy of each drafted token, and nodes whose law h a schedule has computed."""
    if len(policies) == 1:
        return Assignment(policies)
    chosen, nodes = [], dict[tuple[int, int], Node]()
    for row, rule in enumerate(rules):
        numbers = draft.token_ids.new_tensor([policies.index(policy) for policy in rule.policies])
        of_text = q[row : row + 1], draft.of_text(row), verifier
        choice, solved = rule.schedule.choose_by_nodes(rule.state, *of_text)
        chosen.append(numbers[choice])  # from indices of the schedule to indices of ``policies``
        nodes |= {(row, number): node for number, node in solved.items()}
    return Assignment(policies, torch.stack(chosen), nodes or None)
