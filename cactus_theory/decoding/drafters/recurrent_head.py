"""A small decoder over the target's hidden states: its sizes, its network and its folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cactus_theory.base import arguments as check
from cactus_theory.base.files import first_line, write_whole
from cactus_theory.decoding.models import text_config

CONFIG, WEIGHTS = "head.json", "model.safetensors"
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


class RecurrentHead(nn.Module):
    """The network of a :class:`RecurrentDrafter`: a Llama-like decoder, a head of low rank.

    It reads units. A unit stands for a token: the states of the token *before* it, which the
    target has computed, and its own embedding by the target.
    """

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
        self.core.model.embed_tokens = nn.Embedding(shape.places, shape.width)  # never read
        self.vocabulary = nn.Linear(shape.rank, shape.vocab, bias=False)
        self.state = nn.Linear(shape.width, shape.width, bias=False)

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

    def logits(self, states: Float[Tensor, "*some width"]) -> Float[Tensor, "*some vocab"]:
        """Return the logits of the token after these states."""
        return self.vocabulary(self.core.lm_head(states))

    def save(self, folder: str | Path) -> None:
        """Write sizes and float16 weights to a folder, each file whole or not at all."""
        tensors = check.optional_module("safetensors.torch", "llm")
        weights = {
            name: weight.detach().half().contiguous() for name, weight in self.named_parameters()
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / WEIGHTS, tensors.save(weights))
        sizes = {"format": FORMAT} | asdict(self.shape)
        write_whole(Path(folder) / CONFIG, (json.dumps(sizes, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the head that :meth:`save` wrote, float32, ready for inference.

        Raises
        ------
        ValueError
            A folder without such files, another format, weights that do not fit.
        """
        tensors = check.optional_module("safetensors.torch", "llm")
        try:
            sizes = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
            sizes["reads"] = tuple(sizes["reads"])
            if (stored := sizes.pop("format")) != FORMAT:
                raise ValueError(f"format must be {FORMAT}; got {stored!r}")
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
                f"folder: must hold a head; got {type(error).__name__}: {first_line(error)} "
                f"in {str(folder)!r}"
            ) from error
        return head.eval().requires_grad_(False)

    def check(self, target_model: Any) -> None:
        """Raise ValueError for a target of another vocabulary, width or device."""
        check_fit(target_model, self.shape.vocab, self.shape.hidden, self.token.weight.device)


def check_fit(target_model: Any, vocab: int, hidden: int, device: torch.device) -> None:
    """Raise ValueError for a target of another vocabulary, width or device than a head's."""
    config = text_config(target_model)
    for name, of_head, of_target in (
        ("vocabulary", vocab, config.vocab_size),
        ("hidden size", hidden, config.hidden_size),
        ("device", device, target_model.device),
    ):
        if of_head != of_target:
            raise ValueError(
                f"target_model: {name} must be that of the head, {of_head}; got {of_target}"
            )
