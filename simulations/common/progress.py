"""The package's own progress display, under the name that simulations know it by."""

from cactus_theory.base.terminal import Progress

__all__ = ["Progress"]
