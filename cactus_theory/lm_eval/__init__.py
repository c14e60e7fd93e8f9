"""Run tasks of lm-evaluation-harness with any policy; score GSM8K and IFEval by our own checks."""
