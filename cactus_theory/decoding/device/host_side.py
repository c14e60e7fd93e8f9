"""The host's part of the device loop: upload coins and lengths, read a round's result once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cactus_theory.decoding.coins import fill
from cactus_theory.decoding.device.round import Inputs, Outcome, Round, StaticForward, captures
from cactus_theory.decoding.device.verify import VerifyStep, probabilities, torch_step
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.prepare import Opening
from cactus_theory.decoding.result import GenerationResult
from cactus_theory.decoding.rounds import Rounds
from cactus_theory.decoding.text import Texts
from cactus_theory.policies import Policy
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN

Tokens = list[list[int]]
# positions by which the part of the cache that attention reads grows: fewer mean more CUDA graphs,
# more mean more positions that are read and masked
BUCKET = 256


class DeviceRounds(Rounds):
    """The decode loop on a device; texts that have ended stay in the batch until all have ended.

    The caches' ``lengths`` stay as they were after the prompts; the current lengths are in the
    round's inputs. If ``verify`` is None, the verifier runs in PyTorch.
    """

    def __init__(self, opening: Opening, verify: VerifyStep | None = None) -> None:
        super().__init__(opening)
        texts, width = self.texts, opening.width
        self.width, self.device, self.rounds = width, texts.device, 0
        self.temperature = self.options.temperature
        self.assigned = Assignment(self.policies, _choice(self.policies, texts, width))
        models = [opening.target_model]
        if isinstance(opening.drafter, ModelDrafter):
            models.append(opening.drafter.model)
        self.models = [
            CachedModel(model, capacity(texts, width), texts.batch, fast_forward=True)
            for model in models
        ]
        target, *drafts = (StaticForward(model) for model in self.models)
        self.inputs = Inputs(texts.batch, width, self.verifier.coins(width), self.device)
        step = verify or torch_step(self.verifier, self.assigned, self.temperature)
        draft = drafts[0] if drafts else None
        self.graph = Round(self.inputs, target, draft, self.temperature, step)

    @property
    def calls(self) -> tuple[int, int]:
        """Return the number of forward passes of the target and of the draft so far."""
        return self.rounds, self.rounds * self.width

    def run(self) -> GenerationResult:
        """Feed the prompts, then decode until every text has ended or has all its new tokens."""
        self.clock.lap("other")
        self._prefill()
        return super().run()

    def _prefill(self) -> None:
        """Feed all but the last token of each prompt, which the first round feeds."""
        texts = self.texts
        counts = [length - 1 for length in texts.lengths]
        if not any(counts):
            return
        for model, part in zip(self.models, ("target", "draft"), strict=False):
            fed = texts.take([0] * texts.batch, counts)
            model.feed(fed, counts, [1] * texts.batch)
            self._wait()
            self.clock.lap(part)

    def round(self) -> Tokens:
        """Run one round, which adds tokens to each text that has not ended; return the new ids."""
        texts = self.texts
        # −1 for a text without room: it has ended or is full
        draft_lengths = [min(self.width, text.room - 1) for text in texts.rows]
        fill(self.inputs.table, texts, self.width, draft_lengths, self.verifier.coins)
        drafted = [max(length, 0) for length in draft_lengths]
        self.inputs.upload([self._row(row, length) for row, length in enumerate(drafted)])
        end = _whole_buckets(max(texts.lengths) + self.width)
        self.clock.lap("other")
        if self.graph.prepare(end):
            self._wait()
        self.clock.lap("preparation")
        outcome = self.graph(end)
        tokens = [[*ids[:kept], last] for *ids, kept, last in outcome.report.tolist()]
        self.rounds += 1
        for row, ids in enumerate(tokens):
            if draft_lengths[row] >= 0 and ids[-1] == NO_TOKEN:
                q, p = self._rows(outcome)
                places = range(len(ids) - 1, drafted[row] + 1)
                raise self.failure(row, q[row], None if p is None else p[row], places)
        # append the tokens to the texts, each up to its end
        new: Tokens = [[]] * texts.batch
        for row, ids in enumerate(tokens):
            if draft_lengths[row] >= 0:
                new[row] = ids[: texts.append(row, ids)]
                self.count(texts.rows[row], drafted[row], ids, new[row])
        self.clock.lap("other")
        if self.meter is not None and self.width:
            q, p = self._rows(outcome)
            draft = Draft(outcome.logits.token_ids, drafted, p)
            verdict = self.verifier.followed(outcome.verdict, self.assigned, q, draft)
            self.measure(verdict, new)
            self._wait()
            self.clock.lap("meter")
        return new

    def _row(self, row: int, drafted: int) -> list[int]:
        """Return a text's row of :class:`Inputs`: last two tokens, length, draft length."""
        ids = self.texts.rows[row].ids
        return [ids[-2] if len(ids) > 1 else ids[-1], ids[-1], len(ids), drafted]

    def _rows(self, outcome: Outcome) -> tuple[Tensor, Tensor | None]:
        """Return the target's and the draft's rows of a round, at the decode's temperature."""
        target, draft = outcome.logits.target, outcome.logits.draft
        p = None if draft is None else probabilities(draft, self.temperature)
        return probabilities(target, self.temperature), p

    def _wait(self) -> None:
        """Wait for the device, so that the stopwatch adds its seconds to the right part."""
        if captures(self.device):
            torch.cuda.synchronize(self.device)


def capacity(texts: Texts, width: int) -> int:
    """Return a cache's positions per row: a multiple of 256 (``BUCKET``), with room for a draft."""
    return _whole_buckets(texts.capacity + width)


def _whole_buckets(positions: int) -> int:
    return -(-positions // BUCKET) * BUCKET


def _choice(policies: Sequence[Policy], texts: Texts, width: int) -> Tensor | None:
    """Return the index of each drafted token's policy (B, K), None if there is one policy."""
    if len(policies) == 1:
        return None
    numbers = [policies.index(text.rule.policies[0]) for text in texts.rows]
    return torch.tensor(numbers, device=texts.device)[:, None].repeat(1, width)
