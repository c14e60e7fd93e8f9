"""Read an engine's answers, one JSON line an answer, and compute the models' rows along them.

``cactus-theory served`` uses this module: :class:`Log` reads a growing file, :class:`Reader` runs
the models and gives the factors r/h that :mod:`cactus_theory.served.evidence` multiplies.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.files import first_line, read_marked, write_marked
from cactus_theory.base.prompts import Prompt, Rendering
from cactus_theory.decoding.drafters import Eagle3Drafter, as_drafter
from cactus_theory.decoding.drafters.interface import DraftContext
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.drafters.own_weights import OwnWeights
from cactus_theory.decoding.load import Pair
from cactus_theory.decoding.models import CachedModel, longest_text, text_config
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.text import Texts, fitted
from cactus_theory.policies.registry import policy_of_data
from cactus_theory.served.alternatives import (
    EDGE,
    ENTRIES,
    UNRELAXED,
    Alternative,
    Claim,
    Rows,
    log_factors,
)
from cactus_theory.served.evidence import Evidence

FORMAT, VERSION = "cactus-theory served", 1
# sampling parameters that change the law but cannot be claimed here, with their neutral values
OTHERS = {"min_p": 0, "typical_p": 1, "repetition_penalty": 1, "presence_penalty": 0,
          "frequency_penalty": 0, "no_repeat_ngram_size": 0, "min_tokens": 0, "logit_bias": None,
          "bad_words": None, "allowed_token_ids": None, "structured_outputs": None}  # fmt: skip
# the divergence KL(r‖h) is computed at every APART-th place: enough to predict the tokens needed
APART = 8
# NAMED: most left-out lines whose reason is kept; SECONDS: time between two writes of the state
NAMED, SECONDS = 20, 5.0


@dataclass(frozen=True)
class Answer:
    """The token ids of a prompt and of its answer, and the settings claimed for the answer.

    ``encoded`` is whether the log held only a text, from which a tokenizer made the answer's ids.
    """

    line: int
    prompt: list[int]
    token_ids: list[int]
    claim: Claim
    encoded: bool = False


def read_answer(
    line: int,
    text: bytes,
    claim: Claim,
    tokenizer: Any,
    vocab: int,
    rendering: Rendering,
    trust_code: bool = False,
) -> Answer:
    """Parse one line of a log into an :class:`Answer`.

    Raises ValueError with the reason for a line that cannot be used. ``claim`` has the settings
    that a line does not give. A line cannot run code, unless ``trust_code`` allows it to name a
    policy as ``FILE.py:NAME``.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON; {first_line(error)}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"must be a JSON object; got {type(record).__name__}")
    record = {name: value for name, value in record.items() if value is not None}
    for name, neutral in OTHERS.items():
        if (value := record.get(name)) and value != neutral:
            raise ValueError(f"{name} {value!r:.20} changes the law and is not followed here")
    cuts = {name: record[name] for name in ("top_k", "top_p") if name in record}
    if cuts.get("top_k") == -1:  # some engines write −1 for no cut
        cuts["top_k"] = 0
    settings = {name: record[name] for name in ("temperature", "policy") if name in record}
    if cuts:
        claimed = claim.cuts  # the draft's cuts follow the target's unless they were given
        alike = (claimed.top_k, claimed.top_p) == (claimed.draft_top_k, claimed.draft_top_p)
        # with None, Cuts takes the target's
        of_draft = dict.fromkeys(("draft_top_k", "draft_top_p")) if alike else {}
        settings["cuts"] = replace(claimed, **cuts | of_draft)
    if "policy" in settings and (spec := settings["policy"]) not in UNRELAXED:
        if not isinstance(spec, str):
            raise ValueError(f"policy must be a spec; got {spec!r:.40}")
        try:
            settings["policy"] = policy_of_data(spec, "the line", trust_code=trust_code).spec
        except (TypeError, OSError) as error:  # from a trusted policy file
            raise ValueError(str(error)) from None
    claim = replace(claim, **settings)
    encoded = "token_ids" not in record
    if encoded:
        answer = _text(record, "text")
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != answer:
            raise ValueError("its text is another one after it was encoded")
    else:
        ids = _ids(record, "token_ids", vocab)
    if "prompt_token_ids" in record:
        prompt = _ids(record, "prompt_token_ids", vocab)
    else:
        prompt = rendering.ids(Prompt(_text(record, "prompt"), place="it"), tokenizer)
    if not prompt:
        raise ValueError("prompt_token_ids must hold a token")
    return Answer(line, prompt, ids, claim, encoded)


def _text(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := record.get(name), str):
        ids = "token_ids" if name == "text" else "prompt_token_ids"
        raise ValueError(f"must hold {ids}, or a text under {name!r}")
    return value


def _ids(record: Mapping[str, Any], name: str, vocab: int) -> list[int]:
    ids = record[name]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{name} must be a list of token ids; got {ids!r:.40}")
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} must be ids below {vocab}, those of the target; got {token}")
    return ids


