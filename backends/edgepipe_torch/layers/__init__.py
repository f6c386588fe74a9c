"""What every device shares: layers of specs, weights on their way to them, KV pools, states, steps."""
