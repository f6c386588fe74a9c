"""Other nodes: their states, addresses and links, and calls to them. Knows no models."""
