"""Acceptance-policy design as convex programs: the references the closed forms answer to."""
