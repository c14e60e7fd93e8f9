"""Helpers of every other folder: arguments, files, rows, specs, tables, terminal, memory."""
