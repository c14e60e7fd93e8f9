"""The decode loop on the host: draft, verify in one forward pass of the target, roll back."""

from collections import Counter
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.copies import copied
from cactus_theory.base.threads import one_thread
from cactus_theory.decoding.assignment import assigned
from cactus_theory.decoding.coins import more_draws, toss
from cactus_theory.decoding.drafters import DraftContext
from cactus_theory.decoding.drafters.interface import fed_parents, nothing
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.prepare import Opening
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.rounds import Rounds
from cactus_theory.verify.draft import Draft, Verdict
from cactus_theory.verify.draw import NO_TOKEN


class HostRounds(Rounds):
    """The decode loop on the host; texts that have ended leave the batch.

    The target's rows of a round are written over the logits. Verifiers, meter and schedules may
    read these rows until the next round, and must not write to them.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        texts, options = self.texts, self.options
        self.warp, drafter = opening.warp, opening.drafter
        model, fast = opening.target_model, options.fast_forward
        reads = () if drafter is None else drafter.reads(model)
        self.target = CachedModel(
            model,
            texts.capacity,
            texts.batch,
            slack=1 + opening.beside,  # ``beside`` for the nodes of a tree that are not on its path
            fast_forward=fast,
            reads=reads,
        )
        setting = DraftContext(
            target_model=model,
            texts=texts,
            warp=self.warp,
            clock=self.clock,
            width=opening.width,
            fast_forward=fast,
            features=self.target,
        )
        self.drafting = None if drafter is None else drafter.begin(setting)

    @property
    def calls(self) -> tuple[int, int]:
        """Return the number of forward passes of the target and of the draft so far."""
        return self.target.calls, 0 if self.drafting is None else self.drafting.calls

    def round(self) -> list[list[int]]:
        """Run one round, which adds tokens to each text that has not ended; return the new ids."""
        parts_before = dict(self.clock.parts)
        texts, width = self.texts, self.opening.width
        draft_lengths = [min(width, text.room - 1) for text in texts.rows]
        draft_coins, accept, draw = toss(texts, draft_lengths, self._coins)
        draw = more_draws(texts, draw, draft_lengths, self.verifier.draws)
        draft = self._propose(draft_lengths, draft_coins)
        q = self._score(draft)
        rules = [text.rule for text in texts.rows]
        assignment = assigned(rules, self.policies, q, draft, self.verifier)
        self.clock.lap("other")
        coins = accept[:, : self.verifier.coins(max(draft.lengths))]
        with one_thread():
            verdict = self.verifier.decide(assignment, q, draft, coins, draw)
        tokens = verdict.rows()
        self.clock.lap("verify")
        for row, ids in enumerate(tokens):
            if ids[-1] == NO_TOKEN:  # a row that decides the token is no distribution
                p = None if draft.probs is None else draft.probs[row]
                raise self.failure(row, q[row], p, range(len(ids) - 1, draft.lengths[row] + 1))
        new = self._settle(tokens, verdict)
        if self.options.callbacks.on_rows is not None:
            pairs = zip(texts.rows, new, strict=True)
            earlier = [len(text.new_ids) - len(ids) for text, ids in pairs]
            numbers = [text.number for text in texts.rows]
            self.options.callbacks.on_rows(*copied((q, draft, numbers, earlier)))
        self.measure(verdict, new)
        for rule, ids in zip(rules, new, strict=True):
            rule.advance(ids)
        kinds = Counter(map(self.count, texts.rows, draft.longest, tokens, new))
        if self.options.callbacks.on_round is not None:
            reading, seconds = Reading(kinds, sum(map(len, new))), self.clock.seconds(parts_before)
            self.options.callbacks.on_round(reading, seconds)
            self.clock.lap("callback")
        new_of_all: list[list[int]] = [[] for _ in texts.all]
        for text, ids in zip(texts.rows, new, strict=True):
            new_of_all[text.number] = list(ids)
        self._retire()
        return new_of_all

    def _retire(self) -> None:
        """Drop texts that have ended from the batch and from the caches."""
        is_open = [text.room > 0 for text in self.texts.rows]
        if all(is_open):
            return
        rows = [row for row, stays in enumerate(is_open) if stays]
        # the last rows fill the gaps, so that few rows are copied
        movers = [row for row in rows if row >= len(rows)]
        ahead = enumerate(is_open[: len(rows)])
        rows = [row if stays else movers.pop() for row, stays in ahead]
        if not rows:
            return
        for part in (self.texts, self.target, self.drafting):
            if part is not None:
                part.keep(rows)

    def _propose(self, draft_lengths: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Return the draft of a round; ValueError for a tree if the verifier takes no trees."""
        if self.drafting is None or not any(draft_lengths):
            return nothing(self.texts)
        proposal = self.drafting.propose(draft_lengths, coins)
        if proposal.parents is not None and "tree" not in self.verifier.drafts:
            raise ValueError(
                f"verifier: {type(self.opening.drafter).__name__} drafts trees, and "
                f"{self.verifier.spec} verifies one drafted path; try verifier='tree'"
            )
        self.clock.lap("other")
        return proposal

    def _coins(self, drafted: int) -> int:
        """Return the number of acceptance coins of a text with a path of ``drafted`` tokens."""
        drafter = self.opening.drafter
        return self.verifier.coins(drafted if drafter is None else drafter.nodes(drafted))

    def _score(self, draft: Draft) -> Float[Tensor, "batch K1 vocab"]:
        """Feed the target each text's uncached tokens, then drafted tokens; return the rows q."""
        texts, lengths, drafted = self.texts, self.target.lengths, draft.lengths
        keep = [count + 1 for count in drafted]
        counts = [
            length - cached + count
            for length, cached, count in zip(texts.lengths, lengths, drafted, strict=True)
        ]
        fed = texts.take(lengths, counts)
        self.clock.lap("other")
        logits = self.target.feed(fed, counts, keep, fed_parents(draft, counts))
        self.clock.lap("target")
        return self.warp(logits, texts, 0, drafted, draft=draft)

    def _settle(self, tokens: list[list[int]], verdict: Verdict) -> list[list[int]]:
        """Append the emitted tokens to each text, roll caches back, and return the appended ids."""
        texts, before = self.texts, self.texts.lengths
        if verdict.path is not None:  # the buffer holds a tree's nodes, not the accepted path
            texts.propose_all(verdict.accepted_token_ids)
        taken = texts.settle(tokens, verdict.last)
        # of text 0, as processors that need the path are refused in a batch of several texts
        path = range(taken[0]) if verdict.path is None else verdict.path[0].tolist()
        self.warp.processors.settle(texts, taken[0], path)
        new = [ids[:count] for ids, count in zip(tokens, taken, strict=True)]
        for row, length in enumerate(texts.lengths):
            if verdict.path is None:
                self.target.rollback(row, length - 1)  # the last token is fed next round
            else:
                # all new tokens but the last, which is fed next round
                accepted = verdict.path[row, : length - 1 - before[row]].tolist()
                self.target.select(row, before[row], accepted)
        if self.drafting is not None:
            self.drafting.settle()
        self.clock.lap("other")
        return new
