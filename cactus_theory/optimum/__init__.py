"""The theorem of the band: the best acceptance under an honest budget."""
