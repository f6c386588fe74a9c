"""Members of the cluster: membership (a pure core), discovery, heartbeats, trust, pairing."""
