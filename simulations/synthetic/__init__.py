"""Synthetic pairs with dials: how far the draft is from the target, where, and for how long."""

from .rows import Dials, Texts, synthetic_rows, synthetic_trace

__all__ = ["Dials", "Texts", "synthetic_rows", "synthetic_trace"]
