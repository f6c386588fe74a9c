"""Other nodes: their states, addresses, links and the calls to them. Knows no models."""
