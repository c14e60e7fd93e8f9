"""Tasks of lm-evaluation-harness by any policy; a score of GSM8K's answers."""
