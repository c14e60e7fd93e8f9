"""Second stage of a decode: check models and prompts, and set up texts, processors and meter."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.decoding.assignment import policies_of
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.meter import Meter, TokenLog
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.processors import Processors, refuse
from cactus_theory.decoding.text import Texts
from cactus_theory.policies import Policy
from cactus_theory.policies.rule import FunctionPolicy

# half-precision dtype → torch's names of the CPU instructions for it: of x86-64, then of ARM
HALF = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


class Opening:
    """A decode before its first round: checked models, texts, policies, processors and meter.

    ``models`` are the checked models, by the name of their argument. A round drafts a path of at
    most ``width`` tokens, and at most ``beside`` further tokens (nodes of a tree).
    """

    def __init__(
        self, target_model: Any, draft_model: Any, input_ids: Tensor, options: DecodeOptions
    ) -> None:
        self.target_model, self.options = target_model, options
        self.drafter = None if draft_model is None else as_drafter(draft_model)
        self.models = {"target_model": target_model}
        self.width, self.beside, metered = 0, 0, None
        if self.drafter is not None:
            self.models |= self.drafter.check(target_model)
            # no memory for drafts longer than the text
            self.width = min(options.num_draft_tokens, options.max_new_tokens)
            metered = options.metered
            depths = range(1, self.width + 1)
            self.beside = max(self.drafter.nodes(depth) - depth for depth in depths)
        self.texts = opened_texts(self.models, input_ids, options, self.beside)
        self.policies = policies_of([text.rule for text in self.texts.all])
        batch = self.texts.batch
        processors = Processors(options.logits_processor, batch, self.drafter is not None)
        if self.drafter is not None:
            _check_support(self.policies, processors)
            if not options.temperature and not options.relaxes_greedy:
                _warn_of_nothing_relaxed(self.policies, text_config(target_model).vocab_size)
        soft = options.relaxes_greedy and self.drafter is not None
        self.warp = Warp(options.temperature, processors, soft)
        self.meter: Meter | None = None
        if metered is not None:
            log = TokenLog(batch, options.max_new_tokens, options.log_probs)
            self.meter = Meter(metered, log)


def _check_support(policies: Sequence[Policy], processors: Processors) -> None:
    """Raise ValueError if a policy may emit tokens that an unknown processor forbids.

    Such a processor (a *stranger* in ``processors``) would then be called with a token that it had
    forbidden.
    """
    for policy in policies if processors.strangers else ():
        if policy.declares.support == "free":
            reason = f"may forbid tokens, which {policy.spec} may emit; take one of support=target"
            refuse(processors.strangers, reason)


def _warn_of_nothing_relaxed(policies: Sequence[Policy], vocab: int) -> None:
    """Warn of a lossy policy that is lossless at temperature 0, where rows are one-hot."""

    def row(*probs: float) -> Tensor:
        likeliest = torch.tensor(probs, dtype=torch.float64, device="cpu")
        return torch.nn.functional.pad(likeliest, (0, max(vocab - len(probs), 0)))

    one_hot, soft, p = row(1.0, 0.0, 0.0), row(0.5, 0.3, 0.2), row(0.2, 0.3, 0.5)
    for policy in policies:
        if isinstance(policy, FunctionPolicy):
            continue  # a user's function is not called on rows outside the decode
        keeps_one_hot, keeps_soft = (torch.equal(policy.emitted(q, p), q) for q in (one_hot, soft))
        if keeps_one_hot and not keeps_soft:
            warnings.warn(
                f"policy: {policy.spec} relaxes nothing at temperature 0, where rows are one-hot; "
                "regret:price=20 does, by 20 tokens a nat of regret",
                stacklevel=5,
            )
            return


def opened_texts(
    models: dict[str, Any], input_ids: Tensor, options: DecodeOptions, beside: int = 0
) -> Texts:
    """Return the prompts as texts with room for new tokens, checked against the models.

    ``beside`` is the most tokens that a round may draft beside a path, as further nodes of a tree.
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
    visible = _visible(input_ids, options.attention_mask)
    rows = zip(input_ids.tolist(), visible, strict=True)
    device = models[first].device
    return Texts(
        [[*compress(ids, mask)] for ids, mask in rows],
        options.max_new_tokens,
        options.ends(models[first]),
        device,
        beside=beside,
        given=None if all(map(all, visible)) else input_ids.to(device),
        policies=options.policies,
        seeds=options.seeds,
        stop=options.stop,
    )


def _visible(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[bool]]:
    """Return the attention mask as a list of booleans for each prompt; raise for a wrong mask."""
    batch, length = input_ids.shape
    if attention_mask is None:
        return [[True] * length] * batch
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask: shape must be that of input_ids {(batch, length)}; "
            f"got {tuple(attention_mask.shape)}"
        )
    visible = attention_mask.bool().tolist()
    for row, mask in enumerate(visible):
        if not mask[-1]:
            raise ValueError(
                "attention_mask: must be 1 on the last token of a prompt (pad in front); "
                f"got 0 in row {row}"
            )
    return visible


def _check_prompt(input_ids: Any) -> None:
    tensors.check_tensor("input_ids", input_ids, "an int64 tensor", torch.int64, torch.int32)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids: shape must be (B, T) with at least one token; got {tuple(input_ids.shape)}"
        )


def _check_model(name: str, model: Any, input_ids: Tensor, max_new_tokens: int) -> None:
    for path, module in model.named_modules():  # a new adapter on a model is in training mode
        if module.training:
            raise ValueError(
                f"{name}: must be in evaluation mode, call {name}.eval(); got training"
                + (f" in {path}" if path else "")
            )
    if model.device.type == "meta":
        raise ValueError(
            f"{name}: weights must be on a device; those of {type(model).__name__} are offloaded"
        )
    if name == "draft_model":  # drafting stops where the draft's positions end
        return
    config = text_config(model)
    low, high, vocab = int(input_ids.min()), int(input_ids.max()), config.vocab_size
    if low < 0 or high >= vocab:
        raise ValueError(f"input_ids: ids must lie in [0, {vocab}); got {low if low < 0 else high}")
    longest = getattr(config, "max_position_embeddings", None)
    positions = input_ids.shape[1] + max_new_tokens
    if longest is not None and 0 < longest < positions:  # −1 stands for no limit
        raise ValueError(
            f"max_new_tokens: prompt and new tokens must fit the {longest} positions of "
            f"{name}; got {input_ids.shape[1]} + {max_new_tokens} = {positions}"
        )


def dtype_of(models: Iterable[Any]) -> str:
    """Return the name of the models' dtype; if dtypes differ, the names joined by commas."""
    return ", ".join(dict.fromkeys(str(model.dtype).removeprefix("torch.") for model in models))


def dtype_of_pair(target_model: Any, draft_model: Any) -> str:
    """Return the dtypes' names as :func:`dtype_of` does, after checking draft against target."""
    drafts = {} if draft_model is None else as_drafter(draft_model).check(target_model)
    return dtype_of([target_model, *drafts.values()])


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for a half-precision dtype.

    False if torch cannot tell.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in HALF[dtype])


def warn_of_emulation(models: Mapping[str, Any]) -> None:
    """Warn of the first model on a CPU in a half-precision dtype that the CPU emulates."""
    for name, model in models.items():
        if model.device.type == "cpu" and model.dtype in HALF and not has_instructions(model.dtype):
            warnings.warn(
                f"{name}: {type(model).__name__} runs in {dtype_of([model])} on a CPU without "
                "instructions for it, which may take longer than plain decoding in float32; load "
                "it with dtype=torch.float32",
                stacklevel=4,
            )
            return
