"""One decode: what it begins with, and what every loop of rounds shares."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._meter import Meter, Recorder, charge, verified
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins
from cactus_theory.decoding._tally import Tally
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.failure import DecodingError, failure
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.options import DecodeOptions, OnTokens
from cactus_theory.decoding.pace import FixedPace, pace
from cactus_theory.decoding.result import GenerationResult, Seconds, Stopwatch
from cactus_theory.decoding.token_log import TokenLog
from cactus_theory.decoding.vocabulary import check_ids
from cactus_theory.verify.contract import Verified


class Opening:
    """A decode before its first round: models and prompts, checked, and what rounds work on.

    Attributes
    ----------
    drafter : None for plain decoding.
    models : whose limits are kept, by the name of their argument.
    width : the most tokens of a path that a round drafts.
    beside : how many more tokens its drafts may hold.
    meter, recorder : None where they are off.
    """

    def __init__(
        self, target_model: Any, draft_model: Any, input_ids: Tensor, options: DecodeOptions
    ) -> None:
        self.target_model, self.options = target_model, options
        self.drafter = None if draft_model is None else as_drafter(draft_model)
        self.models = {"target_model": target_model}
        self.width, self.beside, self.pace, metered = 0, 0, FixedPace(0), None
        if self.drafter is not None:
            self.models |= self.drafter.check(target_model)
            # a draft that is longer than the text takes no memory
            self.width = min(options.num_draft_tokens, options.max_new_tokens)
            self.pace = pace(self.width, options.adaptive, options.gate)
            metered = options.metered
            depths = range(1, self.width + 1)
            self.beside = max(self.drafter.nodes(depth) - depth for depth in depths)
        self.texts, padding = opened_texts(self.models, input_ids, options, self.beside)
        self.texts.stop, batch = options.stop, self.texts.batch
        self.rules = Rules(options.policies, self.texts)
        self.coins = Coins(batch, options.sources, self.texts.device)
        self.warp = Warp(options.temperature, options.logits_processor, padding)
        self.meter = self.recorder = None
        if metered is not None:
            log = TokenLog(batch, options.max_new_tokens, options.log_probs)
            self.meter = Meter(self.rules.rules, metered, options.judge, log)
        if self.drafter is not None and options.record_rows:
            self.recorder = Recorder()

    @property
    def report(self) -> OnTokens | None:
        """Return a callback for the ids of all rows; a single row's are passed as one list."""
        call = self.options.on_tokens
        if call is None or self.texts.batch > 1:
            return call
        return lambda new: call(new[0])


