"""The model ``cactus`` for lm-evaluation-harness: decodes a task's prompts with any policy.

Importing this module registers the model (the harness 0.4.13 has no entry points).
"""

from collections.abc import Sequence
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.decoding import load_pair
from cactus_theory.decoding.hugging_face import speculative_generate
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.setting import Setting

register_model = check.optional_module("lm_eval.api.registry", "eval").register_model
HFLM: Any = check.optional_module("lm_eval.models.huggingface", "eval").HFLM

# sampling options of a task, which most tasks set to greedy search
OF_SAMPLING = ("do_sample", "temperature")


@register_model("cactus")
class Cactus(HFLM):
    """A harness model that decodes a target with a draft and a policy, and keeps the readings.

    Attributes
    ----------
    readings : counts and nats of every decoded batch.
    overruled : options of tasks that are not followed, such as greedy search.

    Raises
    ------
    ValueError
        The task scores log-likelihoods; errors of :func:`cactus_theory.generate`.
    """

    def __init__(
        self,
        target: str,
        draft: str,
        policy: str = defaults.POLICY,
        num_draft_tokens: int = defaults.NUM_DRAFT_TOKENS,
        verifier: str = defaults.VERIFIER,
        temperature: float = 1.0,
        seed: int = 0,
        dtype: str = "auto",
        device: str = "cpu",
        batch_size: int = 1,
        **others: Any,
    ) -> None:
        pair = load_pair(target, draft, device, dtype)
        own = {"backend": "causal", "batch_size": int(batch_size), "device": device}
        super().__init__(pretrained=pair.target, tokenizer=pair.tokenizer, **(own | others))
        self.draft, self.seed, self.temperature = pair.draft, int(seed), float(temperature)
        self.decoding = Setting(policy, int(num_draft_tokens), verifier).names
        self.readings: list[Reading] = []
        self.overruled: set[str] = set()
        self.texts = 0

    def _model_generate(
        self, context: Any, max_length: int, stop: Sequence[str], **options: Any
    ) -> Any:
        """Decode a batch and return the ids of prompts and answers; each text has its own seed."""
        for name in OF_SAMPLING:
            value = options.pop(name, None)
            if value not in (None, self.temperature, self.temperature > 0):
                self.overruled.add(f"{name}={value}")
        if self.temperature > 0:
            options |= {"do_sample": True, "temperature": self.temperature, "top_k": 0} | options
        else:
            options["do_sample"] = False
        seeds = [self.seed + self.texts + row for row in range(len(context))]
        self.texts += len(context)

        def ends(ids: Any, prompt_length: int) -> bool:
            answer = self.tokenizer.decode(ids[0, prompt_length:])
            return any(text in answer for text in stop if text)

        output = self.model.generate(
            input_ids=context,
            max_length=max_length,
            custom_generate=speculative_generate,
            draft_model=self.draft,
            seed=seeds,
            stop=ends,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **self.decoding,
            **options,
        )
        self.readings.append(output.result.reading)
        return output.sequences

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "tasks: must be decoded (generate_until); a task of log-likelihoods reads the target's "
            "own probabilities, where no policy enters"
        )

    loglikelihood = loglikelihood_rolling = _loglikelihood_tokens = _refused

    @property
    def spent(self) -> dict[str, float]:
        """Return nats per token, tokens per target call and tokens per answer, over all answers."""
        tokens = sum(reading.num_tokens for reading in self.readings)
        nats = sum(reading.emitted_divergence or 0.0 for reading in self.readings)
        calls = sum(reading.num_calls for reading in self.readings)
        return {
            "nats_per_token": nats / tokens,
            "tokens_per_call": tokens / calls,
            "tokens_per_answer": tokens / self.texts,
        }
