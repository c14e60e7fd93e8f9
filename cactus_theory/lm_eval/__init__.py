"""Tasks of lm-evaluation-harness by any policy; scores of GSM8K and IFEval by our own checks."""
