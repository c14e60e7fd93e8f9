"""Decode with a pair of checkpoints: speed, and what share of the answers is right."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from cactus_theory.decoding import load_pair

from ..common.decode import Decoded, Harness
from ..common.grid import PLAIN, Config, configs
from ..common.inputs import PAIR, PROMPTS, prompts_of
from .decoding import TINY_NEW_TOKENS, TINY_WIDTHS, WIDTHS, policies
from .sections import Bench, Row, Settings

TINY_PROMPTS = 2
ASK = "{question}\nWork it out step by step and end with the final number after ####.\n"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def names(settings: Settings) -> tuple[str, str]:
    """Return what target and draft are called in the report."""
    if settings.target is None or settings.draft is None:
        return "shipped target", "shipped draft"
    return settings.target.name, settings.draft.name


def decoded(bench: Bench, batch: int) -> Iterator[Row]:
    """Yield plain decoding, then every policy at every K; each decoded twice, once metered."""
    settings = bench.settings
    prompts, answers = _texts(settings, TINY_PROMPTS if bench.tiny else settings.num_prompts)
    # the meter is exact in single precision; half is what a GPU serves in
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    folders = settings.target or PAIR / "target", settings.draft or PAIR / "draft"
    pair = load_pair(*folders, device=str(bench.device), dtype=dtype)
    tokens = TINY_NEW_TOKENS if bench.tiny else settings.max_new_tokens
    ids = [_ids(pair.tokenizer, prompt, bool(answers)) for prompt in prompts]
    harness = Harness(pair, ids, tokens, settings.seed, ends=bool(answers))
    step: dict[str, float] = {}
    lines = _lines(bench, batch)
    for line in lines[:2]:  # the first decode of a process pays for memory and loading
        harness.decode(line, 0)
    for line in lines:
        groups = range(-(-len(ids) // batch))
        runs = [harness.decode(line, group) for group in groups]
        row = _row(harness, line, runs, step)
        outputs = [own for run in runs for own in run.outputs]
        yield row | (_score(pair.tokenizer, outputs, answers) if answers else {})


def _lines(bench: Bench, batch: int) -> list[Config]:
    widths = TINY_WIDTHS if bench.tiny else WIDTHS
    found = configs([PLAIN], [], widths, [batch])
    for spec in policies(bench.tiny):
        method, _, verifier = spec.partition("@")
        found += configs([], [method], widths, [batch], [verifier or "chain"])
    return found


def _row(harness: Harness, line: Config, runs: list[Decoded], step: dict[str, float]) -> Row:
    """Return one raw row; ``step`` keeps the seconds of a plain step for those that follow."""
    seconds, results = sum(run.seconds for run in runs), [_result(run) for run in runs]
    calls, tokens = sum(r.target_calls for r in results), sum(r.num_tokens for r in results)
    row: Row = {
        "policy": line.method,
        "verifier": line.verifier,
        "num_draft_tokens": line.width,
        "tokens_per_second": tokens / seconds,
        "tokens_per_call": statistics.fmean(r.tokens_per_call for r in results),
        "accepted_per_call": statistics.fmean(r.accepted_per_call for r in results),
    }
    if line.method == PLAIN:
        step["seconds"] = seconds / calls
        return row | {"step_ms": 1e3 * step["seconds"]}
    again = [harness.decode(line, group, meter=True) for group in range(len(runs))]
    metered = [_result(run).meter for run in again]
    row["emitted_kl_per_token"] = sum(own.kl for own in metered) / tokens
    return row | _costs(harness, results, step["seconds"])


def _costs(harness: Harness, results: list[Any], step: float) -> Row:
    """Return c and v in plain steps; on CUDA the parts of a decode are not timed one by one."""
    if harness.pair.target.device.type == "cuda":
        return {"step_ms": 1e3 * step}
    calls, drafts = (sum(getattr(r, name) for r in results) for name in
                     ("target_calls", "draft_calls"))  # fmt: skip
    spent = {part: sum(getattr(r.seconds, part) for r in results) for part in
             ("draft", "target", "verify")}  # fmt: skip
    return {
        "c": spent["draft"] / drafts / step,
        "v": spent["target"] / calls / step,
        "step_ms": 1e3 * step,
        "verify_ms": 1e3 * spent["verify"] / calls,
    }


def _result(run: Decoded) -> Any:
    assert run.result is not None
    return run.result


def _score(tokenizer: Any, outputs: list[list[int]], answers: list[str]) -> Row:
    """Return the share of texts whose last number is that of the answer."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    right = [final_number(a) == final_number(b) for a, b in zip(texts, answers, strict=True)]
    return {"score": sum(right) / len(right), "scored": len(right)}


def final_number(text: str) -> float | None:
    """Return the first number after ``####``, else the text's last number, None without one."""
    marked, every = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    chosen = marked[:1] or every[-1:]
    return float(chosen[0].replace(",", "")) if chosen else None


def _texts(settings: Settings, count: int) -> tuple[list[str], list[str]]:
    """Return prompts and their answers; no answers unless every line has a question and one."""
    path = settings.prompts or PROMPTS
    prompts = prompts_of(path)[:count]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    if not all({"question", "answer"} <= set(record) for record in records[:count]):
        return prompts, []
    asked = [ASK.format(question=record["question"]) for record in records[:count]]
    return asked, [str(record["answer"]) for record in records[:count]]


def _ids(tokenizer: Any, prompt: str, ask: bool) -> list[int]:
    """Return token ids; a question goes through the model's chat template if it has one."""
    if ask and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        return list(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        )
    return tokenizer(prompt)["input_ids"]
