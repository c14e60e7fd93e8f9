"""Helpers that the other folders share: arguments, files, rows, specs, tables, terminal, memory."""
