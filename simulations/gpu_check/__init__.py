"""Checks and measurements of a GPU."""
