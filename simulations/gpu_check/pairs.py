"""The pairs that are decoded: checkpoints of a user, or the shipped pair in real models' shapes.

What a round of the latter should cost is measured pass by pass, halfway through the texts:
``step_ms`` is the target's pass over one token a text; ``c`` a draft pass and ``v`` a target pass
over K + 1 positions, in such steps; ``prefill_ms`` both models' passes over the prompts.
``fixed_ms`` is what a lossless round takes beyond K·c + v: sampling, verification and the host.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, generate, generate_plain, load_pair
from cactus_theory.decoding._text import left_padded
from cactus_theory.decoding.device import BY_KERNELS
from cactus_theory.decoding.device.loop import BUCKET
from cactus_theory.decoding.device.round import Repeated, StaticForward
from cactus_theory.decoding.models import CachedModel

from ..common.grid import PLAIN, USUAL, Config
from ..common.inputs import PAIR, PROMPTS, load_model, load_prompts, prompts_of
from ..inflate import SHAPES, Shape, inflate, step_cost
from .device import bandwidth, wait
from .sections import Bench, Row, Settings
from .verify import LARGE, LOSSLESS

WIDTHS, NEW_TOKENS = (4, 8), 128
TINY_WIDTHS, TINY_NEW_TOKENS, TINY_PROMPTS = (2,), 12, 2
ASK = "{question}\nWork it out step by step and end with the final number after ####.\n"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Results = list[GenerationResult]


@dataclass(frozen=True)
class Setup:
    """A target, its draft and a batch size; the share of the time left that it may take."""

    target: str
    draft: str
    batch: int
    share: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.target} + {self.draft}, batch {self.batch}"


@dataclass(frozen=True)
class Workload:
    """A pair, its prompts, and what the rows about it say beyond the decode itself."""

    target: Any
    draft: Any
    prompts: Sequence[Sequence[int]]
    seed: int
    options: Row  # of every decode
    complete: Callable[[Row, Results], Row]  # what a row and its timed results are completed by

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


def checkpoints(bench: Bench, setup: Setup) -> Workload:
    """Return a pair of checkpoints in the usual loop; rows say what share of answers is right."""
    settings = bench.settings
    assert settings.target is not None and settings.draft is not None
    device, dtype = str(bench.device), usual_dtype(bench.device)
    pair = load_pair(settings.target, settings.draft, device=device, dtype=dtype)
    count = TINY_PROMPTS if bench.tiny else settings.num_prompts
    texts, answers = prompts_and_answers(settings, count)
    ids = [token_ids(pair.tokenizer, text, bool(answers)) for text in texts]
    options: Row = {
        "max_new_tokens": TINY_NEW_TOKENS if bench.tiny else settings.max_new_tokens,
        "eos_token_ids": pair.target.generation_config.eos_token_id if answers else None,
    }
    plain: Results = []

    def complete(row: Row, timed: Results) -> Row:
        if row["policy"] == PLAIN:
            plain.extend(timed)
        step = sum(run.seconds.total for run in plain) / sum(run.target_calls for run in plain)
        columns: Row = {"step_ms": 1e3 * step}
        # on CUDA the parts of a decode are not timed one by one
        if bench.device.type != "cuda" and row["num_draft_tokens"]:
            columns |= _parts(timed, step)
        return columns | (_score(pair.tokenizer, timed, answers) if answers else {})

    return Workload(pair.target, pair.draft, ids, settings.seed, options, complete)


def _parts(timed: Results, step: float) -> Row:
    """Return c and v in plain steps, and the milliseconds of a verification."""
    calls, drafts = (sum(getattr(result, name) for result in timed)
                     for name in ("target_calls", "draft_calls"))  # fmt: skip
    draft, target, verify = (sum(getattr(result.seconds, part) for result in timed)
                             for part in ("draft", "target", "verify"))  # fmt: skip
    return {
        "c": draft / drafts / step,
        "v": target / calls / step,
        "verify_ms": 1e3 * verify / calls,
    }


def _score(tokenizer: Any, timed: Results, answers: list[str]) -> Row:
    """Return the share of texts whose last number is that of the answer."""
    outputs = [row for result in timed for row in result.output_token_ids.tolist()]
    texts = [
        tokenizer.decode([token for token in row if token >= 0], skip_special_tokens=True)
        for row in outputs
    ]
    correct = [final_number(a) == final_number(b) for a, b in zip(texts, answers, strict=True)]
    return {"score": sum(correct) / len(correct), "scored": len(correct)}


def final_number(text: str) -> float | None:
    """Return the first number after ``####``, else the text's last number, None without one."""
    after_mark, numbers = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    candidates = after_mark[:1] or numbers[-1:]
    return float(candidates[0].replace(",", "")) if candidates else None


