"""Models on this node's disk, and their transfer between nodes. Knows no engines."""
