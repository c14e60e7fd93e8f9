"""Log traces of a pair of models, and replay policies and verifiers on them."""
