"""Several drafts and trees of them: what other verifiers do, and what trees gain."""
