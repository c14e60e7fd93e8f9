"""Check that a CUDA machine computes right, and measure its speed and its gain."""
