"""Test at any time whether an engine's tokens have the law that the engine claims."""
