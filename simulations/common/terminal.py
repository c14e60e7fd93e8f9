"""The package's own tables for the terminal, under the name that simulations know them by."""

from cactus_theory.base.tables import fitted, rule, shown, text_table, width_of_terminal

__all__ = ["fitted", "rule", "shown", "text_table", "width_of_terminal"]
