"""Train, distil and ship our own pair of small language models.

Public entry: ``python -m simulations train-pair``; see :mod:`.command`.
"""
