"""Synthetic pairs with dials: how far the draft is from the target, where, and for how long."""

from .rows import Dials, synthetic_rows
from .texts import Texts, synthetic_trace

__all__ = ["Dials", "Texts", "synthetic_rows", "synthetic_trace"]
