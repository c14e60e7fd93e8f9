"""Small decoders over the target's hidden states, which drafters run after each verified pass.

A unit stands for a token: the states of the token *before* it, which the target has computed, and
its own embedding by the target. Unit j (token j, from 1 on) is slot j − 1 of the decoder's cache.
Units are of settled tokens, so nothing that was drafted is ever rolled back.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.base import arguments as check
from cactus_theory.base.files import first_line, write_whole
from cactus_theory.decoding.drafters._base import Drafter, SampledDrafting, Setting
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.cache import RaggedCache
from cactus_theory.decoding.models.fast import FastForward
from cactus_theory.decoding.models.linear import Linear, prepared

CONFIG, WEIGHTS = "head.json", "model.safetensors"
# what all tokens add to units is kept up to so many numbers (16 MB)
TABLE_ENTRIES = 2**22
FORMAT = 1
LAYERS = "core.model.layers."


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head: whole numbers of at least 1.

    ``vocab`` and ``hidden`` are the target's, ``reads`` the layers whose states are read. The
    decoder has ``layers`` of ``width``; its states reach the vocabulary through ``rank`` numbers.
    At most ``places`` tokens are drafted at once.
    """

    vocab: int
    hidden: int
    reads: tuple[int, ...]
    places: int = 8
    layers: int = 2
    width: int = 128
    head_size: int = 32
    rank: int = 64
    path_rank: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "reads":
                check.whole_number(name, value, 1)
        if self.width % self.head_size:
            raise ValueError(f"head_size: must divide width {self.width}; got {self.head_size}")
        if not self.reads or not all(isinstance(layer, int) for layer in self.reads):
            raise ValueError(f"reads: must be layers of the target; got {self.reads!r}")


def is_head(folder: Any) -> bool:
    """Return whether a folder says that it holds a head."""
    return (Path(folder) / CONFIG).is_file()


def described(folder: str | Path) -> dict[str, Any]:
    """Return what :meth:`FeatureHead.save` wrote beside the weights."""
    return json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))


