"""What every other folder stands on: arguments, files, rows, specs, tables, terminal, memory."""
