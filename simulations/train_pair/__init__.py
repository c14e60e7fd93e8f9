"""Train, distil and ship our own pair of small language models."""
