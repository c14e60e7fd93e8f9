"""The numbers of the figures and of the README's tables, as CSV."""
