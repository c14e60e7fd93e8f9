"""Runs of an engine, healthy or with a fault, that were never part of what is expected."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cactus_theory.decoding import Callbacks, DecodeOptions, ModelDrafter, decode
from cactus_theory.policies import read_policy
from cactus_theory.traces import Observation, compare_observed
from cactus_theory.traces.faults import Fault
from cactus_theory.traces.replays import batch_law
from cactus_theory.traces.trace import Batch
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft


class Rounds:
    """The rounds of a batched decode in the place of a trace."""

    def __init__(
        self, prompts: int, texts: int, temperature: float, ends: list[int], width: int, **details
    ):
        self.header = SimpleNamespace(
            temperature=temperature,
            eos_token_ids=ends,
            details={"prompts": prompts, **details},
        )
        self.texts, self.num_draft_tokens, self.fingerprint = texts, width, str(id(self))
        self.ends = ends
        self.prompts = [text % prompts for text in range(texts)]
        self.found: list[Batch] = []

    @property
    def manifest(self) -> Any:
        rows = sum(own.draft_probs is not None for own in self.found)
        return SimpleNamespace(total=lambda name: rows)

    def batches(self, entries: int, num_draft_tokens: int | None = None) -> Iterator[Batch]:
        for own in self.found:
            probs = None if own.draft_probs is None else _whole(own.draft_probs)
            yield replace(own, target_probs=_whole(own.target_probs), draft_probs=probs)


def _whole(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    return rows / rows.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Decodes:
    """Decodes of a pair, healthy or with a fault, ``repeats`` texts a prompt."""

    target: Any
    draft: Any
    prompts: list[list[int]]
    num_draft_tokens: int
    max_new_tokens: int
    temperature: float
    judge: Verifier
    greedy: bool = False

    def rounds(
        self, fault: Fault | None, repeats: int, seed: int
    ) -> tuple[Rounds, Verifier, np.ndarray]:
        drafter: Any = ModelDrafter(self.draft, greedy=self.greedy)
        faulty = None
        if fault is not None:
            if fault.name == "greedy-drafts":
                drafter = ModelDrafter(self.draft, greedy=True)
            elif fault.temperature is None:
                faulty = fault.planted(self.judge, self.temperature)
        judge = Counted(faulty or self.judge)
        ends = [self.target.generation_config.eos_token_id]
        size, most = len(self.prompts), max(map(len, self.prompts))
        other = None if fault is None else fault.temperature
        heat = self.temperature if other is None else other
        found = Rounds(
            size, size * repeats, heat, ends, self.num_draft_tokens,
            max_new_tokens=self.max_new_tokens,
        )  # fmt: skip
        shown = [[0] * (most - len(own)) + [1] * len(own) for own in self.prompts]
        ids = [[0] * (most - len(own)) + own for own in self.prompts]

        def keep(q: Any, draft: Any, texts: list[int], before: list[int]) -> None:
            assert set(draft.lengths) == {self.num_draft_tokens}
            probs = None if draft.probs is None else draft.probs.clone()
            own = torch.tensor(texts), torch.tensor(before), draft.token_ids.clone()
            found.found.append(Batch(*own, q.clone(), probs))

        longest = self.max_new_tokens
        options = DecodeOptions(
            num_draft_tokens=self.num_draft_tokens,
            max_new_tokens=longest + self.num_draft_tokens,
            temperature=heat,
            attention_mask=torch.tensor(shown * repeats),
            eos_token_ids=ends,
            seed=[seed + row for row in range(size * repeats)],
            meter=False,
            verifier=judge,
            callbacks=Callbacks(on_rows=keep),
            stop=_after({tuple(own): len(own) for own in self.prompts}, longest),
        )
        decode(self.target, drafter, torch.tensor(ids * repeats), options)
        return found, judge.judge, np.concatenate(judge.accepted)


def _after(prompts: dict[tuple[int, ...], int], most: int) -> Any:
    """Return what ends a text after so many new tokens; it is shown prompt and text."""
    sizes = sorted(set(prompts.values()), reverse=True)

    def stop(ids: torch.Tensor) -> bool:
        own = ids[0].tolist()
        length = next(size for size in sizes if tuple(own[:size]) in prompts)
        return len(own) - length >= most

    return stop


class Counted(Verifier):
    """A verifier that notes how many tokens it accepts."""

    name = "counted"

    def __init__(self, judge: Verifier) -> None:
        self.judge, self.accepted = judge, []

    def check(self, policy: Any) -> None:
        self.judge.check(policy)

    def coins(self, drafted: int) -> int:
        return self.judge.coins(drafted)

    def verify(self, assigned: Any, q: Any, draft: Any, accept: Any, draw: Any) -> Any:
        verdict = self.judge.verify(assigned, q, draft, accept, draw)
        self.accepted.append(verdict.num_accepted.numpy().copy())
        return verdict


@dataclass(frozen=True, eq=False)
class Pool:
    """Rounds with the probabilities that at least i drafted tokens are accepted, by text."""

    alive: np.ndarray
    text: np.ndarray
    prompts: int

    @classmethod
    def of(cls, source: Rounds, judge: Verifier) -> "Pool":
        rule, alive = read_policy("speculative"), []
        for batch in source.batches(0):
            ids = batch.draft_token_ids
            draft = Draft(ids, [ids.shape[1]] * len(ids), batch.draft_probs)
            stop = judge.law(Assignment((rule,)), batch.target_probs, draft).stop
            _, going, _ = batch_law(batch, rule, judge, {}, source.ends)
            own = stop.flip(-1).cumsum(-1).flip(-1)  # of this draft, however it was drawn
            alive.append(torch.where(going[:, :-1], own[:, 1:], 0.0))
        text = torch.cat([batch.text for batch in source.found])
        return cls(torch.cat(alive).numpy(), text.numpy(), source.header.details["prompts"])

    def run(self, rounds: int, source: np.random.Generator) -> Observation:
        """Return what a run of at most so many rounds counts: whole texts, prompt after prompt."""
        texts = np.arange(self.text.max() + 1).reshape(-1, self.prompts)
        order = source.permuted(texts, axis=0).ravel()
        sizes = np.bincount(self.text)[order]
        most = max(1, int(np.searchsorted(sizes.cumsum(), rounds, "right")))
        alive = self.alive[np.isin(self.text, order[:most])]
        accepted = (source.random(len(alive))[:, None] < alive).sum(0)
        return Observation(accepted / len(alive), len(alive), np.zeros(alive.shape[1]),
                           behind_ends=False, drafted=float(alive.size))  # fmt: skip

    def runs(self, count: int, healthy: Any, known: Any) -> list[Any]:
        source = np.random.default_rng(0)
        return [compare_observed(healthy, self.run(2000, source), known) for _ in range(count)]


def observed(source: Rounds, accepted: np.ndarray) -> Observation:
    """Return what a real decode counted, up to the end of a text as traces do."""
    ends = torch.tensor(source.header.eos_token_ids)
    ids = torch.cat([own.draft_token_ids for own in source.found])
    place = torch.arange(ids.shape[1])
    ended = torch.isin(ids, ends)
    first = torch.where(ended.any(1), ended.int().argmax(1), ids.shape[1])[:, None]
    passed = (torch.tensor(accepted)[:, None] > place) & (place <= first)
    rates = passed.double().mean(0).numpy()
    return Observation(rates, len(ids), np.zeros(len(rates)), behind_ends=False)
