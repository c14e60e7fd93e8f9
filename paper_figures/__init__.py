"""Draw the project's figures from committed CSV files; no result is computed here."""
