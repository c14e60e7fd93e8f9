"""Measure the end-to-end speed of policies and baselines, with nats and quality."""
