"""Acceptance policies as convex programs, solved numerically to test the closed forms."""
