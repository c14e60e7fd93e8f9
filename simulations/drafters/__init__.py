"""Drafters of one target beside each other, and the losses that they are trained by."""