def prompts_and_answers(settings: Settings, count: int) -> tuple[list[str], list[str]]:
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


TINY_SHAPES = ("tiny", "tiny-draft")
# calls between two looks at the clock of a GPU, so that waiting for it is a small part of them
CALLS = 5
REPEATS = 5


@dataclass(frozen=True)
class Inflated:
    """A target and a draft of these shapes that compute what the shipped pair computes."""

    target: Any
    draft: Any
    target_shape: Shape
    draft_shape: Shape

    @property
    def device(self) -> torch.device:
        return self.target.device

    def roofline_ms(self, context: int, batch: int, bandwidth: float) -> float:
        """Return the least milliseconds of a plain decode step: its bytes at GB/s of a copy."""
        width = self.target.dtype.itemsize
        cost = step_cost(self.target_shape, context, batch=batch, width=width)
        return cost.bytes / bandwidth / 1e6


# the pair made last: setups ask for it in turn, and a device may hold only one
_LAST_PAIR: dict[tuple[Any, ...], Inflated] = {}


def inflated(
    device: torch.device | str, target_shape: str, draft_shape: str, *, tiny: bool = False
) -> Inflated:
    """Return the shipped pair in two named shapes, in ``tiny`` ones to rehearse."""
    names = TINY_SHAPES if tiny else (target_shape, draft_shape)
    for argument, name in zip(("target_shape", "draft_shape"), names, strict=True):
        if name not in SHAPES:
            raise ValueError(f"{argument}: must be one of {', '.join(SHAPES)}; got {name!r}")
    key = (torch.device(device), *names)
    if key not in _LAST_PAIR:
        _LAST_PAIR.clear()
        shapes = [SHAPES[name] for name in names]
        models = [
            inflate(load_model(PAIR / part), shape, device=key[0], dtype=usual_dtype(key[0]))
            for part, shape in zip(("target", "draft"), shapes, strict=True)
        ]
        _LAST_PAIR[key] = Inflated(*models, *shapes)
    return _LAST_PAIR[key]


def prompts(batch: int) -> list[Sequence[int]]:
    """Return the ids of ``batch`` of the shipped prompts, again from the first."""
    ids = load_prompts(PROMPTS, PAIR / "target")
    return list(itertools.islice(itertools.cycle(ids), batch))


def at_real_sizes(bench: Bench, setup: Setup) -> Workload:
    """Return the shipped pair, inflated, in the device's loop; rows say what its parts cost."""
    pair = inflated(bench.device, setup.target, setup.draft, tiny=bench.tiny)
    ids, tokens = prompts(setup.batch), TINY_NEW_TOKENS if bench.tiny else NEW_TOKENS
    costs = costs_of(pair, ids, tokens, TINY_WIDTHS if bench.tiny else WIDTHS)
    context = max(map(len, ids)) + tokens // 2
    floor = {"roofline_ms": pair.roofline_ms(context, setup.batch, bandwidth(bench))}

    def complete(row: Row, timed: Results) -> Row:
        cost = costs[row["num_draft_tokens"]]
        if (row["policy"], row["verifier"]) in ((PLAIN, USUAL), (LOSSLESS, USUAL)):
            cost["fixed_ms"] = fixed_ms(cost, row, timed[0].target_calls)
        return floor | cost | {"verify_ms": verification(bench, row, setup.batch)}

    options: Row = {"max_new_tokens": tokens, "device_loop": True}
    return Workload(pair.target, pair.draft, ids, bench.settings.seed, options, complete)


