"""Starts child processes, watches them and starts them again. Only wings above it import it."""
