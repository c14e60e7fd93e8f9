"""Check that a CUDA machine computes correctly, and measure the speed of kernels and decodes."""
