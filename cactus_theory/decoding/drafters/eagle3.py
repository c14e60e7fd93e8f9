"""Draft token by token with an EAGLE-3 head on the target's hidden states.

A *unit* is the head's input for a token: the token's embedding and the target's hidden states at
the token before. For a drafted token the target has not computed states of the token before; the
output of the head's layer stands in for them. The unit of token j = 1, 2, … is in slot j − 1 of the
layer's cache: a unit has the position of its hidden states, not of its token. This has no effect,
as attention depends on differences of positions only.

Source: EAGLE-3 (Li et al., arXiv 2503.01840).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.drafters.interface import (
    DraftContext,
    Drafter,
    Drafting,
    SampledDrafting,
    nothing,
)
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.cache import RaggedCache
from cactus_theory.decoding.models.hugging_face_forward import gathered
from cactus_theory.decoding.models.llama_forward import JOINED_ENTRIES, FastForward
from cactus_theory.decoding.models.projections import Linear, packs, prepared
from cactus_theory.verify.draft import Draft


@dataclass(frozen=True)
class Eagle3Drafter(Drafter):
    """Draft with an EAGLE-3 ``head`` on the target's hidden states, one pass of the head per token.

    Tokens that the head does not score have p = 0. Nothing is drafted before the target has read
    the prompt. With ``greedy`` the likeliest token is drafted and drafts are deterministic.

    Raises
    ------
    ValueError
        When decoding begins: a head made for another target.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
    >>> from transformers import LlamaConfig
    >>> sizes = {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 256}
    >>> layer = LlamaConfig(num_hidden_layers=1, num_attention_heads=6, **sizes)
    >>> untrained = Eagle3Drafter(Eagle3Head(layer, {"draft_vocab_size": 500}, shares=True).eval())
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> ct.generate(pair.target, untrained, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    head: Any  # an Eagle3Head
    greedy: bool = False

    @classmethod
    def load(cls, folder: str | Path, *, greedy: bool = False) -> "Eagle3Drafter":
        """Return a drafter with the head in a folder, in float32; see :meth:`Eagle3Head.load`."""
        return cls(Eagle3Head.load(folder), greedy)

    def begin(self, setting: DraftContext) -> Drafting:
        return Eagle3Drafting(setting, self.head, self.greedy)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise ValueError for a target of another vocabulary, width, device or depth."""
        head, config, layers = self.head, text_config(target_model), self.reads(target_model)
        for name, of_head, of_target in (
            ("vocabulary", head.vocab, config.vocab_size),
            ("hidden size", head.hidden, config.hidden_size),
            ("device", head.fc.weight.device, target_model.device),
        ):
            if of_head != of_target:
                raise ValueError(
                    f"target_model: {name} must be that of the head, {of_head}; got {of_target}"
                )
        if not all(0 <= layer < config.num_hidden_layers for layer in layers):
            raise ValueError(
                f"target_model: must have the layers that the head reads, {list(layers)}; "
                f"got {config.num_hidden_layers} layers"
            )
        return {}

    def reads(self, target_model: Any) -> Sequence[int]:
        return self.head.layers(target_model)


def _packed(head: Eagle3Head) -> Any:
    """Return the linear map ``fc``, copied for faster calls if small or if oneDNN packs it."""
    weight = head.fc.weight
    return Linear(weight) if weight.numel() <= JOINED_ENTRIES or packs(weight) else head.fc


class Eagle3Drafting(SampledDrafting):
    """State of an EAGLE-3 head in one decode.

    A unit is a vector (2 hidden): a token's embedding, then the map ``fc`` of the target's states
    or, after a drafted token, the output of the head's layer.
    """

    def __init__(self, setting: DraftContext, head: Any, greedy: bool) -> None:
        super().__init__(setting, greedy)
        self.features, texts = setting.features, self.texts
        self.layers = head.layers(setting.target_model)
        if head.shares:
            self.embedding = setting.target_model.get_input_embeddings()
        else:
            self.embedding = head.core.model.embed_tokens
        self.fc, self.of_target = prepared(head, _packed), head.of_target
        # one layer; the K + 1 further slots are a reserve, as drafts end within the capacity
        self.cache = RaggedCache(1, texts.batch, texts.capacity + self.width + 1)
        self.forward = FastForward(head.core, self.cache)
        self.dtype = head.fc.weight.dtype

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft token by token: draw a token, then feed its embedding with the layer's output.

        First the layer reads the text's tokens whose units are not cached yet (:meth:`fresh`).
        """
        lengths = self.planned(wanted)
        if not any(lengths):
            return nothing(self.texts)
        units, counts = self.fresh(lengths)
        last_unit = [max(count - 1, 0) for count in counts]
        state = gathered(self.run(units, counts), last_unit, [1] * len(last_unit))
        self.cache.extend(counts)
        settled_lengths, tokens = list(self.cache.lengths), []
        for step in range(max(lengths)):
            if step:
                fed = [int(count > step) for count in lengths]  # 0 if the row's draft has ended
                unit = torch.cat([self.embedded(tokens[-1]), state[:, 0]], -1)
                state = self.run(unit[:, None], fed)
                self.cache.extend(fed)
            self.clock.lap("draft")
            tokens.append(self.draw(self.logits(state), step, lengths, coins[:, step]))
        # units of drafted tokens hold the layer's output in place of the target's states
        for row, length in enumerate(settled_lengths):
            self.cache.rollback(row, length)
        self.clock.lap("draft")
        return Draft(torch.stack(tokens, 1), lengths, self.rows(len(tokens)))

    def planned(self, wanted: Sequence[int]) -> list[int]:
        """Return the number of tokens that each row may draft: 0 if target states are missing."""
        read = [0] * len(wanted) if self.features is None else self.features.lengths
        rows = zip(wanted, read, self.texts.lengths, strict=True)
        # after a round the target has states of all tokens but the last
        return [count if 0 < states == ids - 1 else 0 for count, states, ids in rows]

    def fresh(self, lengths: Sequence[int]) -> tuple[Float[Tensor, "batch most pair"], list[int]]:
        """Return the units that are not cached yet, and their counts (0 if nothing is drafted)."""
        assert self.features is not None
        starts = list(self.cache.lengths)
        rows = zip(self.features.lengths, starts, lengths, strict=True)
        counts = [read - start if drafted else 0 for read, start, drafted in rows]
        # slot i takes the states of token i and the embedding of token i + 1
        states = [self.features.hidden(layer, starts, counts) for layer in self.layers]
        tokens = self.texts.take([start + 1 for start in starts], counts)
        stream = self.fc(torch.cat(states, -1).flatten(0, 1).to(self.dtype))
        return torch.cat([self.embedded(tokens), stream.view(*tokens.shape, -1)], -1), counts

    def embedded(self, tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some hidden"]:
        return F.embedding(tokens, self.embedding.weight).to(self.dtype)

    def run(self, x: Float[Tensor, "batch new pair"], counts: Sequence[int]) -> Tensor:
        """Run the layer on units after the cached ones; return states before the final norm."""
        self.calls += 1
        shape = x.shape[0], x.shape[1]
        return self.forward.run(x.reshape(-1, x.shape[-1]), shape, counts, normed=False)

    def logits(self, states: Float[Tensor, "batch some hidden"]) -> Float[Tensor, "batch some V"]:
        """Return logits over the target's vocabulary from layer outputs; −∞ for unscored tokens."""
        rows = self.forward.head(self.forward.norm(states.reshape(-1, states.shape[-1])))
        return self.of_target(rows.view(*states.shape[:2], -1))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.cache.keep(rows)
