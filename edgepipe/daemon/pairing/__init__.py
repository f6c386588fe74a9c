"""Joins machines to a cluster, on the side of the host and of the joining machine. Knows no models."""
