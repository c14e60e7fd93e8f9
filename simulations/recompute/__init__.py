"""Every committed CSV again, each by its own command, with full or with small settings."""
