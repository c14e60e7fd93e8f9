"""Policies inside serving engines; nothing here loads an engine before it is asked to."""
