"""Starts child processes, watches them and starts them again. Knows no models."""
