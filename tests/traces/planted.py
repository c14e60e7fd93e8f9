"""Runs of an engine, healthy or with a fault, that were never part of what is expected."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.decoding import Callbacks, DecodeOptions, ModelDrafter, decode
from cactus_theory.policies import read_policy
from cactus_theory.traces import Cycle, Observation, Trace, compare_observed
from cactus_theory.traces._folder import Folder, Header
from cactus_theory.traces.faults import Fault
from cactus_theory.traces.replays import batch_law
from cactus_theory.traces.trace import ENTRIES
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft


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
    folder: Path

    def logged(self, fault: Fault | None, repeats: int, seed: int) -> tuple[Trace, Verifier]:
        """Return the trace of a batched decode, and its verifier."""
        drafter, judge = ModelDrafter(self.draft), self.judge
        if fault is not None:
            if fault.name == "greedy-drafts":
                drafter = ModelDrafter(self.draft, greedy=True)
            else:
                judge = fault.planted(self.judge, self.temperature)
        ends = [self.target.generation_config.eos_token_id]
        size, most = len(self.prompts), max(map(len, self.prompts))
        cycles: list[list[Cycle]] = [[] for _ in range(size * repeats)]
        shown = [[0] * (most - len(own)) + [1] * len(own) for own in self.prompts]
        ids = [[0] * (most - len(own)) + own for own in self.prompts]

        def keep(q: Any, draft: Any, texts: list[int], before: list[int]) -> None:
            assert set(draft.lengths) == {self.num_draft_tokens}
            for row, (text, position) in enumerate(zip(texts, before, strict=True)):
                p = None if draft.probs is None else draft.probs[row]
                cycles[text].append(Cycle(text, position, draft.token_ids[row], q[row], p))

        longest = self.max_new_tokens
        options = DecodeOptions(
            num_draft_tokens=self.num_draft_tokens,
            max_new_tokens=longest + self.num_draft_tokens,
            temperature=self.temperature,
            attention_mask=torch.tensor(shown * repeats),
            eos_token_ids=ends,
            seed=[seed + row for row in range(size * repeats)],
            meter=False,
            verifier=judge,
            callbacks=Callbacks(on_rows=keep),
            stop=lambda ids, prompt_length: ids.shape[1] - prompt_length >= longest,
        )
        decode(self.target, drafter, torch.tensor(ids * repeats), options)
        vocab = self.target.config.vocab_size
        details = {"prompts": size, "max_new_tokens": longest}
        header = Header(vocab, self.num_draft_tokens, "float32", "target", "draft",
                        self.temperature, seed, ends, details)  # fmt: skip
        name = "healthy" if fault is None else fault.name
        with Folder(self.folder / f"{name} {seed}", header) as writer:
            for text in cycles:
                writer.add(text)
            writer.finish()
        return Trace.open(writer.path), judge


@dataclass(frozen=True, eq=False)
class Pool:
    """Rounds with the probabilities that at least i drafted tokens are accepted, by text."""

    alive: np.ndarray
    text: np.ndarray
    prompts: int

    @classmethod
    def of(cls, source: Trace, judge: Verifier) -> "Pool":
        rule, alive, texts = read_policy("speculative"), [], []
        for batch in source.batches(ENTRIES):
            ids = batch.draft_token_ids
            draft = Draft(ids, [ids.shape[1]] * len(ids), batch.draft_probs)
            stop = judge.law(Assignment((rule,)), batch.target_probs, draft).stop
            _, going, _ = batch_law(batch, rule, judge, {}, source.ends)
            own = stop.flip(-1).cumsum(-1).flip(-1)  # of this draft, however it was drawn
            alive.append(torch.where(going[:, :-1], own[:, 1:], 0.0))
            texts.append(batch.text)
        rows, text = torch.cat(alive).numpy(), torch.cat(texts).numpy()
        return cls(rows, text, source.header.details["prompts"])

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
