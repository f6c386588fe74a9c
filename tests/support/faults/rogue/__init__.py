"""A paired machine that has turned, as a process of its own; tests start it with ``process.start_rogue``."""
