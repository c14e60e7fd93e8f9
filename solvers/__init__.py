"""Acceptance policies as convex programs: the references that closed forms are tested against."""
