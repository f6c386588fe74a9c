"""How model families write tool calls and reasoning: one module per format behind ``ChatFormat``."""
