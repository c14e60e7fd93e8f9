"""Is what an engine writes the law that it claims? Evidence that may be read at any time."""
