"""Joins machines to a cluster, on the host's side and on the guest's. Knows no models."""
