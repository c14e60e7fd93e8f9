"""Write what the hook of model runner V1 verifies as traces (:mod:`cactus_theory.traces`).

With ``CACTUS_TRACE=DIR`` every start of an engine writes folders ``DIR/<time>-<process>-<n>``, one
for each setting of requests (policy, cap, temperature, cuts), MOST_SETTINGS of them at most. A text
is a request, written when it has ended, a cycle one round of it with a draft; steps that drafted
nothing are a number in the manifest (``undrafted``). Greedy requests, and rounds whose drafts a
grammar has cut, are left out. SERVING.md says what rows are kept, and what ``CACTUS_TRACE_BYTES``
bounds; engines that start together (data parallelism) have a bound each.

The row after the last drafted token is not seen here. In its place stands the token that the
engine drew from it, with probability 1 (``bonus_rows`` in the manifest). No number reads it but the
law of that token.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.truncation import Cuts
from cactus_theory.traces._folder import Folder, Header
from cactus_theory.traces._shard import Shard, pack
from cactus_theory.verify.draft import Verified
from cactus_theory.vllm.batch import FlatBatch
from cactus_theory.vllm.replace import served_name, vllm_version
from cactus_theory.vllm.requests import Request
from cactus_theory.vllm.settings import Settings

DTYPE = torch.float16
MOST_SETTINGS = 8
# bytes of a trace beside its rows: a folder's (manifest, lock), a text's (header of its file, line
# of the manifest), and those of a cycle or a drafted token (numbers)
OF_FOLDER, OF_TEXT, OF_CYCLE = 8192, 2048, 32
OF_ENTRY = 512  # of a text's entry in the manifest
# fewest texts that have room, at least a round of each: standard errors are over texts
FEWEST_TEXTS = 32


@dataclass
class RequestRounds:
    """The recorded rounds of one request until it ends."""

    folder: Folder
    bytes: int = 0
    cut: int | None = None  # steps without a draft before the first round that was not kept
    kept: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def shard(self) -> Shard:
        """Return the rounds as the cycles of one text."""
        header = self.folder.header
        if not self.kept:
            return pack([], DTYPE, header.vocab_size)
        positions, ids, target, draft = zip(*self.kept, strict=True)
        return Shard(
            torch.tensor(positions, dtype=torch.int32, device="cpu"),
            torch.tensor([0, *map(len, ids)], device="cpu").cumsum(0),
            torch.tensor([0, *map(len, draft)], device="cpu").cumsum(0),
            *map(torch.cat, (ids, target, draft)),
        )


class Recorder:
    """Keeps the rounds of running requests, and writes those that have ended.

    ``config`` is vLLM's; ``warn`` is called with what the server's owner should know.
    """

    def __init__(self, settings: Settings, config: Any, warn: Callable[[str], None]) -> None:
        self.settings, self.warn, drafts = settings, warn, config.speculative_config
        self.width = int(drafts.num_speculative_tokens)
        models = served_name(config), str(drafts.model or drafts.method)
        self.target, self.draft = (Path(model).name for model in models)
        self.place, self.start = Path(settings.trace), f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
        files = (path for path in self.place.rglob("*") if path.is_file())
        self.left = settings.trace_bytes - sum(path.stat().st_size for path in files)
        self.folders: dict[str, Folder] = {}
        self.vocab = int(config.model_config.get_vocab_size())  # of the model, then of the logits
        self.stopped = False

    def add(self, batch: FlatBatch, verified: Verified, requests: Sequence[Request]) -> None:
        """Keep one round of each request that has drafted."""
        accepted, draft = verified.verdict.num_accepted.tolist(), verified.draft
        self.vocab = batch.target_logits.shape[-1]
        for place, row in enumerate(batch.drafted):
            request, count = requests[row], batch.counts[row]
            if request.greedy or (rounds := self._rounds(request)) is None:
                continue
            if int(draft.lengths[place]) < count or not self._take(request, batch, count):
                continue
            position = request.emitted - accepted[place] - 1
            bonus = torch.full((1, self.vocab), -torch.inf, dtype=DTYPE, device="cpu")
            bonus[0, int(batch.bonus[row])] = 0.0
            target = torch.cat([_stored(verified.target_probs[place, :count]), bonus])
            rows = bonus[:0] if draft.probs is None else _stored(draft.probs[place, :count])
            ids = draft.token_ids[place, :count].to("cpu", torch.int32)
            rounds.kept.append((position, ids, target, rows))

    def end(self, request: Request) -> None:
        """Write a request that has ended, and the manifest."""
        if request.greedy or not request.emitted:
            return
        rounds, request.rounds = self._rounds(request), None
        if rounds is None or not (rounds.kept or (rounds.cut is None and self._spend(OF_TEXT))):
            return
        undrafted = request.undrafted if rounds.cut is None else rounds.cut
        self._try(lambda: rounds.folder.add_shard(rounds.shard(), undrafted))
        self._try(rounds.folder.finish)
        if not self.stopped:  # what was taken and not used
            used = rounds.folder.entries[-1].bytes + OF_ENTRY
            self.left += max((rounds.bytes or OF_TEXT) - used, 0)

    def _rounds(self, request: Request) -> RequestRounds | None:
        """Return the recorded rounds of a request; None where its setting has no folder."""
        if request.rounds is None:
            header = self._header(request)
            if (folder := self.folders.get(repr(header))) is None:
                if len(self.folders) == MOST_SETTINGS:
                    self.warn(f"some requests are not traced, as {MOST_SETTINGS} settings are")
                    return None
                path = self.place / f"{self.start}-{os.getpid()}-{len(self.folders)}"
                size = (2 * self.width + 1) * header.vocab_size * DTYPE.itemsize
                room = self._spend(OF_FOLDER, OF_TEXT + size)
                folder = self._try(lambda: Folder(path, header)) if room else None
                if folder is None:
                    return None
                self.folders[repr(header)] = folder
                self.warn(f"rounds are written to {path}, up to {size:,} bytes each")
            request.rounds = RequestRounds(folder)
        return request.rounds

    def _try(self, write: Callable[[], Any]) -> Any:
        """Call ``write`` and report its error; a full disk must not end the engine."""
        try:
            return write()
        except (OSError, ValueError) as error:
            self.stopped = True
            self.warn(f"no more is traced: {error}")

    def _take(self, request: Request, batch: FlatBatch, count: int) -> bool:
        """Return whether there is room for a round, and take it; a text that was cut is not on."""
        rounds = request.rounds
        if rounds.cut is not None:
            return False
        rows = count + 1 + (0 if batch.draft_probs is None else count)
        size = rows * self.vocab * DTYPE.itemsize + OF_CYCLE * (count + 1)
        size += 0 if rounds.kept else OF_TEXT
        most = self.settings.trace_bytes / FEWEST_TEXTS
        if (rounds.kept and rounds.bytes + size > most) or not self._spend(size):
            rounds.cut = request.undrafted
            return False
        rounds.bytes += size
        return True

    def _spend(self, size: int, beside: int = 0) -> bool:
        if self.stopped:
            return False
        if size + beside > self.left:
            self.warn("no more is traced: CACTUS_TRACE_BYTES would be exceeded")
            self.stopped = True
            return False
        self.left -= size
        return True

    def _header(self, request: Request) -> Header:
        asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {name: getattr(request.params, name, none) or none for name, none in asked.items()}
        # drafts come from whole rows
        cuts = Cuts(max(int(asked["top_k"]), 0), asked["top_p"], 0, 1.0)
        details = {
            "policy": request.policy.spec,
            "verifier": self.settings.verifier.spec,
            "cap": request.cap,
            "min_p": asked["min_p"],
            **vars(cuts),
            "engine": f"vllm {vllm_version()}",
            "bonus_rows": "drawn",
        }
        models, heat = (self.target, self.draft), float(asked["temperature"])
        return Header(self.vocab, self.width, "float16", *models, heat, 0, [], details)


def _stored(rows: Tensor) -> Tensor:
    return rows.log().to("cpu", DTYPE)