class Loop(ABC):
    """Rounds until every text has ended.

    Attributes
    ----------
    places : where each row of the batch stood when the decode began.
    """

    def __init__(self, opening: Opening) -> None:
        self.clock = Stopwatch()
        self.opening, self.options, self.verifier = opening, opening.options, opening.options.judge
        self.texts, self.rules, self.coins = opening.texts, opening.rules, opening.coins
        self.meter, self.recorder = opening.meter, opening.recorder
        self.tally = Tally(self.texts.batch, opening.width)
        self.places = list(range(self.texts.batch))

    def run(self) -> GenerationResult:
        """Decode until every row has ended or is full."""
        report = self.opening.report
        self.clock.lap("other")
        while self.texts.open:
            new = self.round()
            if report is not None:
                report(new)
                self.clock.lap("callback")
        return self.result()

    @abstractmethod
    def round(self) -> list[list[int]]:
        """Give every open text at least one token; return the new ids of all."""

    @property
    @abstractmethod
    def calls(self) -> tuple[int, int]:
        """Return the forward passes of the target and of the draft so far."""

    def measure(self, seen: Verified, new: list[list[int]]) -> None:
        """Show the meter, the recorder and the schedules what was verified, text by text.

        ``new`` are the tokens that each text took, perhaps none.
        """
        meter, recorder, observing = self.meter, self.recorder, self.rules.observing
        if meter is None and recorder is None and not observing:
            return
        draft, verdict = seen.draft, seen.verdict
        for row, own in enumerate(new):
            place = self.places[row], len(self.texts.new_ids(row)) - len(own)
            if own and meter is not None and meter.log is not None:
                path = None if verdict.path is None else verdict.path[row]
                meter.log.score(place, own, seen.target_probs[row], path)
            count = min(draft.lengths[row], len(own))
            if not count:
                continue
            if recorder is not None or observing:
                rows = verified(row, verdict.charged_rows(row, count), seen, self.verifier)
                self.rules.observe(row, rows)
                if recorder is not None:
                    recorder.add(rows)
            if meter is not None:
                charge(meter, row, own, seen, place)
        self.clock.lap("meter")

    def failure(
        self,
        row: int,
        q: Float[Tensor, "K1 vocab"],
        p: Float[Tensor, "K vocab"] | None,
        places: range,
    ) -> DecodingError:
        """Return the error for a row that got no token; ``places`` of its rows may be to blame."""
        before = [self.texts.new_ids(own) for own in range(self.texts.batch)]
        self.tally.stop(self.places, before)
        about = self.opening.target_model, self.opening.warp.processors
        return failure(self.places[row], len(before[row]), (q, p), places, about, self.result())

    def result(self) -> GenerationResult:
        """Return tokens and statistics."""
        target, draft = self.calls
        found = self.tally.result(target_calls=target, draft_calls=draft, seconds=Seconds())
        self.clock.lap("other")
        measured: dict[str, Any] = {}
        if self.meter is not None:
            measured["meter"] = self.meter.reading(found.num_accepted, found.num_tokens)
            if (log := self.meter.log) is not None:
                width = found.output_token_ids.shape[1]
                measured |= {"token_kl": log.costs(width), "log_probs": log.log_probs(width)}
        if self.recorder is not None:
            vocab = text_config(self.opening.target_model).vocab_size
            measured["rows"] = self.recorder.rows(vocab)
        self.clock.lap("meter")
        return replace(found, seconds=self.clock.seconds(), **measured)


def opened_texts(
    models: dict[str, Any], input_ids: Tensor, options: DecodeOptions, beside: int = 0
) -> tuple[Texts, list[int]]:
    """Return prompts with room for new tokens, and how many places each leaves out.

    Checks them against the models. ``beside`` is how many more tokens a round may draft.
    """
    _check_prompt(input_ids)
    first = next(iter(models))
    for name, model in models.items():
        _check_model(name, model, input_ids, options.max_new_tokens)
        if model.device != models[first].device:
            raise ValueError(
                f"{name}: device must equal that of {first} ({models[first].device}); "
                f"got {model.device}"
            )
    shown = _shown(input_ids, options.attention_mask)
    rows = zip(input_ids.tolist(), shown, strict=True)
    prompts = [[token for token, on in zip(*row, strict=True) if on] for row in rows]
    new, device = options.max_new_tokens, models[first].device
    texts = Texts(prompts, new, options.ends, device, beside)
    return texts, [own.count(False) for own in shown]


def _shown(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[bool]]:
    """Return which tokens of each prompt the models see; masked ones take no position."""
    batch, length = input_ids.shape
    if attention_mask is None:
        return [[True] * length] * batch
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask: shape must be that of input_ids {(batch, length)}; "
            f"got {tuple(attention_mask.shape)}"
        )
    shown = attention_mask.bool().tolist()
    for row, own in enumerate(shown):
        if not own[-1]:
            raise ValueError(
                "attention_mask: must be 1 on the last token of a prompt (pad in front); "
                f"got 0 in row {row}"
            )
    return shown


def _check_prompt(input_ids: Any) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: must be an int64 tensor; got {found}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids: shape must be (B, T) with at least one token; got {tuple(input_ids.shape)}"
        )


def _check_model(name: str, model: Any, input_ids: Tensor, max_new_tokens: int) -> None:
    if model.training:
        raise ValueError(f"{name}: must be in evaluation mode, call {name}.eval(); got training")
    config = text_config(model)
    check_ids("input_ids", input_ids, config.vocab_size)
    longest = getattr(config, "max_position_embeddings", None)
    wanted = input_ids.shape[1] + max_new_tokens
    if longest is not None and 0 < longest < wanted:  # −1 stands for no limit
        raise ValueError(
            f"max_new_tokens: prompt and new tokens must fit the {longest} positions of "
            f"{name}; got {input_ids.shape[1]} + {max_new_tokens} = {wanted}"
        )
