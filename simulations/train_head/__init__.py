"""Train an EAGLE-3 head for any Llama-like target, on texts that the target writes."""
