"""The pages of the public names, out of their docstrings."""
