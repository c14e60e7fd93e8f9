"""Experiments on real and tiny models; every figure's numbers are written here."""
