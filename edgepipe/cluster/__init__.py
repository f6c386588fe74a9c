"""Who is in the cluster: membership (a pure core), discovery, heartbeats."""
