"""Figures drawn from committed CSV; nothing here computes."""
