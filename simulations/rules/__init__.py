"""What lossy rules of engines and papers cost, and what could be had for that."""
