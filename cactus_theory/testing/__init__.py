"""Strategies and laws for testing rules of your own; needs the extra ``testing``."""
