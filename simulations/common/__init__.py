"""Code that the simulations share: inputs, one decode harness, job grid, journal, output."""
