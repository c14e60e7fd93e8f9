"""Next-token rows of a real pair of models along text that the target wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Fields of a JSON line that may hold the prompt, in the order they are looked for.
PROMPT_FIELDS = ("prompt", "question", "turns", "text")
Rows = Float[Tensor, "rows vocab"]


def load_model(folder: str | Path) -> Any:
    """Return the causal language model stored in ``folder``, float32, ready for inference.

    Raises
    ------
    ValueError
        ``folder`` holds no model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"folder: must hold a Hugging Face model; got {str(folder)!r}")
    transformers = _transformers()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, local_files_only=True).eval()


def load_prompts(path: str | Path, tokenizer_folder: str | Path) -> list[list[int]]:
    """Return the token ids of each prompt of :func:`prompts_of`."""
    load = _transformers().AutoTokenizer.from_pretrained
    tokenizer = load(tokenizer_folder, local_files_only=True)
    return [tokenizer(text)["input_ids"] for text in prompts_of(Path(path))]


def prompts_of(path: Path) -> list[str]:
    """Return the prompts of a JSON-lines file (fields ``prompt``, ``question``, ``turns``).

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, a line that is no JSON object or holds no prompt.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            found.append(_prompt(path.name, number, line))
    if not found:
        raise ValueError(f"--prompts: must hold at least one line; got {path.name}, empty")
    return found


@torch.inference_mode()
def log_rows(
    target: Any, draft: Any, prompts_ids: Sequence[Sequence[int]], tokens_each: int, seed: int
) -> tuple[Rows, Rows]:
    """Sample text from the target at temperature 1 and return both models' rows along it.

    Parameters
    ----------
    target, draft : causal language models over one vocabulary of V tokens.
    prompts_ids : token ids of each prompt; only the last ones that fit are used.
    tokens_each : tokens sampled after each prompt; fewer where the text ends itself.
    seed : of the one generator that draws every token.

    Returns
    -------
    target_probs, draft_probs : (N, V) float64, row i of both given the same text; the
        log-softmax is taken in float64, so no token that has a finite logit is lost.

    Raises
    ------
    ValueError
        No prompt, an empty one, two vocabularies, or tokens_each outside the context.
    """
    _check(target, draft, prompts_ids, tokens_each)
    generator = torch.Generator().manual_seed(seed)
    room = min(model.config.max_position_embeddings for model in (target, draft)) - tokens_each
    logged: tuple[list[Tensor], list[Tensor]] = ([], [])
    for prompt in _progress(prompts_ids):
        prompt = list(prompt)[-room:]
        text = sample(target, prompt, tokens_each, generator)
        for model, rows in zip((target, draft), logged, strict=True):
            rows.append(next_token_probs(model, text)[len(prompt) - 1 : -1])
    return torch.cat(logged[0]), torch.cat(logged[1])


def sample(model: Any, prompt: Sequence[int], tokens: int, generator: torch.Generator) -> list[int]:
    """Return the prompt and up to ``tokens`` sampled ones, ending after an end-of-text token."""
    text, fresh, cache = list(prompt), list(prompt), None
    for _ in range(tokens):
        step = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        row = step.logits[0, -1].double().softmax(-1)
        fresh = torch.multinomial(row, 1, generator=generator).tolist()
        text += fresh
        if fresh[0] == model.config.eos_token_id:
            break
    return text


def next_token_probs(model: Any, text: Sequence[int]) -> Rows:
    """Return the model's row after each token of ``text``, (len(text), V) float64."""
    logits = model(torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).exp()


def _check(target: Any, draft: Any, prompts: Sequence[Sequence[int]], tokens_each: int) -> None:
    sizes = target.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"draft: must have the target's {sizes[0]} tokens; got {sizes[1]}")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts_ids: must hold prompts of at least one token; got {prompts!r}")
    most = min(model.config.max_position_embeddings for model in (target, draft)) - 1
    if not 1 <= tokens_each <= most:
        raise ValueError(f"tokens_each: must be from 1 to {most}; got {tokens_each!r}")


def _progress(prompts: Sequence[Sequence[int]]) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    shown = console.is_terminal
    return track(prompts, "logging rows", console=console, disable=not shown)


def _prompt(file: str, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts: line {number} of {file} must be JSON; {error}") from None
    record = record if isinstance(record, dict) else {}
    value = next((record[name] for name in PROMPT_FIELDS if name in record), None)
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"--prompts: line {number} of {file} must hold a text under one of "
            f"{', '.join(PROMPT_FIELDS)}; got {line[:60]!r}"
        )
    return value


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise RuntimeError("transformers is needed: pip install 'cactus-theory[llm]'") from error
    transformers.utils.logging.disable_progress_bar()  # one bar is ours
    return transformers
