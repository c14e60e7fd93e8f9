"""Apply logits processors as Hugging Face's ``generate`` does: once for each token of the text.

The classes of transformers in ``FREE`` and ``KNOWN`` are functions of scores and ids alone, and are
called for many tokens at once. Every other processor is a *stranger*: a stranger may keep state
between calls, such as the matcher of a grammar. So a stranger is called once for each emitted
token, in order. For drafted tokens copies of the stranger are called, and thrown away afterwards.
A stranger in a batch of several texts, or one that cannot be copied, raises ValueError.
"""

import copy
import math
import pickle
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._snapshot import Snapshot
from cactus_theory.decoding.text import Texts
from cactus_theory.optimum.band_row import loops
from cactus_theory.verify.draft import Draft

LIBRARY = "transformers.generation.logits_process"
# classes of transformers, without their last words: FREE read scores only, KNOWN ids as well
FREE = set(
    "BarkEosPrioritizer Epsilon Eta InfNanRemove LogitNormalization MinP SuppressTokens "
    "Temperature TopH TopK TopP Typical".split()
)
KNOWN = set(
    "AlternatingCodebooks EncoderNoRepeatNGram EncoderRepetitionPenalty ForcedBOSToken "
    "ExponentialDecayLengthPenalty ForcedEOSToken MinLength MinNewTokensLength NoBadWords "
    "NoRepeatNGram RepetitionPenalty SequenceBias SuppressTokensAtBegin Watermark "
    "WhisperTimeStamp".split()
)
# attributes of these classes that have one entry for each text of the batch
BY_TEXT = ("encoder_input_ids", "generated_ngrams", "prompt_ignore_length")


@dataclass(frozen=True)
class Places:
    """Logits of a batch at several positions of each text, and the ids before each position.

    The logits at (row, offset) are those of batch row ``row`` after ``first + offset`` drafted
    tokens; in a tree, after the drafted tokens on the path to node ``offset``.
    """

    logits: Float[Tensor, "batch some vocab"]
    texts: Texts
    first: int
    drafted: Sequence[int]
    draft: Draft | None

    def offsets(self, row: int) -> range:
        """Return the offsets of a text that have valid logits."""
        return range(min(self.drafted[row] - self.first + 1, self.logits.shape[1]))

    def ids(self, row: int, offset: int) -> Int[Tensor, "1 length"]:
        """Return the ids before the logits at (row, offset), with the prompt's padding as given."""
        if self.draft is None or self.draft.parents is None:
            ids = self.texts.prefix(row, self.first + offset)
        else:  # ids of the node's ancestors, not of other branches
            path = self.draft.path(row, offset - 1) if offset else []
            ids = self.texts.path_ids(row, path)
        return self.texts.shown(row, ids)

    def reached(self, row: int) -> Iterator[int]:
        """Yield the offsets of a text that decoding can reach.

        Offsets behind an end-of-text token, or behind a token with a logit of −∞, are left out.
        """
        tokens = self.texts.buffer[row, self.texts.rows[row].length :].tolist()
        unreached = set[int]()  # offsets, which are nodes if there is a ``draft``
        for offset in self.offsets(row):
            is_behind = not self.texts.eos.isdisjoint(tokens[: self.first])
            if offset and self.draft is not None:
                above, token = self.draft.node(row, offset - 1), tokens[offset - 1]
                excluded = not float(self.logits[row, above, token]) > -math.inf
                is_behind = above in unreached or token in self.texts.eos or excluded
            if not is_behind:
                yield offset
            else:
                unreached.add(offset)


