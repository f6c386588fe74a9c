"""This machine: its data folder, keys, logs, sleep and installed backends. Imports nothing else of ``daemon``."""
