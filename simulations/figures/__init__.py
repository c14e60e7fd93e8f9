"""The numbers behind the figures and the README's tables, as CSV."""