class FeatureHead(nn.Module):
    """What block and recurrent heads share: units, a Llama-like decoder, a head of low rank."""

    kind: ClassVar[str]

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        library = check.optional_module("transformers", "llm")
        heads = shape.width // shape.head_size
        config = library.LlamaConfig(
            vocab_size=shape.rank,
            hidden_size=shape.width,
            intermediate_size=-(-8 * shape.width // 96) * 32,
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=False,
        )
        self.shape = shape
        self.features = nn.Linear(len(shape.reads) * shape.hidden, shape.width, bias=False)
        self.token = nn.Linear(shape.hidden, shape.width, bias=False)
        self.core = library.LlamaForCausalLM(config)  # its head leads from width to rank
        self.core.model.embed_tokens = nn.Embedding(shape.places, shape.width)
        self.vocabulary = nn.Linear(shape.rank, shape.vocab, bias=False)

    def units(
        self, states: Sequence[Float[Tensor, "batch some hidden"]], embedded: Tensor
    ) -> Float[Tensor, "batch some width"]:
        """Return the units of tokens with these embeddings, after tokens with these states."""
        read = torch.cat([self.normed(layer) for layer in states], -1)
        return self.features(read) + self.token(self.normed(embedded))

    def normed(self, states: Tensor) -> Tensor:
        """Return states of length √width, in the head's dtype: layers differ in scale."""
        states = states.to(self.token.weight.dtype)
        return F.rms_norm(states, states.shape[-1:])

    def save(self, folder: str | Path) -> None:
        """Write sizes and float16 weights to a folder, each file whole or not at all."""
        tensors = check.optional_module("safetensors.torch", "llm")
        weights = {
            name: weight.detach().half().contiguous() for name, weight in self.named_parameters()
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / WEIGHTS, tensors.save(weights))
        described = {"format": FORMAT, "kind": self.kind} | asdict(self.shape)
        write_whole(Path(folder) / CONFIG, (json.dumps(described, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the head that :meth:`save` wrote, float32, ready for inference.

        Raises
        ------
        ValueError
            A folder without such files, a head of another kind, weights that do not fit.
        """
        tensors = check.optional_module("safetensors.torch", "llm")
        try:
            sizes: dict[str, Any] = described(folder)
            kinds = sizes.pop("format"), sizes.pop("kind")
            sizes["reads"] = tuple(sizes["reads"])
            if kinds != (FORMAT, cls.kind):
                raise ValueError(f"format and kind must be {FORMAT}, {cls.kind!r}; got {kinds}")
            shape = HeadShape(**sizes)
            weights = tensors.load((Path(folder) / WEIGHTS).read_bytes())
            layers = {name.split(".")[3] for name in weights if name.startswith(LAYERS)}
            if len(layers) != shape.layers:
                raise ValueError(f"layers must be the {len(layers)} stored; got {shape.layers}")
            with torch.device("meta"):  # no memory is taken for weights that are only claimed
                cls(shape).load_state_dict(weights, assign=True)
            head = cls(shape)
            head.load_state_dict(weights)
        except Exception as error:  # JSON, safetensors, OS and shape errors share no narrower base
            raise ValueError(
                f"folder: must hold a {cls.kind} head; got {type(error).__name__}: "
                f"{first_line(error)} in {str(folder)!r}"
            ) from error
        return head.eval().requires_grad_(False)

    def check(self, target_model: Any) -> None:
        """Raise ValueError for a target of another vocabulary, width or device."""
        config, shape, device = text_config(target_model), self.shape, self.token.weight.device
        for name, of_head, of_target in (
            ("vocabulary", shape.vocab, config.vocab_size),
            ("hidden size", shape.hidden, config.hidden_size),
            ("device", device, target_model.device),
        ):
            if of_head != of_target:
                raise ValueError(
                    f"target_model: {name} must be that of the head, {of_head}; got {of_target}"
                )


def packed_maps(
    head: FeatureHead, embedding: Float[Tensor, "vocab hidden"]
) -> tuple[dict[str, Linear], Tensor | None]:
    """Return a head's linear maps outside its decoder, by name, packed for a few rows.

    And what every token adds to a unit (V, width); None where that is much memory.
    """
    parts = {name: part for name, part in head.named_children() if type(part) is nn.Linear}
    maps = {name: Linear(part.weight, part.bias) for name, part in parts.items()}
    small = len(embedding) * head.shape.width <= TABLE_ENTRIES
    return maps, maps["token"](head.normed(embedding)) if small else None


class FeatureDrafting(SampledDrafting):
    """A head at work: its cache of units, and what is left to feed it."""

    def __init__(self, setting: Setting, head: FeatureHead, greedy: bool) -> None:
        super().__init__(setting, greedy)
        self.head, self.features, texts = head, setting.features, self.texts
        self.embedding = setting.target_model.get_input_embeddings()
        self.maps, self.table = prepared(head, packed_maps, self.embedding.weight)
        self.cache = RaggedCache(
            head.shape.layers, texts.batch, texts.capacity + head.shape.places + 1
        )
        self.forward = FastForward(head.core, self.cache)

    def planned(self, wanted: Sequence[int]) -> list[int]:
        """Return how many tokens each row may draft: none before its states are there."""
        places = self.head.shape.places - self.next_row
        read = [0] * len(wanted) if self.features is None else self.features.lengths
        rows = zip(wanted, read, self.texts.lengths, strict=True)
        return [min(most, places) if 0 < states == ids - 1 else 0 for most, states, ids in rows]

    def fresh(self, lengths: Sequence[int]) -> tuple[Float[Tensor, "batch most width"], list[int]]:
        """Return the units that are not cached yet, none of rows that draft nothing."""
        assert self.features is not None
        starts = list(self.cache.lengths)
        rows = zip(self.features.lengths, starts, lengths, strict=True)
        counts = [(read - start) * bool(drafted) for read, start, drafted in rows]
        states = [self.features.hidden(layer, starts, counts) for layer in self.head.shape.reads]
        tokens = self.texts.take([start + 1 for start in starts], counts)
        read = self.head.normed(torch.stack(states, 2))
        units = self.maps["features"](read.flatten(2).flatten(0, 1))
        return self.embedded(tokens).add_(units.view(*tokens.shape, -1)), counts

    def logits(self, states: Float[Tensor, "batch some width"]) -> Tensor:
        rows = self.maps["vocabulary"](self.forward.head(states.reshape(-1, states.shape[-1])))
        return rows.view(*states.shape[:2], -1)

    def run(self, x: Float[Tensor, "batch new width"], counts: Sequence[int]) -> Tensor:
        """Return the decoder's states of tokens that are fed after the cached units."""
        self.calls += 1
        return self.forward.run(x.reshape(-1, x.shape[-1]), (x.shape[0], x.shape[1]), counts)

    def embedded(self, tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some width"]:
        """Return what tokens add to units."""
        if self.table is not None:
            return F.embedding(tokens, self.table)
        rows = self.head.normed(self.embedding(tokens).flatten(0, -2))
        return self.maps["token"](rows).view(*tokens.shape, -1)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.cache.keep(rows)


class FeatureDrafter(Drafter):
    """A drafter with a ``head`` on the target's hidden states."""

    head: FeatureHead

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a target that the head was not made for."""
        self.head.check(target_model)
        return {}

    def reads(self, target_model: Any) -> Sequence[int]:
        """Return the layers that the head reads."""
        return self.head.shape.reads
