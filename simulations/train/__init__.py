"""Train a target and its draft on texts, or an EAGLE-3 head on what a target writes."""
