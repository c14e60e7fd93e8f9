"""A pair that is decoded, wherever it is from, and the one from a user's checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, generate, generate_plain, load_pair
from cactus_theory.decoding._text import left_padded

from ..common.grid import PLAIN, Config
from ..common.inputs import PROMPTS, prompts_of
from .sections import Bench, Row, Settings

WIDTHS, NEW_TOKENS = (4, 8), 128
TINY_WIDTHS, TINY_NEW_TOKENS, TINY_PROMPTS = (2,), 12, 2
ASK = "{question}\nWork it out step by step and end with the final number after ####.\n"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Results = list[GenerationResult]


@dataclass(frozen=True)
class Place:
    """A target, its draft and a batch size; the share of the time left that it may take."""

    target: str
    draft: str
    batch: int
    share: float = 1.0

    @property
    def name(self) -> str:
        """Return how notes call it."""
        return f"{self.target} + {self.draft}, batch {self.batch}"


@dataclass(frozen=True)
class Loaded:
    """A pair, its prompts, and what the rows about it say beyond the decode itself.

    Attributes
    ----------
    prompts : token ids of each.
    options : of every decode.
    complete : from a row and its timed results, what is added to it.
    """

    target: Any
    draft: Any
    prompts: Sequence[Sequence[int]]
    seed: int
    options: Row
    complete: Callable[[Row, Results], Row]

    def decode(self, line: Config, *, meter: bool) -> Results:
        """Return the results of all prompts, ``line.batch`` at a time."""
        return [
            self._group(line, start, meter) for start in range(0, len(self.prompts), line.batch)
        ]

    def _group(self, line: Config, start: int, meter: bool) -> GenerationResult:
        ids, mask = left_padded(self.prompts[start : start + line.batch], self.target)
        shared = self.options | {"attention_mask": mask, "seed": self.seed + start}
        if line.method == PLAIN:
            return generate_plain(self.target, ids, **shared)
        shared |= {"policy": line.method, "verifier": line.verifier, "meter": meter}
        return generate(self.target, self.draft, ids, num_draft_tokens=line.width, **shared)


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a GPU, which serves in it, and float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def checkpoints(bench: Bench, place: Place) -> Loaded:
    """Return a pair of checkpoints in the usual loop; rows say what share of answers is right."""
    settings = bench.settings
    assert settings.target is not None and settings.draft is not None
    device, dtype = str(bench.device), usual_dtype(bench.device)
    pair = load_pair(settings.target, settings.draft, device=device, dtype=dtype)
    texts, answers = asked(settings, TINY_PROMPTS if bench.tiny else settings.num_prompts)
    ids = [token_ids(pair.tokenizer, text, bool(answers)) for text in texts]
    options: Row = {
        "max_new_tokens": TINY_NEW_TOKENS if bench.tiny else settings.max_new_tokens,
        "eos_token_ids": pair.target.generation_config.eos_token_id if answers else None,
    }
    plain: Results = []

    def complete(row: Row, timed: Results) -> Row:
        if row["policy"] == PLAIN:
            plain.extend(timed)
        step = sum(own.seconds.total for own in plain) / sum(own.target_calls for own in plain)
        found: Row = {"step_ms": 1e3 * step}
        # on CUDA the parts of a decode are not timed one by one
        if bench.device.type != "cuda" and row["num_draft_tokens"]:
            found |= _parts(timed, step)
        return found | (_score(pair.tokenizer, timed, answers) if answers else {})

    return Loaded(pair.target, pair.draft, ids, settings.seed, options, complete)


def _parts(timed: Results, step: float) -> Row:
    """Return c and v in plain steps, and the milliseconds of a verification."""
    calls, drafts = (sum(getattr(own, name) for own in timed)
                     for name in ("target_calls", "draft_calls"))  # fmt: skip
    draft, target, verify = (sum(getattr(own.seconds, part) for own in timed)
                             for part in ("draft", "target", "verify"))  # fmt: skip
    return {
        "c": draft / drafts / step,
        "v": target / calls / step,
        "verify_ms": 1e3 * verify / calls,
    }


def _score(tokenizer: Any, timed: Results, answers: list[str]) -> Row:
    """Return the share of texts whose last number is that of the answer."""
    outputs = [row for own in timed for row in own.output_token_ids.tolist()]
    texts = [
        tokenizer.decode([token for token in row if token >= 0], skip_special_tokens=True)
        for row in outputs
    ]
    right = [final_number(a) == final_number(b) for a, b in zip(texts, answers, strict=True)]
    return {"score": sum(right) / len(right), "scored": len(right)}


def final_number(text: str) -> float | None:
    """Return the first number after ``####``, else the text's last number, None without one."""
    marked, every = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    chosen = marked[:1] or every[-1:]
    return float(chosen[0].replace(",", "")) if chosen else None


def asked(settings: Settings, count: int) -> tuple[list[str], list[str]]:
    """Return prompts and their answers; no answers unless every line has a question and one."""
    path = settings.prompts or PROMPTS
    texts = prompts_of(path)[:count]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    if not all({"question", "answer"} <= set(record) for record in records[:count]):
        return texts, []
    questions = [ASK.format(question=record["question"]) for record in records[:count]]
    return questions, [str(record["answer"]) for record in records[:count]]


def token_ids(tokenizer: Any, prompt: str, ask: bool) -> list[int]:
    """Return token ids; a question goes through the model's chat template if it has one."""
    if ask and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        return list(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        )
    return tokenizer(prompt)["input_ids"]
