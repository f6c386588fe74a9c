"""This machine: its data folder, keys, logs, sleep and installed backends. Imports no other subpackage of ``daemon``."""
