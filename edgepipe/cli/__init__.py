"""The command line: one module per verb. Each parses, calls and prints; heavy imports happen inside commands."""
