"""Drafters of one target beside each other."""
