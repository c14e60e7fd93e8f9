"""The shapes of Llama-like models, and what one forward pass of them reads and multiplies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model.

    Attributes
    ----------
    hidden : width of the residual stream.
    layers, heads, kv_heads, head : decoder layers, query heads, key and value heads, head size.
    inner : units of each gated MLP.
    vocab : rows of the embedding and of the output projection.
    tied : whether these two are one matrix.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int
    tied: bool = False

    @property
    def layer_weights(self) -> int:
        """Return the weights of one decoder layer."""
        turned = (2 * self.heads + 2 * self.kv_heads) * self.head * self.hidden
        return turned + 3 * self.inner * self.hidden + 2 * self.hidden

    @property
    def read_weights(self) -> int:
        """Return the weights that a forward pass reads whole: all but a separate embedding."""
        return self.layers * self.layer_weights + (self.vocab + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return self.read_weights + (0 if self.tied else self.vocab * self.hidden)

    @property
    def cached(self) -> int:
        """Return the numbers that the cache holds for one position."""
        return 2 * self.layers * self.kv_heads * self.head


# as the models of these names have them; every vocabulary is Qwen's, so that any two are a pair
SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 151_936),  # Llama 3 8B
    "14b": Shape(5120, 40, 40, 8, 128, 17408, 151_936),  # Qwen3 14B
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, tied=True),  # Qwen3 0.6B
    "tiny": Shape(216, 12, 6, 3, 128, 528, 2176),
    "tiny-draft": Shape(160, 2, 8, 4, 64, 384, 2176, tied=True),
}


@dataclass(frozen=True)
class Cost:
    """What one forward pass moves and computes: ``bytes`` of memory traffic, ``flops``."""

    bytes: float
    flops: float


def step_cost(
    shape: Shape, context: int, *, batch: int = 1, tokens: int = 1, width: int = 2
) -> Cost:
    """Return the least cost of a forward pass of ``tokens`` new tokens a row after ``context``.

    Every weight is read once, an embedding row and the cached keys and values of each position
    are read once a token or row, new ones are written; a multiply-add is two operations.
    Activations are left out: under 1 % of the bytes at the named large shapes for few rows.

    Parameters
    ----------
    width : bytes a number, 2 in bfloat16.
    """
    rows = batch * tokens
    moved = shape.read_weights + rows * shape.hidden + batch * (context + tokens) * shape.cached
    multiplied = rows * (shape.read_weights - (2 * shape.layers + 1) * shape.hidden)
    # token i attends to context + i + 1 positions, in its scores and in its values
    seen = batch * (tokens * context + tokens * (tokens + 1) // 2)
    attended = 2 * seen * shape.layers * shape.heads * shape.head
    return Cost(float(moved * width), float(2 * (multiplied + attended)))
