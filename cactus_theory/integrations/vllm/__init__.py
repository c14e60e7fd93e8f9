"""Serve with a policy of this package on vLLM."""