class Reader:
    """Compute ln r/h of tokens of answers, for the claimed law h and alternative laws r.

    Parameters
    ----------
    pair : the target and, optionally, the draft.
    greedy : whether the engine drafts greedily; draft rows are then one-hot.
    table : the alternatives.
    edge : nats by which the rounding of kernels may move a token across a cut.

    Raises
    ------
    ValueError
        The draft is neither a model nor an EAGLE-3 head, so its rows depend on more than the text.
    """

    def __init__(
        self, pair: Pair, greedy: bool, table: tuple[Alternative, ...], edge: float = EDGE
    ) -> None:
        self.target, self.greedy, self.table, self.edge = pair.target, greedy, table, edge
        self.vocab = text_config(pair.target).vocab_size
        self.longest = longest_text(pair.target)
        self.drafter = None if pair.draft is None else as_drafter(pair.draft)
        if isinstance(self.drafter, OwnWeights):
            self.drafter = ModelDrafter(self.drafter.of(pair.target))
        if not isinstance(self.drafter, ModelDrafter | Eagle3Drafter | None):
            raise ValueError(
                "--draft: must be a model, a part of the target or a head, with rows; "
                f"got {type(self.drafter).__name__}"
            )

    @torch.inference_mode()
    def factors(self, answer: Answer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ln r/h (n, M), sums of KL(r‖h) (M,), and nats beyond the claimed cuts (n,)."""
        ids = torch.tensor(answer.prompt + answer.token_ids, device=self.target.device)
        prompt, factors, growth, beyond = ids[: len(answer.prompt)], [], 0.0, []
        late = None  # the logits of the place before the chunk
        for start, logits, draft in self._chunks(ids, len(prompt)):
            if bool(logits.isnan().any()):
                raise ValueError(f"--target: logits must be numbers; got NaN in line {answer.line}")
            stop = start + len(logits)
            before = ids[len(prompt) : stop - 1]
            rows = Rows(logits, answer.claim, prompt, before, draft, self.greedy, late)
            # every APART-th place of the answer, from its first place
            some = slice((len(prompt) - start) % APART, None, APART)
            tokens = ids[start:stop, None]
            logs, sums, distance = log_factors(rows, tokens, self.table, self.edge, some)
            growth = growth + sums.cpu().numpy()
            beyond.append(distance[:, 0].cpu().numpy())
            factors.append(logs[:, 0].cpu().numpy())
            late = logits[-1:]
        # from the sums over some places to sums over all
        scale = len(answer.token_ids) / math.ceil(len(answer.token_ids) / APART)
        return np.concatenate(factors), scale * np.asarray(growth), np.concatenate(beyond)

    def _chunks(self, ids: Tensor, first: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield (place of the first row, target logits, draft logits), a few rows at a time.

        Each model reads the text once, with a KV cache.
        """
        size, fed = max(1, ENTRIES // self.vocab), len(ids) - 1
        reads = () if self.drafter is None else self.drafter.reads(self.target)
        target = CachedModel(self.target, fed, reads=reads)
        draft = None
        head: Any = None  # an Eagle3Drafting
        if isinstance(self.drafter, ModelDrafter):
            draft = CachedModel(self.drafter.model, fed, drafts=True)
        elif self.drafter is not None:
            texts = Texts([ids.tolist()], 1, frozenset(), ids.device)
            warp, clock = Warp(1.0), Stopwatch()
            context = DraftContext(self.target, texts, warp, clock, 1, features=target)
            head = self.drafter.begin(context)
        carried: Tensor | None = None  # the head's row for the first place of the next chunk
        for start in range(first, len(ids), size):
            # the row of place i follows token i − 1: tokens before start − 1 were fed, except at
            # the first chunk
            stop, since = min(start + size, len(ids)), 0 if start == first else start - 1
            new, keep = ids[None, since : stop - 1], [stop - start]
            counts = [new.shape[1]]
            logits = target.feed(new, counts, keep)[0]
            scores = None
            if draft is not None:
                scores = fitted(draft.feed(new, counts, keep)[0], self.vocab)
            elif head is not None:  # the head's last row belongs to the next chunk's first token
                # what the head reads at each new place: the target's states and the next token
                units, counts = head.fresh([1])
                states = head.run(units, counts)
                head.cache.extend(counts)
                count = stop - start + (carried is None)
                head_rows = head.logits(states[:, -count:])[0]
                head_rows = head_rows if carried is None else torch.cat([carried, head_rows])
                carried = head_rows[-1:].clone()
                # after a prompt of one token the head has no state to draft from
                scores = torch.cat([logits[: len(logits) + 1 - len(head_rows)], head_rows[:-1]])
            yield start, logits.clone(), scores


@dataclass
class Log:
    """A growing file of answers: how far it was read, and the evidence from the lines read.

    Attributes
    ----------
    setting : the settings that the numbers depend on, beside the file. A saved state with
        different settings is rejected with an error.
    evidence : the evidence of the lines read.
    read, sha256, lines : number of bytes read, a digest of these bytes, number of lines read.
    left_out : (line, reason) of the first lines that could not be used.
    skipped : number of lines that could not be used.
    empty : number of answers without a token.
    encoded : number of answers whose ids a tokenizer made from their text.
    unfinished : whether the last line is still being written; it is read once it is whole.
    """

    setting: dict[str, Any]
    evidence: Evidence
    read: int = 0
    sha256: str = ""
    lines: int = 0
    left_out: list[tuple[int, str]] = field(default_factory=list)
    skipped: int = 0
    empty: int = 0
    encoded: int = 0
    unfinished: bool = False

    @classmethod
    def opened(cls, state: str | Path | None, setting: dict[str, Any], evidence: Evidence) -> "Log":
        """Return the log that is saved in a state file, or a new log if there is no such file.

        Raises OSError or ValueError for a state that cannot be read or has different settings.
        """
        if state is None or not Path(state).exists():
            return cls(setting, evidence)
        content = read_marked(Path(state), FORMAT, VERSION)
        try:
            kept = {name: content[name] for name in cls.__dataclass_fields__}
            if content["digest"] != _digest(kept):
                raise ValueError("something in it has changed")
            kept["evidence"] = Evidence(**kept["evidence"])
            log = cls(**kept)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--state: must be whole; {first_line(error)} in {state}") from None
        for name, value in setting.items():
            if log.setting.get(name) != value:
                raise ValueError(
                    f"--state: must be of the same {name.replace('_', ' ')}, as evidence adds up "
                    f"only then; got {log.setting.get(name)!r:.60} in {state}, now {value!r:.60}"
                )
        return log

    def save(self, state: str | Path | None) -> None:
        """Write the state to a file, atomically."""
        if state is not None:
            content = vars(self) | {"evidence": self.evidence.content()}
            write_marked(Path(state), FORMAT, VERSION, content | {"digest": _digest(content)})

    def go_on(
        self, path: str | Path, read: Any, reader: Reader, state: str | Path | None, progress: Any
    ) -> Iterator[tuple[Answer, np.ndarray]]:
        """Read the lines that were added to the file; yield each answer and ln r/h of its tokens.

        ``read(line, text)`` returns an answer or raises ValueError for a line to leave out. Raises
        ValueError if the part of the file that was read before has changed.
        """
        content = Path(path).read_bytes()
        hash_of_read = hashlib.sha256(content[: self.read])
        if self.read and hash_of_read.hexdigest() != self.sha256:
            rule = f"{path} must begin with the {self.lines} lines that were read"
            raise ValueError(f"--state: {rule}; they have changed")
        saved, self.unfinished = time.monotonic(), False
        *whole, rest = content[self.read :].split(b"\n")
        for text, end in [*((line, b"\n") for line in whole), (rest, b"")]:
            number = self.lines + 1
            if not end and not text.strip():  # nothing follows the last line feed
                break
            try:
                answer = read(number, text) if text.strip() else None
            except ValueError as error:
                if not end and str(error).startswith("must be JSON"):  # it is still being written
                    self.unfinished = True
                    break
                answer = self._leave(number, str(error))
            if answer is not None and not answer.token_ids:
                self.empty += 1
                answer = self._leave(number, "its answer is empty")
            longest = reader.longest
            if answer is not None and longest and len(answer.prompt + answer.token_ids) > longest:
                answer = self._leave(number, f"it is longer than the model's {longest} positions")
            if answer is not None:
                factors = self._count(answer, reader)
                yield answer, factors
            hash_of_read.update(text + end)
            self.read, self.lines = self.read + len(text + end), number
            self.sha256 = hash_of_read.hexdigest()
            progress(self.read)
            if time.monotonic() - saved > SECONDS:
                self.save(state)
                saved = time.monotonic()
        self.save(state)

    def _leave(self, number: int, reason: str) -> None:
        """Count a line that cannot be used, and keep its reason; return None as its answer."""
        self.skipped += 1
        if len(self.left_out) < NAMED:
            self.left_out.append((number, reason))

    def _count(self, answer: Answer, reader: Reader) -> np.ndarray:
        """Add an answer to the evidence; return ln r/h of its tokens."""
        factors, growth, beyond = reader.factors(answer)
        if self.evidence.impossible is None and len(far := np.flatnonzero(beyond > reader.edge)):
            place = int(far[0])
            token = {"line": answer.line, "token": place, "id": answer.token_ids[place]}
            # JSON has no ∞, the distance of a token to which the target gives probability 0
            self.evidence.impossible = token | {"beyond": min(float(beyond[place]), 1e3)}
        self.encoded += answer.encoded
        self.evidence.add(answer.line, factors, growth)
        return factors


def _digest(content: dict[str, Any]) -> str:
    """Return a digest of a state's content, by which a damaged state file is recognised."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
