"""End-to-end throughput of policies and baselines, with quality beside speed."""
