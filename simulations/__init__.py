"""Experiments on real and synthetic models; every figure's numbers are written here."""
