"""Policies and verifiers on trees of drafted paths, exactly, against the optimum of all of them."""
