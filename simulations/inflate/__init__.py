"""Small trained models in large shapes: the same function at the cost of an 8B, without downloads.

``inflate(model, SHAPES["8b"], device="cuda")`` returns a Hugging Face model whose logits are
those of ``model``, and whose weights, cache and arithmetic are those of the shape.
"""

from .grow import SHAPES, Cost, Shape, inflate, step_cost

__all__ = ["SHAPES", "Cost", "Shape", "inflate", "step_cost"]
