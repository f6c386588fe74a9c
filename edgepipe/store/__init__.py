"""Models on this machine's disk: their names, the hub they come from, pulling, adopting and quantising."""
