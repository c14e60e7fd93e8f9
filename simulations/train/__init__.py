"""Train a target and a draft on texts, or an EAGLE-3 head on texts sampled from its target."""
