"""Run a notebook without Jupyter, and write what its cells print and draw back into it."""
