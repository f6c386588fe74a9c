"""The device of this node: its stage processes, memory and measured layer times. Knows no engines."""
