"""Write a trace, from a decode of a target with a draft, or from cycles of another engine."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding.drafters import Drafter, as_drafter
from cactus_theory.decoding.generate import decode
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.options import Callbacks, DecodeOptions
from cactus_theory.decoding.prepare import dtype_of_pair, opened_texts
from cactus_theory.decoding.probabilities import checked_temperature
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.policies import Policy
from cactus_theory.traces.cells import REST
from cactus_theory.traces.folder import CUT, CYCLES, Folder, Header
from cactus_theory.traces.replays import greedy_policy
from cactus_theory.traces.shard import DTYPES, Cycle
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Draft

# first entries of each weight tensor that :func:`identity` reads: in two models they differ
WEIGHT_ENTRIES = 8
OnText = Callable[[int, int], Any]


def log_trace(
    target_model: Any,
    draft_model: Any,
    prompts_ids: Sequence[Sequence[int]],
    folder: str | Path,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    cycles: int | None = None,
    texts: int = 1,
    dtype: str | None = None,
    temperature: float = defaults.TEMPERATURE,
    eos_token_ids: int | Iterable[int] | None = None,
    seed: int = 0,
    policy: str | Policy = defaults.POLICY,
    verifier: str | Verifier = defaults.VERIFIER,
    cuts: Cuts = WHOLE,
    cut: bool = False,
    on_text: OnText | None = None,
) -> Trace:
    """Decode prompts with a draft, and log all rows of every round, also rows after a rejection.

    By default the decode is lossless: policy ``speculative``, verifier ``chain``. At temperature 0
    the policy is ``regret:price=inf``, which is strict greedy decoding, and the target's rows are
    logged at temperature 1. Every round drafts ``num_draft_tokens`` tokens if the drafter can, also
    the last round of a text. A text's file is written when the text has ended. If a run is killed,
    a call with equal arguments goes on after the last file. The trace is then byte for byte the
    same as without the interruption. A call with fewer ``cycles`` finishes the trace earlier.

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    draft_model : a causal LM with the target's vocabulary, or a drafter such as ``NGram()``.
    prompts_ids : token ids of each prompt; text i continues prompt i modulo the number of prompts.
    folder : an empty folder, or the folder of this trace; it is made if it does not exist.
    num_draft_tokens : K ≥ 1, the number of drafted tokens of a round.
    max_new_tokens : most new tokens of a text; the prompt, max_new_tokens and K together must fit
        into both models' positions.
    cycles : least number of rounds to log, over all texts; None to decode each prompt once. Texts
        are not cut short, and prompts are used again if need be.
    texts : least number of texts to log.
    dtype : float16 or float32, of the logged log-probabilities. With float16, replayed tokens and
        divergences of the shipped pair (150 cycles, five policies) changed by at most 1e-4 of their
        values. None: float16; at temperature 0 float32, because rounding would make ties.
    temperature, cuts : temperature and truncation of both models' rows.
    eos_token_ids : tokens that end a text, ``()`` for none; the target's by default.
    seed : text i is decoded with the seed ``seed + i``.
    policy : policy of the decode, which determines where rounds start. Set it if rounds are to
        start where those of a given policy do. At temperature 0 it must be charged in regret.
    verifier : verifier of the decode.
    cut : store the likeliest tokens of a row one by one and all others in cells of similar
        probabilities (TRACES.md describes the format), in about a twentieth of the size.
    on_text : called with the numbers of cycles and texts so far, at the start and after each text.

    Raises
    ------
    ValueError
        A folder that holds a different trace or other files, or to which another process writes; an
        unknown dtype; a drafter of trees; and as :func:`cactus_theory.generate`.
    OSError
        Files that cannot be written.
    ModuleNotFoundError
        safetensors is not installed (extra llm).

    Examples
    --------
    >>> prompts, sizes = [[1, 2], [3, 4]], {"num_draft_tokens": 2, "max_new_tokens": 6}
    >>> trace = log_trace(pair.target, pair.draft, prompts, "log", **sizes)
    >>> trace.texts, trace.num_draft_tokens
    (2, 2)
    """
    check.optional_module("safetensors.torch", "llm")
    if not checked_temperature(temperature):
        policy = greedy_policy(policy)
    setting = Setting(policy, num_draft_tokens, verifier, temperature, cuts)
    # ``drafter`` also cuts the draft's rows; the header holds draft and cuts separately
    drafter, uncut = setting.drafter(draft_model), as_drafter(draft_model)
    prompts = [[int(token) for token in prompt] for prompt in prompts_ids]
    sizes = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens}
    for name, size in sizes.items():
        check.whole_number(name, size, 1)
    if cycles is not None:
        check.whole_number("cycles", cycles, 1)
    texts = check.whole_number("texts", texts, 1)
    if cycles is None:  # each prompt once
        texts = max(texts, len(prompts))
    options = DecodeOptions(
        **setting.keywords,
        # the last round drafts K tokens, too; ``stop`` in _cycles ends the text
        max_new_tokens=max_new_tokens + num_draft_tokens,
        eos_token_ids=eos_token_ids,
        meter=False,
    ).at_ends_of(target_model)
    _check(target_model, drafter, prompts, options)
    usual_dtype = "float16" if temperature else "float32"
    header = Header(
        vocab_size=text_config(target_model).vocab_size,
        num_draft_tokens=num_draft_tokens,
        dtype=check.one_of("dtype", dtype or usual_dtype, tuple(DTYPES)),
        target=name_of(target_model),
        draft=name_of(draft_model),
        temperature=float(temperature),
        seed=check.whole_number("seed", seed, 0),
        eos_token_ids=sorted(options.ends(target_model)),
        details={
            "model_dtype": dtype_of_pair(target_model, drafter),
            "target_weights": identity(target_model),
            "draft_weights": identity(uncut),
            "prompts": len(prompts),
            "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "max_new_tokens": max_new_tokens,
            CYCLES: cycles,
            **({CUT: REST} if cut else {}),
            "policy": options.policies[0].spec,
            "verifier": options.parsed_verifier.spec,
            **vars(cuts),
        },
    )
    with Folder(Path(folder), header) as writer:
        while not writer.finished:
            if on_text is not None:
                on_text(writer.cycles, writer.texts)
            if writer.texts >= texts and writer.cycles >= (cycles or 0):
                writer.finish()
            else:
                prompt, pair = prompts[writer.texts % len(prompts)], (target_model, drafter)
                writer.add(_cycles(header, pair, prompt, options, writer.texts))
    return Trace.open(writer.path)


def save_trace(
    folder: str | Path,
    texts: Iterable[Sequence[Cycle]],
    *,
    vocab_size: int,
    num_draft_tokens: int,
    dtype: str = "float32",
    target: str = "target",
    draft: str = "draft",
    temperature: float = 1.0,
    eos_token_ids: Sequence[int] = (),
    cuts: Cuts | None = None,
    cut: bool = False,
) -> Trace:
    """Write given cycles, such as those of another engine, as a trace.

    Parameters
    ----------
    folder : a new or empty folder.
    texts : the cycles of each text; the field ``text`` of a cycle is not read.
    vocab_size : V.
    num_draft_tokens : K, the most drafted tokens of a cycle.
    dtype : float16 or float32, of the stored log-probabilities.
    target, draft : names of the two models.
    temperature : of the decode; at temperature 0 the target rows must be those at temperature 1.
    eos_token_ids : tokens that end a text.
    cuts : truncation of the rows; None if unknown.
    cut : as for :func:`log_trace`.

    Raises
    ------
    ValueError
        A folder that is not empty, an unknown dtype, rows that are not distributions.

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> cycle = Cycle(0, 0, torch.tensor([1]), rows, rows[:1])
    >>> trace = save_trace("mine", [[cycle, cycle], [cycle]], vocab_size=2, num_draft_tokens=1)
    >>> round(replay(trace, "speculative").tokens_per_call.value, 4)
    2.0
    """
    ends = list(eos_token_ids)
    details = ({} if cuts is None else dict(vars(cuts))) | ({CUT: REST} if cut else {})
    header = Header(
        vocab_size, num_draft_tokens, dtype, target, draft, temperature, 0, ends, details
    )
    with Folder(Path(folder), header) as writer:
        if writer.finished or writer.texts:
            raise ValueError(f"folder: must be empty; {folder} holds a trace")
        for cycles in texts:
            writer.add(cycles)
        writer.finish()
    return Trace.open(writer.path)


def log_shown(
    pair: Any, prompts_ids: Sequence[Sequence[int]], folder: str | Path, cycles: int, **options: Any
) -> Trace:
    """Call :func:`log_trace` for a loaded pair with a progress line, and return the trace."""
    options = {"draft_model": pair.draft} | options
    options["on_text"] = Progress("logging cycles", cycles).texts
    return log_trace(pair.target, prompts_ids=prompts_ids, folder=folder, cycles=cycles, **options)


def _cycles(
    header: Header, pair: tuple[Any, Drafter], prompt: list[int], options: DecodeOptions, text: int
) -> list[Cycle]:
    """Decode one text and return its cycles, one for each round."""
    max_new_tokens = header.details["max_new_tokens"]
    cycles: list[Cycle] = []

    # the batch is one text, so ``earlier`` has one number: its new tokens before the round
    def keep(q: Tensor, draft: Draft, texts: list[int], earlier: list[int]) -> None:
        cycles.append(Cycle.of(text, earlier[0], q, draft))

    options = replace(
        options,
        seed=header.seed + text,
        stop=lambda ids, prompt_length: ids.shape[1] - prompt_length >= max_new_tokens,
        callbacks=Callbacks(on_rows=keep),
    )
    decode(*pair, torch.tensor([prompt], device=pair[0].device), options)
    return cycles


def _check(target: Any, drafter: Drafter, prompts: list[list[int]], options: DecodeOptions) -> None:
    """Raise an error at the start for prompts or options that would fail at a later text."""
    if not prompts:
        raise ValueError("prompts_ids: must hold at least one prompt; got none")
    if any(drafter.nodes(depth) > depth for depth in (1, 2)):  # a path has one node at each depth
        name = type(drafter).__name__
        raise ValueError(f"draft_model: must draft one path; {name} drafts trees")
    models = {"target_model": target} | drafter.check(target)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts_ids: every prompt must hold a token; prompt {number} is []")
        opened_texts(models, torch.tensor([prompt], device=target.device), options)


def name_of(thing: Any) -> str:
    """Return the name of a model's folder without its path; without a folder, the class's name.

    A drafter with a model has the model's name.
    """
    model = getattr(thing, "model", thing) if isinstance(thing, Drafter) else thing
    folder = Path(str(getattr(model, "name_or_path", "") or "")).name
    return folder or type(model).__name__


def identity(thing: Any) -> str:
    """Return a text that identifies a model, or a drafter and its options, to compare runs."""
    if hasattr(thing, "state_dict"):
        return _weights(thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        options = (
            f"{field.name}={identity(getattr(thing, field.name))}" for field in fields(thing)
        )
        return f"{type(thing).__name__}({', '.join(options)})"
    if isinstance(thing, list | tuple):
        return f"({', '.join(map(identity, thing))})"
    if isinstance(thing, int | float | str | bool) or thing is None:
        return repr(thing)
    return type(thing).__name__


def check_weights(
    name: str, weights: Mapping[str, Any], target_model: Any, draft_model: Any
) -> None:
    """Raise ValueError unless the models are those with which a file was made.

    ``weights`` holds the file's ``target_weights``, ``draft_weights`` and ``model_dtype``; ``name``
    names the file in messages.
    """
    drafter = None if draft_model is None else as_drafter(draft_model)
    dtype = dtype_of_pair(target_model, drafter)
    if weights.get("model_dtype", dtype) != dtype:
        raise ValueError(
            f"{name}: was made in {weights['model_dtype']}; got models in {dtype} (--dtype)"
        )
    for part, thing in (("target", target_model), ("draft", drafter)):
        if thing is None:  # the target decodes alone
            continue
        expected, actual = weights.get(f"{part}_weights"), identity(thing)
        if expected is not None and expected != actual:
            got = f"{name_of(thing)}, weights {actual}"
            raise ValueError(
                f"{name}: was made for another {part} ({expected}); got {got}. "
                "Are target and draft swapped?"
            )


def _weights(model: Any) -> str:
    """Return the model's class and a digest of names, shapes and first entries of its weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, Tensor):  # packed weights of quantised layers
            digest.update(f"{name} {weight}\n".encode())
            continue
        first = weight.flatten()[:WEIGHT_ENTRIES].double().cpu().tolist()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {first}\n".encode())
    return f"{type(model).__name__}:{digest.hexdigest()[:16]}"
