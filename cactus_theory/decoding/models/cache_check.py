"""Check, once per model, that cached forward passes give the logits of uncached ones.

Some model families ignore the cache, count positions from a padding id, or make masks that do not
fit one call for rows of different lengths. Adapters put virtual tokens in front. So a few tokens
are run in every way in which :class:`CachedModel` uses a model. A model whose logits differ raises
an error with the reason, or decodes one text at a time. A target in single or double precision with
quantised activations raises an error, too, even if the logits of these few tokens agree. In all
functions ``whole`` are the logits of the tokens without a cache.
"""

import inspect
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.files import first_line
from cactus_theory.base.tolerances import HALF_LOGITS_TOLERANCE, LOGITS_TOLERANCE
from cactus_theory.decoding.models.cache import allocate, text_config
from cactus_theory.decoding.models.hugging_face_forward import LibraryForward, gathered
from cactus_theory.decoding.models.projections import preparation
from cactus_theory.decoding.models.recognised import changed

# tokens and rows of the check: enough for two different lengths, a prefix and a branch
TOKENS, ROWS = 8, 2
# settings of attention windows that a family applies by itself, by slot: a check with few tokens
# cannot detect them
OWN_WINDOWS = ("window_size", "attention_window", "local_attention", "attention_chunk_size")

# configuration settings that may change the check's result for models with the same embedding
DECIDING = ("num_hidden_layers", "_attn_implementation")
# inputs of a model's call that a decode sets; all others stay at the model's defaults
FED = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache")
FED += ("cache_position", "logits_to_keep", "is_first_iteration")

INSTEAD = ". Use the model's own generate instead"
HALF = (torch.float16, torch.bfloat16)
# CHANGE: relative change of embeddings; STEPS: threshold of the share in :func:`_quantised`. Shares
# measured on four models of 2 layers to 135 M parameters: .93 to 2.1 with int8 activations (ours
# and torch's, in all linear layers or the head); at most .01 without, in double precision, or with
# rounded weights
CHANGE, STEPS = 5e-4, 0.3

# reason for an error or None, whether the model may draft nevertheless, whether ragged batches run
# as one call
Answer = tuple[str | None, bool, bool]
# embedding → results of the check; a model and its first layers (EarlyExit) share an embedding.
# Results for a model with hooks or other changed objects are not kept
_KNOWN: WeakKeyDictionary[Any, dict[Any, Answer]] = WeakKeyDictionary()


def runs_together(model: Any, lossless: bool = False) -> bool:
    """Return whether rows of different lengths may run in one call; if not, decode text by text.

    Raises ValueError if cached forward passes differ from passes without a cache. With
    ``lossless`` (the model only drafts) such a difference is allowed as long as the passes run,
    since any draft distribution will do, such as that of a quantised copy.
    """
    config = text_config(model)
    key = *map(type, model.modules()), *(getattr(config, name, None) for name in DECIDING)
    change = changed(model)
    known = _KNOWN.setdefault(_anchor(model), {}) if change is None else {}
    if key not in known:
        with preparation.timed(), torch.inference_mode():
            known[key] = _answer(model, change)
    refusal, drafts, together = known[key]
    if refusal is not None and not (lossless and drafts):
        raise ValueError(
            f"model: forward passes over a cache must equal whole ones; in "
            f"{type(model).__name__} {refusal}{INSTEAD}"
        )
    return together


def _anchor(model: Any) -> Any:
    """Return the key under which a model's check is cached: its embedding, or else the model."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    return model if embedding is None else embedding


def _answer(model: Any, change: str | None) -> Answer:
    """Run the check on one model; return the result as an ``Answer``.

    The result has the reason for an error or None, whether the model may draft nevertheless, and
    whether rows of different lengths may run in one call.
    """
    ids = _ids(model)
    try:
        if added := _added(model, ids):
            return f"prepare_inputs_for_generation adds {', '.join(added)}", False, False
        whole = _whole(model, ids)
        if change and not _difference(_whole(model, ids[1:]), whole[1:]) <= _tolerance(whole):
            return f"a row's logits depend on its place in the batch: {change}", True, False
    except Exception as error:  # model families raise errors of many classes
        return f"a whole pass over token ids fails ({_named(error)})", False, False
    try:
        difference = _difference(_even(model, ids), whole)
    except Exception as error:
        return f"the cache fails ({_named(error)})", False, False
    ragged = _ragged_difference(model, ids, whole)
    refusal = None
    if _quantised(model, ids, whole, change):
        refusal = "activations are quantised, so that rounding errors move logits by whole steps"
    elif not difference <= _tolerance(whole):
        refusal = f"they differ by {difference:.2g} of the logits' size"
    # a model that is refused may still draft: its ragged pass has to run, not to be exact
    return refusal, True, ragged < math.inf if refusal else ragged <= _tolerance(whole)


def _quantised(model: Any, ids: Tensor, whole: Tensor, change: str | None) -> bool:
    """Return whether modules outside torch and transformers round activations to steps.

    If logits are a smooth function of the embeddings, doubling a small change of the embeddings
    doubles the change of the logits. The test measures how far the second
    change is from twice the first, as a share of the second, at the median token: near 0 if smooth,
    near 1 if activations are rounded, even if the tokens of the check happen to cross no step.
    """
    homes, embedding = {type(part).__module__ for part in model.modules()}, _anchor(model)
    plain = not change and all(home.startswith(("torch.nn.", "transformers.")) for home in homes)
    if plain or embedding is model or whole.dtype in HALF:
        return False

    def change_of_logits(size: float) -> Tensor:
        hook = embedding.register_forward_hook(lambda _, __, x: x + size * x.roll(1, -1))
        try:
            return _whole(model, ids) - whole
        finally:
            hook.remove()

    once, twice = change_of_logits(CHANGE), change_of_logits(2 * CHANGE)
    remainder = (twice - 2 * once).norm(dim=-1) / twice.norm(dim=-1)
    return bool(remainder.nanmedian() > STEPS)


def _ragged_difference(model: Any, ids: Tensor, whole: Tensor) -> float:
    """Return how far logits of rows of unequal lengths are from ``whole``; ∞ if they cannot run."""
    if not _may_run_together(model):
        return math.inf
    try:
        return _difference(_ragged(model, ids, whole), whole)
    except Exception:  # the model takes no such mask or positions
        return math.inf


def _may_run_together(model: Any) -> bool:
    """Return whether a check with few tokens can show that a model respects positions and mask."""
    config, parameters = text_config(model), inspect.signature(model.forward).parameters
    passes_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())  # as adapters do
    if not (passes_on or {"position_ids", "attention_mask"} <= parameters.keys()):
        return False
    if any(getattr(config, name, None) is not None for name in OWN_WINDOWS):
        return False
    of_library = type(model).__module__.startswith("transformers.")
    return of_library or getattr(config, "sliding_window", None) is None


def _ids(model: Any) -> Int[Tensor, "rows tokens"]:
    """Return the ids of the check's texts: many different ids, the padding id among them."""
    config = text_config(model)
    ids = torch.arange(ROWS * TOKENS, device="cpu").view(ROWS, TOKENS) * 7 + 3
    ids %= config.vocab_size
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < config.vocab_size:
        ids[:, 2] = pad
    return ids.to(model.device)


