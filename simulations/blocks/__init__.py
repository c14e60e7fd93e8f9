"""Verifying drafted paths as a whole: what it gains, on logged rows and exactly."""
