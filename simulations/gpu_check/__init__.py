"""One command that says whether a CUDA machine is right, how fast it is and what it gains."""