def _added(model: Any, ids: Tensor) -> list[str]:
    """Return the names of inputs that ``generate`` would feed and the decode loop does not."""
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return []
    cache = check.optional_module("transformers", "llm").DynamicCache()
    given = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    inputs = dict(prepare(ids.clone(), is_first_iteration=True, **given))
    added = [name for name, value in inputs.items() if name not in FED and value is not None]
    if inputs.get("past_key_values") not in (None, cache):
        added.append("past_key_values")
    return added


def _whole(model: Any, ids: Tensor) -> Float[Tensor, "rows tokens vocab"]:
    """Return the logits without a cache, by a call as in transformers' ``generate``."""
    parameters = inspect.signature(model.forward).parameters
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    options["use_cache"] = False
    accepted = {name: value for name, value in options.items() if name in parameters}
    return model(input_ids=ids, **accepted).logits


def _even(model: Any, ids: Tensor) -> Float[Tensor, "rows tokens vocab"]:
    """Return the logits of rows fed equally many tokens: several, then one, then the rest."""
    forward, logits = _forward(model), []
    for piece in ids.split([4, 1, TOKENS - 5], 1):
        counts = [piece.shape[1]] * ROWS
        logits.append(forward(piece, counts, counts))
        forward.cache.extend(counts)
    return torch.cat(logits, 1)


def _ragged(model: Any, ids: Tensor, whole: Tensor) -> Float[Tensor, "rows tokens vocab"]:
    """Return the logits of the texts, fed by unequal numbers of tokens and finally as trees."""
    forward, logits = _forward(model), whole.clone()
    for counts, keep in (([2, 4], [1, 1]), ([1, 1], [1, 1]), ([2, 1], [2, 1])):
        lengths = forward.cache.lengths
        last = forward(gathered(ids, lengths, counts), counts, keep)
        forward.cache.extend(counts)
        _write_kept(logits, forward.cache.lengths, keep, last)
    # feed a wrong token first as one branch of a tree; the second branch is the text's last tokens
    remaining = [TOKENS - length for length in forward.cache.lengths]
    tokens = gathered(ids, forward.cache.lengths, remaining)
    parents = torch.arange(-1, max(remaining), device="cpu").repeat(ROWS, 1)
    parents[:, 1] = -1
    tree = torch.cat([ids[:, :1], tokens], 1)
    last = forward(tree, [count + 1 for count in remaining], remaining, parents.to(ids.device))
    _write_kept(logits, [TOKENS] * ROWS, remaining, last)
    return logits


def _write_kept(logits: Tensor, ends: list[int], keep: list[int], last: Tensor) -> None:
    """Write ``keep[b]`` logits of row b from ``last`` into ``logits``, up to token ``ends[b]``."""
    for row, (end, count) in enumerate(zip(ends, keep, strict=True)):
        logits[row, end - count : end] = last[row, :count]


def _forward(model: Any) -> LibraryForward:
    return LibraryForward(model, allocate(model, ROWS, TOKENS + 1))


def _difference(logits: Tensor, whole: Tensor) -> float:
    """Return the RMS difference of logits from ``whole``, divided by the spread of ``whole``."""
    size = (whole - whole.mean(-1, keepdim=True)).double().square().mean()
    return float(((logits - whole).double().square().mean() / size.clamp(min=1e-300)).sqrt())


def _tolerance(like: Tensor) -> float:
    return HALF_LOGITS_TOLERANCE if like.dtype in HALF else LOGITS_TOLERANCE


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