class Processors:
    """The logits processors of a decode, in the order of their calls.

    ``batch`` is the number of texts; ``drafts`` says whether the decode has a draft. ``strangers``
    are the processors whose classes are neither in ``FREE`` nor in ``KNOWN``.

    Raises
    ------
    ValueError
        A stranger if there are several texts; with a draft, a stranger that cannot be copied.
    """

    def __init__(
        self, processors: Sequence[Any] = (), batch: int = 1, drafts: bool = False
    ) -> None:
        self.all, self.batch = list(processors), batch
        self.strangers = [one for one in self.all if not {library_name(one)} & (FREE | KNOWN)]
        # for strangers: the text's rows before processing, and the copies that drafts call
        self.rows, self.copies = torch.empty(0, device="cpu"), list[Any]()
        self.before: Snapshot | None = None  # the state, which calls of copies must not change
        if self.strangers and batch > 1:
            refuse(self.strangers, f"must be asked about one text at a time; got {batch} texts")
        if self.strangers and drafts:
            self._check()

    def __call__(self, places: Places) -> None:
        """Apply all processors, and write the processed logits over the logits."""
        if self.strangers:
            return self._walk(places)
        for processor in self.all:
            if library_name(processor) in KNOWN:
                self._ask_known(processor, places)
            else:
                flat = places.logits.reshape(-1, places.logits.shape[-1])
                ids, scores = places.texts.buffer[:, :1], flat.clone()  # FREE reads no ids
                by_loop = _is_nucleus(processor, scores)
                scores = _nucleus(processor, scores) if by_loop else processor(ids, scores)
                places.logits.copy_(scores.reshape(places.logits.shape))

    def settle(self, texts: Texts, taken: int, path: Sequence[int]) -> None:
        """If there are strangers, call all processors for a round's emitted tokens but the first.

        This updates the strangers' state; :meth:`_walk` has called them for the first token.
        ``taken`` is the number of emitted tokens; ``path`` are the indices of the accepted tokens
        in the draft.
        """
        if not self.strangers:
            return
        for count, place in enumerate(path[: taken - 1], 1):
            ids = texts.shown(0, texts.prefix(0, count - taken))  # up to emitted token ``count``
            self._ask(self.all, self.rows[place + 1], ids)  # row i + 1 follows drafted token i

    def _ask_known(self, one: Any, places: Places) -> None:
        """Call a processor of ``KNOWN``, once for all positions after equally many ids."""
        groups = defaultdict[int, list[Any]](list)
        for row in range(places.texts.batch):
            for offset in places.offsets(row):
                ids = places.ids(row, offset)
                groups[ids.shape[1]].append((row, offset, ids))
        for rows, offsets, ids in (zip(*group, strict=True) for group in groups.values()):
            of_rows = self._for_texts(one, [places.texts.rows[row].number for row in rows])
            scores = places.logits[list(rows), list(offsets)]
            places.logits[list(rows), list(offsets)] = of_rows(torch.cat(ids), scores)

    def _for_texts(self, one: Any, numbers: Sequence[int]) -> Any:
        """Return a copy of a processor for the texts with these numbers in the batch.

        Attributes that have one entry for each text keep only the entries of these texts.
        """
        selected = copy.copy(one)
        for name in BY_TEXT:
            values = vars(one).get(name)
            if isinstance(values, list | Tensor):  # one entry for all answers to the same prompt
                chosen = [number * len(values) // self.batch for number in numbers]
                few = [values[i] for i in chosen] if isinstance(values, list) else values[chosen]
                vars(selected).update({name: few, "batch_size": len(numbers)})
        return selected

    def _walk(self, places: Places) -> None:
        """Call processors for the text's next token, and copies of them for drafted tokens.

        While the draft is made (``draft`` is None), only copies are called. When the target's rows
        are processed, the copies for a node are made from the copies for the node's parent.
        """
        draft, logits = places.draft, places.logits[0]
        if draft is None:
            if not (places.first and self.copies):  # the first drafted token of a round
                self.before = self._snapshot(self.all)
                self.copies = self.before.copies()
            for offset in places.reached(0):
                self._ask(self.copies, logits[offset], places.ids(0, offset))
            return
        if self.copies:  # which were called while the draft was made
            self._check()
        self.copies, self.rows = [], logits.clone()
        self._ask(self.all, logits[0], places.ids(0, 0))
        if len(places.offsets(0)) > 1:
            self.before, by_node = self._snapshot(self.all), {0: self.all}
            for offset in places.reached(0):
                if offset:
                    above = by_node[draft.node(0, offset - 1)]  # offset i is node i
                    by_node[offset] = self._snapshot(above).copies()
                    self._ask(by_node[offset], logits[offset], places.ids(0, offset))
            self._check()

    def _ask(self, processors: Sequence[Any], logits: Float[Tensor, "vocab"], ids: Tensor) -> None:
        """Call the processors in order for one token, and write their scores over ``logits``."""
        scores = logits[None].float()
        for one in processors:
            scores = asked(one, ids, scores)
        logits.copy_(scores[0])

    def _snapshot(self, processors: Sequence[Any]) -> Snapshot:
        try:
            return Snapshot(processors)
        except Exception as error:
            reason = (
                "cannot be copied, which drafted places need; give its class a method fork() that "
                f"returns a copy; got {type(error).__name__}: {error}"
            )
            refuse(self.strangers, reason)

    def _check(self) -> None:
        """Raise if the strangers' state has changed although only copies were called."""
        now = self._snapshot(self.all)
        if self.before is not None and now.state != self.before.state:
            refuse(self.strangers, "keeps something outside of itself, which its copies change")
        self.before = now


def _is_nucleus(one: Any, scores: Tensor) -> bool:
    """Return whether a processor is a top-p cut that :func:`cut_to_nucleus` can compute faster."""
    usual = library_name(one) == "TopP" and one.min_tokens_to_keep == 1
    return usual and scores.device.type == "cpu" and loops() is not None


def _nucleus(one: Any, scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Cut rows of scores to their nucleus in place; return the rows."""
    cut = import_module("cactus_theory.decoding.nucleus").cut_to_nucleus
    scores = scores.detach()
    for row, probs in zip(scores.numpy(), scores.softmax(-1).numpy(), strict=True):
        cut(row, probs, 1 - one.top_p, one.filter_value)
    return scores


def library_name(one: Any) -> str | None:
    """Return the class name of a transformers processor without its ending, or None.

    The endings are ``LogitsProcessor`` and ``LogitsWarper``. A class from outside transformers
    gives None, even if it is a subclass of a class of transformers.
    """
    kind = type(one)
    short = re.sub("Logits(Processor|Warper)$", "", kind.__name__)
    return short if kind.__module__ == LIBRARY else None


def name_of(one: Any) -> str:
    """Return the name of a function, or the name of an object's class."""
    return getattr(one, "__name__", type(one).__name__)


def refuse(processors: Sequence[Any], reason: str) -> NoReturn:
    """Raise ValueError with the names of the processors, and the reason."""
    names = " or ".join(dict.fromkeys(map(name_of, processors)))
    raise ValueError(f"logits_processor: {names} {reason}")


def asked(one: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores that a processor makes of copies of ids and scores.

    The processor may change the copies and keep the result. Raises ValueError if the processor
    draws from a global random generator.
    """
    before = _generators()
    answer = one(ids.clone(), scores.clone())
    if _generators() != before:
        refuse([one], "draws from a global generator; give it a generator of its own")
    return answer


def _generators() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))