def costs_of(
    pair: Inflated, ids: Sequence[Sequence[int]], new_tokens: int, widths: Sequence[int]
) -> dict[int, Row]:
    """Return what the parts of a round cost, by K; at K = 0 those of a plain decode."""
    passes = Passes(pair, ids, new_tokens, max(widths))
    step, draft = passes.seconds(pair.target, 1), passes.seconds(pair.draft, 1)
    prefills = passes.prefill(pair.target), passes.prefill(pair.draft)
    return {
        width: {
            "step_ms": 1e3 * step,
            "c": draft / step if width else None,
            "v": passes.seconds(pair.target, width + 1) / step if width else 1.0,
            "prefill_ms": 1e3 * (sum(prefills) if width else prefills[0]),
        }
        for width in (0, *widths)
    }


def fixed_ms(costs: Row, row: Row, rounds: int) -> float:
    """Return the milliseconds of a round that its passes do not account for."""
    passes = row["num_draft_tokens"] * (costs["c"] or 0.0) + costs["v"]
    return (1e3 * row["seconds"] - costs["prefill_ms"]) / rounds - passes * costs["step_ms"]


class Passes:
    """Forward passes of both models of a pair over a batch, halfway through its texts."""

    def __init__(
        self, pair: Inflated, prompts: Sequence[Sequence[int]], new_tokens: int, width: int
    ) -> None:
        self.device = pair.device
        ids, mask = left_padded(prompts, pair.target)
        # every text with as many tokens as the longest prompt has
        self.ids = torch.where(mask > 0, ids, ids[:, -1:])
        self.batch, self.prompt = ids.shape
        self.context = self.prompt + new_tokens // 2
        self.end = -(-(self.context + width + 1) // BUCKET) * BUCKET
        self.cached = {
            id(model): CachedModel(model, self.end, self.batch, fast_forward=True)
            for model in (pair.target, pair.draft)
        }

    def prefill(self, model: Any) -> float:
        """Return the seconds of a pass over the prompts."""
        cached, counts = self.cached[id(model)], [self.prompt] * self.batch

        def feed() -> None:
            for row in range(self.batch):
                cached.rollback(row, 0)
            cached.feed(self.ids, counts, [1] * self.batch)

        return self._timed(feed)

    def seconds(self, model: Any, new: int) -> float:
        """Return the seconds of a pass over ``new`` tokens a text, whatever the cache holds."""
        forward = StaticForward(self.cached[id(model)])
        ids = self.ids[:, -1:].repeat(1, new)
        places = torch.arange(self.context, self.context + new, device=self.device)
        places = places.repeat(self.batch, 1)
        return self._timed(
            partial(Repeated(lambda end: forward(ids, places, end), self.device), self.end)
        )

    def _timed(self, job: Callable[[], Any]) -> float:
        """Return the seconds of a call, after one that pays for memory and captures."""
        calls = CALLS if self.device.type == "cuda" else 1
        with torch.inference_mode():
            job()
            return statistics.median(self._of_calls(job, calls) for _ in range(REPEATS))

    def _of_calls(self, job: Callable[[], Any], calls: int) -> float:
        wait(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            job()
        wait(self.device)
        return (time.perf_counter() - start) / calls


def verification(bench: Bench, row: Row, batch: int) -> float | None:
    """Return the milliseconds of the step that a decode verified by, when it was timed alone."""
    by = "kernel_us" if row.get("loop") == BY_KERNELS else "torch_us"
    name = row["policy"].partition(":")[0], row["verifier"], batch, row["num_draft_tokens"], LARGE
    for step in bench.tables.get("verify", ()):
        policy, *others = (step[key] for key in
                           ("policy", "verifier", "batch", "drafted", "vocabulary"))  # fmt: skip
        if (policy.partition(":")[0], *others) == name:
            return None if step[by] is None else step[by] / 1e3
    return None
